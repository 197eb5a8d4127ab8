"""Which tensors may be written to: those whose loading left exactly what the layout says.

The proof has to come from the engine's own loading. Weights that were written through an unproven
layout read back through it perfectly, and may still be nothing that the engine can compute with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.checkpoint import Checkpoint
from thinwire.digest import TensorDigest, digest_tensors
from thinwire.engines.attest import Verdict, attest
from thinwire.engines.layout import Layout, Load, learn_layout
from thinwire.engines.memory import kept_beside
from thinwire.engines.regions import Region, storage_of
from thinwire.patch import Bits
from thinwire.schema import Schema, TensorSpec

__all__ = [
    "Claim",
    "Proof",
    "Settled",
    "claims",
    "doubted",
    "judge",
    "opened",
    "prove_from_folder",
    "settle",
]


@dataclass(frozen=True)
class Proof:
    """A layout, and how each tensor of a known checkpoint compares through it.

    Attributes:
        layout: as learned.
        schema, digests: the checkpoint that was compared with.
        verdicts: by name.
        doubts: exact tensors from which the engine may have made something else, and what that
            is called.
    """

    layout: Layout
    schema: Schema
    digests: Mapping[str, TensorDigest]
    verdicts: Mapping[str, Verdict]
    doubts: Mapping[str, frozenset[str]]

    @property
    def complete(self) -> bool:
        """Whether every tensor that the engine keeps may be written in place."""
        return not self.doubts and all(
            verdict.exact or not _kept(self.layout, name) for name, verdict in self.verdicts.items()
        )


@dataclass(frozen=True)
class Claim:
    """What one rank has to say about one tensor.

    Attributes:
        wrong: why what it holds is not proven; empty if it is, or if it holds nothing.
        regions: what it holds.
        foreign: whether what was loaded is no such tensor of the run.
    """

    wrong: str
    regions: frozenset[Region]
    foreign: bool = False


@dataclass(frozen=True)
class Settled:
    """Tensors that no rank may write to, and why.

    Attributes:
        unproven: what the engine does to them cannot be followed.
        foreign: the checkpoint that was loaded is not the run's.
        nowhere: no rank keeps any of them.
    """

    unproven: Mapping[str, str]
    foreign: Mapping[str, str]
    nowhere: Mapping[str, str]


def judge(
    module: torch.nn.Module,
    load: Load,
    schema: Schema,
    digests: Sequence[TensorDigest],
    tensors: Sequence[Bits],
) -> Proof:
    """Learn a live module's layout and compare it with a checkpoint's elements."""
    layout = learn_layout(load, module, schema)
    verdicts = attest(layout, schema, digests, tensors.__getitem__)
    names = [spec.name for spec in schema]
    return Proof(layout, schema, dict(zip(names, digests)), verdicts, _doubts(module, layout))


def _doubts(module: torch.nn.Module, layout: Layout) -> dict[str, frozenset[str]]:
    beside = kept_beside(module)
    found = {}
    for name, pieces in layout.pieces.items():
        near = [beside.get(storage_of(piece.target), ()) for piece in pieces]
        if any(near):
            found[name] = frozenset[str]().union(*near)
    return found


def _kept(layout: Layout, name: str) -> bool:
    return bool(layout.pieces.get(name)) or name in layout.problems


def prove_from_folder(module: torch.nn.Module, load: Load, folder: Path) -> Proof:
    """Compare a live module with the checkpoint folder that it was loaded from.

    Raises:
        InvalidCheckpoint: the folder holds no safetensors checkpoint.
    """
    with opened(folder) as (schema, tensors):
        return judge(module, load, schema, digest_tensors(tensors), tensors)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[Schema, Sequence[Bits]]]:
    """A checkpoint folder's tensors, mapped. Nothing may be kept.

    Raises:
        InvalidCheckpoint: the folder holds no safetensors checkpoint.
    """
    checkpoint = Checkpoint.open(folder)
    entries = [e for header in checkpoint.headers.values() for e in header.entries.values()]
    schema = Schema(tuple(TensorSpec(e.name, e.dtype, e.shape) for e in entries))
    mapped = checkpoint.map()
    tensors = [mapped[spec.name] for spec in schema]
    try:
        yield schema, tensors
    finally:
        tensors.clear()
        mapped.clear()


def doubted(proof: Proof, schema: Schema, renewed: Collection[str] = ()) -> dict[str, str]:
    """Tensors beside which something is kept that may be made from them, and is not renewed."""
    found = {}
    for spec in schema:
        beside = proof.doubts.get(spec.name, frozenset()).difference(renewed)
        if beside:
            found[spec.name] = f"{min(beside)}, kept beside the weights, may be made from it"
    return found


def claims(proof: Proof, schema: Schema) -> dict[str, Claim]:
    """What a rank's proof says about each tensor of a run; doubts aside."""
    found = {}
    for spec in schema:
        pieces = proof.layout.pieces.get(spec.name, ())
        wrong, foreign = "", True
        if spec.name not in proof.schema:
            wrong = "the checkpoint that was loaded has no such tensor"
        elif (was := proof.schema[proof.schema.ordinal(spec.name)]) != spec:
            wrong = f"the checkpoint that was loaded has {was}"
        else:
            foreign = False
            if _kept(proof.layout, spec.name):
                wrong = proof.verdicts[spec.name].reason
        regions = frozenset(piece.region for piece in pieces)
        found[spec.name] = Claim(wrong, regions, bool(wrong) and foreign)
    return _with_company(proof, found)


def _with_company(proof: Proof, found: dict[str, Claim]) -> dict[str, Claim]:
    """What shares a parameter with something unproven is not proven either.

    Its elements may be all equal, and so be exact wherever they are.
    """
    strange = {
        piece.home: name
        for name, claim in found.items()
        if claim.wrong
        for piece in proof.layout.pieces.get(name, ())
    }
    for name, claim in found.items():
        for piece in proof.layout.pieces.get(name, ()):
            if piece.home in strange and not claim.wrong:
                why = f"{strange[piece.home]} in {piece.home} is not proven either"
                found[name] = Claim(why, claim.regions)
                break
    return found


def settle(ranks: Sequence[Mapping[str, Claim]], schema: Schema) -> Settled:
    """Put together what all ranks have to say."""
    unproven: dict[str, str] = {}
    foreign: dict[str, str] = {}
    nowhere: dict[str, str] = {}
    for spec in schema:
        claims = [rank[spec.name] for rank in ranks]
        wrong = next((claim.wrong for claim in claims if claim.wrong), "")
        regions = frozenset[Region]().union(*(claim.regions for claim in claims))
        count = sum(region.numel for region in regions)
        if wrong:
            kind = foreign if any(claim.foreign for claim in claims) else unproven
            kind[spec.name] = wrong
        elif count != spec.numel:
            kind = unproven if regions else nowhere
            kind[spec.name] = f"{count} of its {spec.numel} elements are kept"
    return Settled(unproven, foreign, nowhere)
