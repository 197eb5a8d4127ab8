"""One rank's live model, followed version by version. Knows torch and the mirror, not vLLM.

A session starts by proving its layout: what the engine's own loading has left in memory is read
back through the layout and compared with the checkpoint that was loaded. Only tensors that prove
exact are ever written to; any other is refused as soon as it would have to change. Then the
weights are brought to the mirror's version, and read back again.

Versions come in two steps: :meth:`Session.stage` while the engine serves, in a thread of its own,
and :meth:`Session.apply` while it does not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.digest import ZERO, TensorDigest
from thinwire.engines.attest import attest
from thinwire.engines.host import HostMirror
from thinwire.engines.layout import Layout, Load
from thinwire.engines.merge import merge
from thinwire.engines.proof import Proof, claims, judge, prove_from_folder, settle
from thinwire.engines.readings import report
from thinwire.engines.scatter import Staged, fill, stage
from thinwire.engines.waiting import advance_patiently
from thinwire.errors import DigestMismatch, EnginePoisoned, Misuse, SchemaMismatch
from thinwire.update import UpdateStats

__all__ = ["Gather", "Session"]

Gather = Callable[[Any], list[Any]]
"""Exchanges a picklable value with all ranks of the engine: every rank gets every rank's value."""


@dataclass(frozen=True)
class _Ready:
    """A version that only has to be written."""

    version: int
    digests: tuple[TensorDigest, ...]
    staged: Staged | None  # None: whole tensors, from the mirror


class Session:
    """A rank of an engine that follows a run.

    Args:
        module: this rank's live model.
        load: its loader.
        host: this host's mirror.
        gather: exchanges values among the engine's ranks; :meth:`start` calls it, on all of them.
        synchronize: waits until the device has done what it was told.
        freeze: start even if some tensors cannot be proved, and take them to be what they have to
            be; versions that change one of them are refused.

    Attributes:
        version: of the weights that serve now; None before :meth:`start` is through.
        poisoned: why the weights may be half a version; empty if they are not.
        refused: tensors that cannot be updated, and why.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load: Load,
        host: HostMirror,
        *,
        gather: Gather = lambda value: [value],
        synchronize: Callable[[], None] = lambda: None,
        freeze: bool = False,
    ) -> None:
        self.module = module
        self.host = host
        self.version: int | None = None
        self.poisoned = ""
        self.refused: dict[str, str] = {}
        self._load = load
        self._gather = gather
        self._synchronize = synchronize
        self._freeze = freeze
        self._layout = Layout({}, {})
        self._digests: tuple[TensorDigest, ...] = ()
        self._ready: _Ready | None = None
        self._moving = threading.Lock()
        self._thread: threading.Thread | None = None
        self._trouble = ""
        self._seconds: dict[str, float] = {}

    # --- starting -----------------------------------------------------------------------

    def start(
        self, loaded: Path | None, target: int | None = None, *, patience: float = 0.0
    ) -> int:
        """Prove the layout, catch up, and read everything back. Nothing may be generated yet.

        Args:
            loaded: folder of the checkpoint that the engine has loaded; None if it is not known:
                the weights then have to be those of the mirror's version.
            target: version to catch up with; None: the newest.
            patience: seconds to wait for a run that has no version yet.

        Returns:
            The version that the engine holds now.

        Raises:
            SchemaMismatch: the engine keeps a tensor in a way that cannot be proved.
            DigestMismatch: the weights are not the version's after all.
            Misuse: no rank writes the mirror.
            What a replica and its mirror raise.
        """
        began = time.perf_counter()
        proof = None
        if loaded is not None:
            proof = prove_from_folder(self.module, self._load, loaded)
        elif self.host.version is not None:
            proof = self._prove_from_mirror()
        self._gather(None)  # the mirror may be what was loaded: nobody moves it before all are done
        version = self._catch_up(target, patience)
        proof = proof or self._prove_from_mirror()
        self._settle(proof)
        self._bring_up(proof)
        self._check()
        self.host.forget(version)
        self.version, self._digests = version, tuple(self.host.digests)
        self._seconds["start_s"] = time.perf_counter() - began
        return version

    def _prove_from_mirror(self) -> Proof:
        with self.host.reading() as tensors:
            return judge(self.module, self._load, self.host.schema, self.host.digests, tensors)

    def _catch_up(self, target: int | None, patience: float) -> int:
        if self.host.writes:
            advance_patiently(self.host, target, patience)
        written = self._gather(self.host.version if self.host.writes else None)
        versions: list[int] = [version for version in written if version is not None]
        if not versions:
            raise Misuse(
                "another engine writes this mirror", hint="give every engine a mirror of its own"
            )
        self.host.advance(max(versions))
        return max(versions)

    def _settle(self, proof: Proof) -> None:
        """Decide which tensors are never written to, the same on all ranks."""
        schema = self.host.schema
        ranks = self._gather(claims(proof, schema))
        self.refused, nowhere = settle(ranks, schema)
        unproven = [name for name in self.refused if name not in nowhere]
        if unproven and not self._freeze:
            first = unproven[0]
            raise SchemaMismatch(
                f"{len(unproven)} of {len(schema)} tensors are kept in a way that cannot be "
                f"followed: {first}: {self.refused[first]}",
                hint="start the engine from the run's own checkpoint or mirror, unquantised; "
                "if they will never change, allow them to be left alone",
            )
        problems = {**proof.layout.problems, **self.refused}
        pieces = {n: () if n in problems else p for n, p in proof.layout.pieces.items()}
        self._layout = Layout(pieces, problems)

    def _bring_up(self, proof: Proof) -> None:
        """Write what differs between the loaded checkpoint and the mirror's version."""
        before = [proof.digests.get(spec.name, ZERO) for spec in self.host.schema]
        self._require_placed(before, self.host.digests)
        self._fill_changed(before, self.host.digests)
        self._synchronize()

    def _require_placed(self, old: Sequence[TensorDigest], new: Sequence[TensorDigest]) -> None:
        for spec, a, b in zip(self.host.schema, old, new):
            if a != b and spec.name in self.refused:
                raise SchemaMismatch(
                    f"{spec.name} changes, and cannot be placed: {self.refused[spec.name]}",
                    hint="start the engine from the mirror's folder",
                )

    def _check(self) -> None:
        wrong = self.differing()
        if wrong:
            name, reason = next(iter(wrong.items()))
            raise DigestMismatch(
                f"the engine does not hold version {self.host.version}: {name}: {reason}"
            )

    def differing(self) -> dict[str, str]:
        """Tensors that are not what the mirror holds, and how; refused ones are left out."""
        with self.host.reading() as tensors:
            verdicts = attest(
                self._layout, self.host.schema, self.host.digests, tensors.__getitem__
            )
        return {
            name: verdict.reason
            for name, verdict in verdicts.items()
            if not verdict.exact and name not in self.refused and self._layout.pieces.get(name)
        }

    # --- following ----------------------------------------------------------------------

    def stage(self, target: int | None) -> None:
        """Bring the mirror to a version and its changes to the device. The engine may serve.

        Raises:
            SchemaMismatch: a tensor that cannot be updated changes; the engine stays as it is.
            Misuse: the session has not started.
            What a replica and its mirror raise.
        """
        with self._alone():
            if self.version is None:
                raise Misuse("the engine does not follow a run yet")
            began = time.perf_counter()
            stats = self.host.advance(target)
            moved = time.perf_counter()
            version = self.host.version
            if version is None or version == self.version:
                self._ready = None
                return
            if self._ready is None or self._ready.version != version:
                self._ready = self._prepare(version)
            self._note(stats, moved - began, time.perf_counter() - moved)

    def _prepare(self, version: int) -> _Ready:
        gone = self._layout.moved(self.module)
        if gone:
            raise SchemaMismatch(
                f"the engine has exchanged the memory of {min(gone)}",
                hint="restart the engine: its layout has to be proved again",
            )
        changes = self.host.changes(self.version if self.version is not None else -1)
        digests = tuple(self.host.digests)
        if changes is None:
            self._require_placed(self._digests, digests)
            return _Ready(version, digests, None)
        with _aside(self.module):
            staged = stage(self._layout, merge(changes))
        self._synchronize()
        return _Ready(version, digests, staged)

    def _note(self, stats: UpdateStats, advance_s: float, stage_s: float) -> None:
        self._seconds.update(
            {k: v for k, v in asdict(stats).items() if k.endswith("_s")},
            advance_s=advance_s,
            stage_s=stage_s,
        )

    def stage_in_background(self, target: int | None) -> None:
        """Start :meth:`stage` in a thread; :meth:`status` tells how it goes."""
        if self._thread is not None and self._thread.is_alive():
            raise Misuse("a version is being staged already")
        self._trouble = ""
        self._thread = threading.Thread(
            target=self._stage_quietly, args=(target,), name="thinwire-stage", daemon=True
        )
        self._thread.start()

    def _stage_quietly(self, target: int | None) -> None:
        try:
            self.stage(target)
        except BaseException as error:  # noqa: BLE001 - told by status(), in the other process
            self._trouble = f"{type(error).__name__}: {error}"

    def apply(self, version: int) -> float:
        """Write a staged version. Nothing may be generated meanwhile.

        Returns:
            Seconds that it took.

        Raises:
            Misuse: the version is not staged; nothing was changed.
            EnginePoisoned: the weights may be half a version: nothing may be generated until
                :meth:`heal`.
        """
        with self._alone():
            if self.poisoned:
                raise EnginePoisoned(self.poisoned)
            if version == self.version:
                return 0.0
            ready = self._ready
            if ready is None or ready.version != version:
                raise Misuse(f"version {version} is not staged")
            began = time.perf_counter()
            try:
                if ready.staged is None:
                    self._fill_changed(self._digests, ready.digests)
                else:
                    ready.staged.write()
                self._synchronize()
            except BaseException as error:
                self.poisoned = f"version {version} was applied in part: {error}"
                raise EnginePoisoned(self.poisoned) from error
            self._arrive(ready)
            self._seconds["apply_s"] = time.perf_counter() - began
            return self._seconds["apply_s"]

    def _fill_changed(self, old: Sequence[TensorDigest], new: Sequence[TensorDigest]) -> None:
        changed = [ordinal for ordinal, (a, b) in enumerate(zip(old, new)) if a != b]
        if not changed:
            return
        with self.host.reading() as tensors:
            for ordinal in changed:
                fill(self._layout, self.host.schema[ordinal], tensors[ordinal])

    def _arrive(self, ready: _Ready) -> None:
        self.version, self._digests, self._ready = ready.version, ready.digests, None
        self.host.forget(ready.version)

    def heal(self) -> int:
        """Write every tensor from the mirror, and read all of it back. Ends being poisoned.

        Raises:
            DigestMismatch: the engine is still not what it should be.
        """
        with self._alone():
            if self.host.version is None:
                raise Misuse("the engine does not follow a run yet")
            self.poisoned = self.poisoned or "it is being healed"
            with self.host.reading() as tensors:
                for ordinal, spec in enumerate(self.host.schema):
                    if spec.name not in self.refused:
                        fill(self._layout, spec, tensors[ordinal])
            self._synchronize()
            self._check()
            self._arrive(_Ready(self.host.version, tuple(self.host.digests), None))
            self.poisoned = ""
            return self.host.version

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse instead of waiting: what asks may hold up the whole engine."""
        if not self._moving.acquire(blocking=False):
            raise Misuse("a version is being staged", hint="ask again when it is")
        try:
            yield
        finally:
            self._moving.release()

    # --- telling ------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Plain values: versions, what is under way, what went wrong, and seconds."""
        staging = self._thread is not None and self._thread.is_alive()
        return {
            "version": self.version,
            "mirror": self.host.version,
            "writes": self.host.writes,
            "staging": staging,
            "staged": None if staging or self._ready is None else self._ready.version,
            "error": "" if staging else self._trouble,
            "poisoned": self.poisoned,
            "refused": dict(self.refused),
            "seconds": dict(self._seconds),
        }

    def read(self) -> dict[str, Any]:
        """Every placed tensor's digest as it is in memory now, and what should be there.

        Readings of all ranks add up to the version's digests.
        """
        with self._alone():
            if self.version is None:
                raise Misuse("the engine does not follow a run yet")
            found = report(self._layout, self.host.schema, self._digests, self.refused)
            return {"version": self.version, **found}

    def close(self) -> None:
        """Wait for what is being staged; let go of the mirror."""
        if self._thread is not None:
            self._thread.join()
        self.host.close()


@contextlib.contextmanager
def _aside(module: torch.nn.Module) -> Iterator[None]:
    """On a GPU, a stream beside the one that the model computes on."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        yield
        return
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(beside):
        yield
