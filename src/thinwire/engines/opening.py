"""What is found out about an engine before its first version: proof, and trial of its loader.

Both compare memory with the checkpoint that the engine has loaded. That may be the mirror itself:
nobody may move it before every rank is through.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from thinwire.engines.host import HostMirror
from thinwire.engines.layout import Load
from thinwire.engines.plan import Gather, Plan, by_pattern, make_plan
from thinwire.engines.proof import Proof, judge, opened, prove_from_folder
from thinwire.engines.reload import Reloader, Trial, try_out
from thinwire.errors import Misuse
from thinwire.patch import Bits
from thinwire.schema import Schema

__all__ = ["Opening"]

_log = logging.getLogger("thinwire")


class Opening:
    """One rank's part; all ranks have to make the same calls.

    Args:
        loaded: folder of the checkpoint that the engine has loaded; None if it is not known: the
            weights then have to be those of the mirror's version.
        reloader: None: what cannot be proved is not reloaded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load: Load,
        host: HostMirror,
        loaded: Path | None,
        *,
        gather: Gather,
        reloader: Reloader | None,
    ) -> None:
        self._module, self._load, self._host = module, load, host
        self._loaded = loaded
        self._gather = gather
        self._reloader = reloader
        self._proof: Proof | None = None
        self._trial: Trial | None = None

    @property
    def proof(self) -> Proof:
        """How memory compares with the checkpoint that was loaded."""
        if self._proof is None:
            raise Misuse("nothing has been compared yet")
        return self._proof

    def look(self) -> None:
        """Compare, if there is something to compare with yet, and try the loader if need be."""
        if self._proof is None:
            if self._loaded is not None:
                self._proof = prove_from_folder(self._module, self._load, self._loaded)
            elif self._host.version is not None:
                schema, digests = self._host.schema, self._host.digests
                with self._host.reading() as tensors:
                    self._proof = judge(self._module, self._load, schema, digests, tensors)
            complete = self._gather(None if self._proof is None else self._proof.complete)
            if None in complete:
                self._proof = None
            elif self._reloader is not None and not all(complete):
                self._trial = self._try_out(self._reloader)

    def _try_out(self, reloader: Reloader) -> Trial:
        with self._tensors() as (schema, tensors):
            trial = try_out(self._module, self.proof.layout, reloader, schema, tensors)
        wrong = next((wrong for wrong in self._gather(trial.wrong) if wrong), "")
        return replace(trial, wrong=wrong)

    @contextlib.contextmanager
    def _tensors(self) -> Iterator[tuple[Schema, Sequence[Bits]]]:
        if self._loaded is not None:
            with opened(self._loaded) as found:
                yield found
        else:
            with self._host.reading() as tensors:
                yield self._host.schema, tensors

    def plan(self, *, freeze: bool) -> Plan:
        """Decide about every tensor of the run, and say what is not written in place.

        Raises:
            SchemaMismatch: a tensor can neither be written in place nor reloaded.
        """
        schema = self._host.schema
        plan = make_plan(
            self.proof, self._module, schema, gather=self._gather, trial=self._trial, freeze=freeze
        )
        for what, names in (("reloaded", plan.reloaded), ("left alone", plan.refused)):
            if names:
                first, why = next(iter(names.items()))
                _log.warning(
                    "thinwire: %d of %d tensors are %s (%s): %s: %s",
                    len(names),
                    len(schema),
                    what,
                    ", ".join(by_pattern(names)),
                    first,
                    why,
                )
        return plan
