"""One rank's live model, followed version by version. Knows torch and the mirror, not vLLM.

A session starts by proving its layout: what the engine's own loading has left in memory is read
back through the layout and compared with the checkpoint that was loaded. Only tensors that prove
exact are ever written to; the rest is reloaded through the engine's own loader, if that has passed
its trial, or refused. Then the weights are brought to the mirror's version, and read back again.

Versions come in two steps: :meth:`Session.stage` while the engine serves, in a thread of its own,
and :meth:`Session.apply` while it does not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.digest import ZERO, TensorDigest
from thinwire.engines.host import HostMirror
from thinwire.engines.layout import Load
from thinwire.engines.live import LiveWeights
from thinwire.engines.merge import merge
from thinwire.engines.opening import Opening
from thinwire.engines.plan import Gather, by_pattern
from thinwire.engines.proof import Proof
from thinwire.engines.reload import Reloader
from thinwire.engines.scatter import Staged, stage
from thinwire.engines.waiting import advance_patiently
from thinwire.errors import EnginePoisoned, Misuse
from thinwire.update import UpdateStats

__all__ = ["Gather", "Session"]


@dataclass(frozen=True)
class _Ready:
    """A version that only has to be written."""

    version: int
    digests: tuple[TensorDigest, ...]
    staged: Staged | None  # None: whole tensors, from the mirror
    reload: bool = False


class Session:
    """A rank of an engine that follows a run.

    Args:
        module: this rank's live model.
        load: its loader.
        host: this host's mirror.
        gather: exchanges values among the engine's ranks; :meth:`start` calls it, on all of them.
        synchronize: waits until the device has done what it was told.
        reloader: loads whole versions for the sake of tensors that cannot be proved; it is tried
            first. None: such tensors are refused.
        freeze: start even if some tensors cannot be proved, and take them to be what they have to
            be; versions that change one of them are refused.

    Attributes:
        version: of the weights that serve now; None before :meth:`start` is through.
        poisoned: why the weights may be half a version; empty if they are not.
        weights: in memory.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load: Load,
        host: HostMirror,
        *,
        gather: Gather = lambda value: [value],
        synchronize: Callable[[], None] = lambda: None,
        reloader: Reloader | None = None,
        freeze: bool = False,
    ) -> None:
        self.module = module
        self.host = host
        self.version: int | None = None
        self.poisoned = ""
        self.weights = LiveWeights(module, host)
        self._load = load
        self._gather = gather
        self._synchronize = synchronize
        self._reloader = reloader
        self._freeze = freeze
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
        opening = Opening(
            self.module,
            self._load,
            self.host,
            loaded,
            gather=self._gather,
            reloader=self._reloader,
        )
        opening.look()
        version = self._catch_up(target, patience)
        opening.look()  # an empty mirror had nothing to compare with
        plan = opening.plan(freeze=self._freeze)
        self.weights = LiveWeights(self.module, self.host, plan, self._reloader)
        self._bring_up(opening.proof)
        self.host.forget(version)
        self.version, self._digests = version, tuple(self.host.digests)
        self._seconds["start_s"] = time.perf_counter() - began
        return version

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

    def _bring_up(self, proof: Proof) -> None:
        """Write what differs between the loaded checkpoint and the mirror's version."""
        old, new = [proof.digests.get(s.name, ZERO) for s in self.host.schema], self.host.digests
        self.weights.require_placed(old, new)
        if self.weights.takes_reload(old, new):
            self.weights.require_mirror()
            self.weights.reload()
        else:
            self.weights.fill_changed(old, new)
        self._synchronize()
        self.weights.settle()

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
        self.weights.require_memory()
        changes = self.host.changes(self.version if self.version is not None else -1)
        digests = tuple(self.host.digests)
        reload = self.weights.takes_reload(self._digests, digests)
        if reload or changes is None:
            self.weights.require_placed(self._digests, digests)
            if reload:
                self.weights.require_mirror()
            return _Ready(version, digests, None, reload)
        with _aside(self.module):
            staged = stage(self.weights.plan.layout, merge(changes))
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
                self._write(ready)
            except BaseException as error:
                self.poisoned = f"version {version} was applied in part: {error}"
                raise EnginePoisoned(self.poisoned) from error
            self._arrive(ready)
            self._seconds["apply_s"] = time.perf_counter() - began
            return self._seconds["apply_s"]

    def _write(self, ready: _Ready) -> None:
        if ready.reload:
            self.weights.reload()
        elif ready.staged is None:
            self.weights.fill_changed(self._digests, ready.digests)
        else:
            ready.staged.write()
        self._synchronize()
        if ready.reload:
            self.weights.settle()

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
            self.weights.write_all()
            self._synchronize()
            self.weights.settle()
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
            "refused": dict(self.weights.plan.refused),
            "reloaded": by_pattern(self.weights.plan.reloaded),
            "seconds": dict(self._seconds),
        }

    def read(self) -> dict[str, Any]:
        """Every placed tensor's digest as it is in memory now, and what should be there.

        Readings of all ranks add up to the version's digests.
        """
        with self._alone():
            if self.version is None:
                raise Misuse("the engine does not follow a run yet")
            mirrored = self.host.version == self.version
            return {"version": self.version, **self.weights.read(self._digests, mirrored=mirrored)}

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
