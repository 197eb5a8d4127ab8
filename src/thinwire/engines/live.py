"""A live model's memory, written, reloaded and read back as a plan says.

The mirror is where whole tensors come from, and what memory is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.digest import TensorDigest, digest_tensor
from thinwire.engines.attest import Verdict, attest
from thinwire.engines.host import HostMirror
from thinwire.engines.layout import Layout
from thinwire.engines.memory import Print, fingerprint
from thinwire.engines.plan import Plan
from thinwire.engines.readings import report
from thinwire.engines.reload import Reloader, weights
from thinwire.engines.scatter import fill
from thinwire.errors import DigestMismatch, Misuse, SchemaMismatch

__all__ = ["Digests", "LiveWeights"]

Digests = Sequence[TensorDigest]
"""Of a version, in schema order."""


class LiveWeights:
    """One rank's weights.

    Args:
        plan: what is done about each tensor; what has to be reloaded there needs a ``reloader``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        host: HostMirror,
        plan: Plan | None = None,
        reloader: Reloader | None = None,
    ) -> None:
        self.plan = plan or Plan()
        self._module = module
        self._host = host
        self._reloader = reloader
        self._remade: dict[str, Print] = {}

    # --- what a version takes -----------------------------------------------------------

    def takes_reload(self, old: Digests, new: Digests) -> bool:
        """Whether something changes that cannot be written in place."""
        return any(
            a != b and spec.name in self.plan.reloaded
            for spec, a, b in zip(self._host.schema, old, new)
        )

    def require_placed(self, old: Digests, new: Digests) -> None:
        """Raises SchemaMismatch if something changes that is left alone."""
        for spec, a, b in zip(self._host.schema, old, new):
            if a != b and spec.name in self.plan.refused:
                raise SchemaMismatch(
                    f"{spec.name} changes, and cannot be placed: {self.plan.refused[spec.name]}",
                    hint="start the engine from the mirror's folder",
                )

    def require_memory(self) -> None:
        """Raises SchemaMismatch if the engine uses other memory than it did."""
        gone = self.plan.layout.moved(self._module)
        if gone:
            raise SchemaMismatch(
                f"the engine has exchanged the memory of {min(gone)}",
                hint="restart the engine: its layout has to be proved again",
            )

    def require_mirror(self) -> None:
        """Compare the mirror with its version: what is reloaded cannot be compared afterwards.

        Raises:
            DigestMismatch: it is not what it should be.
        """
        with self._host.reading() as tensors:
            for spec, bits, digest in zip(self._host.schema, tensors, self._host.digests):
                if digest_tensor(bits) != digest:
                    raise DigestMismatch(
                        f"the mirror's {spec.name} is not that of version {self._host.version}",
                        hint="pull the mirror anew",
                    )

    # --- writing ------------------------------------------------------------------------

    def fill_changed(self, old: Digests, new: Digests) -> None:
        """Write every tensor whose digest differs, whole."""
        changed = [ordinal for ordinal, (a, b) in enumerate(zip(old, new)) if a != b]
        if not changed:
            return
        with self._host.reading() as tensors:
            for ordinal in changed:
                fill(self.plan.layout, self._host.schema[ordinal], tensors[ordinal])

    def reload(self) -> None:
        """Have the engine load the mirror's version. Whoever calls has compared the mirror."""
        if self._reloader is None:
            raise Misuse("there is no loader to reload through")
        with self._host.reading() as tensors:
            self._reloader.load(weights(self._host.schema, tensors))

    def write_all(self) -> None:
        """Write every tensor that is not left alone, or reload them all."""
        if self.plan.reloaded:
            self.require_mirror()
            self.reload()
            return
        with self._host.reading() as tensors:
            for ordinal, spec in enumerate(self._host.schema):
                if spec.name not in self.plan.refused:
                    fill(self.plan.layout, spec, tensors[ordinal])

    # --- reading back -------------------------------------------------------------------

    def settle(self) -> None:
        """After writing: compare with the mirror; remember what only a reload renews.

        Raises:
            DigestMismatch: memory is not the mirror's version.
        """
        for name, reason in self.differing().items():
            raise DigestMismatch(
                f"the engine does not hold version {self._host.version}: {name}: {reason}"
            )
        self._remade = self._remade_now()

    def differing(self) -> dict[str, str]:
        """Tensors that are not what the mirror holds, and how, of those that can be read back."""
        return {
            name: verdict.reason
            for name, verdict in self._compare(self.plan.layout).items()
            if not verdict.exact and self.plan.layout.pieces.get(name)
        }

    def _compare(self, layout: Layout) -> dict[str, Verdict]:
        host = self._host
        with host.reading() as tensors:
            return attest(layout, host.schema, host.digests, tensors.__getitem__)

    def _remade_now(self) -> dict[str, Print]:
        return fingerprint(self._module, self.plan.remade) if self.plan.remade else {}

    def read(self, digests: Digests, *, mirrored: bool) -> dict[str, Any]:
        """This rank's report of what is in memory: see :mod:`thinwire.engines.readings`.

        Args:
            digests: of the version that should be there.
            mirrored: whether the mirror is at that version, too.
        """
        plan, now = self.plan, self._remade_now()
        return {
            **report(plan.layout, self._host.schema, digests, plan.unread),
            "cast": self._read_cast() if mirrored else {},
            "reloaded": sorted(plan.reloaded),
            "changed": sorted(n for n, was in self._remade.items() if now.get(n) != was),
        }

    def _read_cast(self) -> dict[str, bool]:
        """Tensors that are cast on their way are compared with the mirror, cast the same way."""
        pieces = {
            name: found
            for name, found in self.plan.layout.pieces.items()
            if any(piece.casts for piece in found)
        }
        if not pieces:
            return {}
        verdicts = self._compare(Layout(pieces, {}))
        return {name: verdicts[name].exact for name in pieces}
