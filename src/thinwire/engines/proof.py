"""Which tensors may be written to: those whose loading left exactly what the layout says.

The proof has to come from the engine's own loading. Weights that were written through an unproven
layout read back through it perfectly, and may still be nothing that the engine can compute with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.checkpoint import Checkpoint
from thinwire.digest import TensorDigest, digest_tensors
from thinwire.engines.attest import Verdict, attest
from thinwire.engines.layout import Layout, Load, learn_layout
from thinwire.engines.regions import Region
from thinwire.patch import Bits
from thinwire.schema import Schema, TensorSpec

__all__ = ["Claim", "Proof", "claims", "judge", "prove_from_folder", "settle"]


@dataclass(frozen=True)
class Proof:
    """A layout, and how each tensor of a known checkpoint compares through it.

    Attributes:
        layout: as learned.
        schema, digests: the checkpoint that was compared with.
        verdicts: by name.
    """

    layout: Layout
    schema: Schema
    digests: Mapping[str, TensorDigest]
    verdicts: Mapping[str, Verdict]


@dataclass(frozen=True)
class Claim:
    """What one rank has to say about one tensor.

    Attributes:
        wrong: why what it holds is not proven; empty if it is, or if it holds nothing.
        regions: what it holds.
    """

    wrong: str
    regions: frozenset[Region]


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
    return Proof(layout, schema, dict(zip(names, digests)), verdicts)


def prove_from_folder(module: torch.nn.Module, load: Load, folder: Path) -> Proof:
    """Compare a live module with the checkpoint folder that it was loaded from.

    Raises:
        InvalidCheckpoint: the folder holds no safetensors checkpoint.
    """
    checkpoint = Checkpoint.open(folder)
    entries = [e for header in checkpoint.headers.values() for e in header.entries.values()]
    schema = Schema(tuple(TensorSpec(e.name, e.dtype, e.shape) for e in entries))
    mapped = checkpoint.map()
    tensors = [mapped[spec.name] for spec in schema]
    return judge(module, load, schema, digest_tensors(tensors), tensors)


def claims(proof: Proof, schema: Schema) -> dict[str, Claim]:
    """What a rank's proof says about each tensor of a run."""
    found = {}
    for spec in schema:
        pieces = proof.layout.pieces.get(spec.name, ())
        wrong = ""
        if spec.name not in proof.schema:
            wrong = "the checkpoint that was loaded has no such tensor"
        elif (was := proof.schema[proof.schema.ordinal(spec.name)]) != spec:
            wrong = f"the checkpoint that was loaded has {was}"
        elif pieces or spec.name in proof.layout.problems:
            wrong = proof.verdicts[spec.name].reason
        found[spec.name] = Claim(wrong, frozenset(piece.region for piece in pieces))
    return found


def settle(ranks: Sequence[Mapping[str, Claim]], schema: Schema) -> tuple[dict[str, str], set[str]]:
    """Tensors that no rank may write to, and why; and those of them that no rank keeps at all."""
    refused: dict[str, str] = {}
    nowhere = set()
    for spec in schema:
        wrong = next((rank[spec.name].wrong for rank in ranks if rank[spec.name].wrong), "")
        regions = frozenset[Region]().union(*(rank[spec.name].regions for rank in ranks))
        count = sum(region.numel for region in regions)
        if wrong:
            refused[spec.name] = wrong
        elif count != spec.numel:
            refused[spec.name] = f"{count} of its {spec.numel} elements are kept"
            if not regions:
                nowhere.add(spec.name)
    return refused, nowhere
