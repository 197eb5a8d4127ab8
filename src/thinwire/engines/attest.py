"""Proof that an engine's memory is what a layout says: its elements add up to known digests.

The digest is that of :mod:`thinwire.digest`, computed on whatever device the memory is on. It
joins each element with its place in the checkpoint, so a tensor that the engine has packed, turned
by arithmetic, quantised or not loaded at all does not add up. Nothing here has to know in which
of these ways.

A tensor whose elements are all equal adds up in any order: attestation proves values, and of the
layout only what the values can show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thinwire.digest import ZERO, TensorDigest, digest_tensor
from thinwire.engines.layout import Layout
from thinwire.engines.regions import Piece, Region, integer_view
from thinwire.patch import Bits
from thinwire.schema import Schema, TensorSpec

__all__ = [
    "Reading",
    "Verdict",
    "attest",
    "digest_at",
    "digest_block",
    "read_layout",
    "sum_readings",
]

_MASK = (1 << 64) - 1
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24
_LONG_RUN = 64


@dataclass(frozen=True)
class Reading:
    """What an engine, or one rank of it, holds of a tensor.

    Attributes:
        region: of the checkpoint tensor.
        digest: of the elements found there.
    """

    region: Region
    digest: TensorDigest


@dataclass(frozen=True)
class Verdict:
    """What attestation found out about one tensor.

    Attributes:
        exact: every element that is placed has the bits it should have.
        elements: distinct elements of the tensor that are placed here.
        reason: why it is not exact, or not placed; empty otherwise.
    """

    exact: bool
    elements: int
    reason: str


# --- the digest, in torch ------------------------------------------------------------------


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(x: torch.Tensor, seed: int, steps: Sequence[tuple[int, int]], last: int) -> torch.Tensor:
    x = x ^ _signed(seed)
    for shift, factor in steps:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, last)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right: torch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def digest_at(indices: torch.Tensor, bits: torch.Tensor) -> TensorDigest:
    """Digest of elements anywhere in a tensor, on their own device.

    Args:
        indices: int64 flat row-major places.
        bits: same shape; integers of the elements' width.
    """
    width = 8 * bits.element_size()
    values = bits.to(torch.int64)
    if width == 64:
        indices = torch.stack([2 * indices, 2 * indices + 1])
        values = torch.stack([values, values >> 32])
        width = 32
    x = (indices << width) | (values & ((1 << width) - 1))
    lo = _mix(x, 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31)
    hi = _mix(x, 0xD6E8FEB86659FD93, ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)), 33)
    return TensorDigest(int(lo.sum()) & _MASK, int(hi.sum()) & _MASK)


def digest_block(region: Region, values: torch.Tensor) -> TensorDigest:
    """Digest of a block, given its elements as integers in the region's shape."""
    if values.device.type == "cpu" and _in_runs(region):
        return _digest_runs(region, values)
    chunk = _CPU_CHUNK if values.device.type == "cpu" else _DEVICE_CHUNK
    total = ZERO
    for part in Piece(region, values, (), "").split(chunk):
        total += digest_at(part.region.indices(values.device), part.target)
    return total


def _in_runs(region: Region) -> bool:
    return region.is_run or (region.stride[-1] == 1 and region.shape[-1] >= _LONG_RUN)


def _digest_runs(region: Region, values: torch.Tensor) -> TensorDigest:
    """On the host, consecutive elements go through the compiled kernel, run by run."""
    values = values.contiguous()
    flat: np.ndarray[Any, Any] = values.view(-1).numpy()
    bits = flat.view(f"<u{flat.itemsize}")
    if region.is_run:
        return digest_tensor(bits, start=region.offset)
    size = region.shape[-1]
    starts = Region(region.offset, region.shape[:-1], region.stride[:-1])
    total = ZERO
    for i, start in enumerate(starts.indices(values.device).view(-1).tolist()):
        total += digest_tensor(bits[i * size : (i + 1) * size], start=start)
    return total


# --- an engine, read back ------------------------------------------------------------------


def read_layout(layout: Layout, spec: TensorSpec) -> tuple[list[Reading], str]:
    """Read a tensor back through the layout: every region once, and what contradicts itself.

    Cast pieces are left out: their elements are not the checkpoint's.
    """
    found: dict[Region, TensorDigest] = {}
    for piece in layout.pieces.get(spec.name, ()):
        if piece.casts:
            continue
        digest = digest_block(piece.region, integer_view(piece.target))
        if found.setdefault(piece.region, digest) != digest:
            return [], f"its copies in {piece.home} and elsewhere differ"
    return [Reading(region, digest) for region, digest in found.items()], ""


def attest(
    layout: Layout,
    schema: Schema,
    digests: Sequence[TensorDigest],
    tensor: Callable[[int], Bits],
) -> dict[str, Verdict]:
    """Compare what an engine holds with a known state, tensor by tensor.

    Args:
        digests: of the state, in schema order.
        tensor: the state's elements by ordinal: only read where the engine holds a part, or a
            cast, of a tensor.
    """
    return {
        spec.name: _judge(layout, spec, digest, ordinal, tensor)
        for ordinal, (spec, digest) in enumerate(zip(schema, digests, strict=True))
    }


def _judge(
    layout: Layout,
    spec: TensorSpec,
    digest: TensorDigest,
    ordinal: int,
    tensor: Callable[[int], Bits],
) -> Verdict:
    if spec.name in layout.problems:
        return Verdict(False, 0, layout.problems[spec.name])
    pieces = layout.pieces.get(spec.name, ())
    if not pieces:
        return Verdict(spec.numel == 0, 0, "" if spec.numel == 0 else "the loader keeps none of it")
    elements = sum({piece.region: piece.region.numel for piece in pieces}.values())
    readings, contradiction = read_layout(layout, spec)
    if contradiction:
        return Verdict(False, elements, contradiction)
    whole = sum(reading.region.numel for reading in readings) == spec.numel
    shrunk = next((piece for piece in pieces if _shrinks(piece, spec)), None)
    if shrunk is not None:
        return Verdict(False, elements, f"{shrunk.home} holds it quantised")
    if whole:
        if _sum(readings) != digest:
            return Verdict(False, elements, _differs(pieces))
    elif readings:
        flat = _flat(tensor(ordinal))
        for reading in readings:
            if digest_block(reading.region, reading.region.of(flat)) != reading.digest:
                return Verdict(False, elements, _differs(pieces))
    for piece in pieces:
        if piece.casts and not _cast_matches(piece, spec, tensor(ordinal)):
            return Verdict(False, elements, _differs([piece]))
    return Verdict(True, elements, "")


def _shrinks(piece: Piece, spec: TensorSpec) -> bool:
    """Whether values go through a dtype of one byte: there is a scale to it, if it is not lost."""
    return spec.dtype.width > 8 and any(kind.itemsize == 1 for kind in piece.casts)


def _differs(pieces: Sequence[Piece]) -> str:
    return f"what {pieces[0].home} holds is not its elements"


def _flat(bits: Bits) -> torch.Tensor:
    signed = bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}")
    return torch.from_numpy(signed if signed.flags.writeable else signed.copy())


def _cast_matches(piece: Piece, spec: TensorSpec, bits: Bits) -> bool:
    value = piece.region.of(_flat(bits)).contiguous().view(getattr(torch, spec.dtype.torch_name))
    for kind in piece.casts:
        value = value.to(kind)
    return torch.equal(integer_view(value), integer_view(piece.target.cpu()))


def _sum(readings: Iterable[Reading]) -> TensorDigest:
    total = ZERO
    for reading in readings:
        total += reading.digest
    return total


def sum_readings(
    ranks: Iterable[Mapping[str, Sequence[Reading]]],
) -> Iterator[tuple[str, int, TensorDigest]]:
    """Tensors put together from the parts that ranks hold: (name, distinct elements, digest).

    A part that several ranks hold counts once; if they disagree about it, the sum is that of one
    of them plus the difference, and so matches nothing.
    """
    found: dict[str, dict[Region, TensorDigest]] = {}
    for rank in ranks:
        for name, readings in rank.items():
            parts = found.setdefault(name, {})
            for reading in readings:
                known = parts.setdefault(reading.region, reading.digest)
                if known != reading.digest:
                    parts[reading.region] = known + TensorDigest(1, 1)
    for name, parts in found.items():
        readings = [Reading(region, digest) for region, digest in parts.items()]
        yield name, sum(region.numel for region in parts), _sum(readings)
