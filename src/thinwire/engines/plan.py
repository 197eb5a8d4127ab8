"""Per tensor: written in place, reloaded through the engine's loader, or refused. Decided once.

Written in place is what has been proved. The rest is reloaded, if the engine has been tried at it;
else the engine does not start, or leaves the rest alone if it was told to.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.engines.layout import Layout
from thinwire.engines.proof import Proof, claims, doubted, settle
from thinwire.engines.reload import Trial, follow_along
from thinwire.errors import SchemaMismatch
from thinwire.schema import Schema

__all__ = ["Gather", "Plan", "by_pattern", "make_plan"]

Gather = Callable[[Any], list[Any]]
"""Exchanges a picklable value with all ranks of the engine: every rank gets every rank's value."""


@dataclass(frozen=True)
class Plan:
    """What is done about each tensor; the same on all ranks, but for the layout and ``remade``.

    Attributes:
        layout: where tensors lie that can be read back.
        refused: tensors that are never touched, and why.
        reloaded: tensors whose changes take a reload, and why.
        remade: this module's own tensors that only a reload renews.
    """

    layout: Layout = field(default_factory=lambda: Layout({}, {}))
    refused: Mapping[str, str] = field(default_factory=dict)
    reloaded: Mapping[str, str] = field(default_factory=dict)
    remade: Collection[str] = ()

    @property
    def unread(self) -> set[str]:
        """Tensors that cannot be compared with a digest."""
        return {*self.refused, *(name for name in self.reloaded if name in self.layout.problems)}


def make_plan(
    proof: Proof,
    module: torch.nn.Module,
    schema: Schema,
    *,
    gather: Gather,
    trial: Trial | None = None,
    freeze: bool = False,
) -> Plan:
    """Decide; all ranks have to call.

    Args:
        trial: that of a reload, if there was one; wrong on all ranks if on one.
        freeze: leave alone what is neither proved nor reloaded.

    Raises:
        SchemaMismatch: something is neither.
    """
    settled = settle(gather(claims(proof, schema)), schema)
    renewed = trial.derived if trial is not None else ()
    doubts = {n: why for rank in gather(doubted(proof, schema, renewed)) for n, why in rank.items()}
    unproven = {**doubts, **settled.unproven, **settled.foreign}
    if trial is None:
        if unproven and not freeze:
            raise _unfollowed(unproven, schema, "")
        return _plan(proof, {**unproven, **settled.nowhere}, {}, ())
    if trial.wrong:  # the trial has spoilt what was loaded: no way to go on
        raise _unfollowed(unproven, schema, f"; reloading was tried: {trial.wrong}")
    if settled.foreign:
        raise _unfollowed(settled.foreign, schema, "")
    if doubts:
        raise _unfollowed(doubts, schema, ", and is not renewed by reloading")
    apart = {*settled.unproven, *settled.nowhere}
    proved = [spec.name for spec in schema if spec.name not in apart]
    remade, along = follow_along(module, proof.layout, proved, trial.derived)
    reloaded = dict(settled.unproven)
    for name in sorted(set[str]().union(*gather(along))):
        reloaded[name] = "the engine makes something else from it, or from its neighbours"
    if reloaded and set(proof.schema) != set(schema):
        raise _unfollowed(
            reloaded, schema, "; the checkpoint that was loaded has tensors that the run has not"
        )
    return _plan(proof, settled.nowhere, reloaded, remade, settled.unproven)


def _plan(
    proof: Proof,
    refused: Mapping[str, str],
    reloaded: Mapping[str, str],
    remade: Collection[str],
    unproven: Mapping[str, str] | None = None,
) -> Plan:
    problems = {**proof.layout.problems, **(unproven or {}), **refused}
    pieces = {n: () if n in problems else p for n, p in proof.layout.pieces.items()}
    return Plan(Layout(pieces, problems), dict(refused), dict(reloaded), frozenset(remade))


def _unfollowed(unproven: Mapping[str, str], schema: Schema, also: str) -> SchemaMismatch:
    name, reason = next(iter(unproven.items()), ("the model", "it cannot be read back whole"))
    return SchemaMismatch(
        f"{len(unproven)} of {len(schema)} tensors are kept in a way that cannot be followed: "
        f"{name}: {reason}{also}",
        hint="start the engine from the run's own checkpoint or mirror, unquantised; "
        "if they will never change, allow them to be left alone",
    )


def by_pattern(names: Iterable[str]) -> dict[str, int]:
    """How many names there are, numbers in them aside: ``{"layers.*.q_proj.weight": 28}``."""
    return dict(Counter(re.sub(r"\d+", "*", name) for name in names))
