"""How a payload's tensors are cut for coding, and one segment's changes on their way to symbols.

All coded tensors of one dtype are laid end to end in schema order and cut every 2²² elements, so
that a payload decodes in parallel whatever the sizes of its tensors, and small tensors do not pay
for streams of their own. A segment is a list of pieces of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from thinwire.codec.classes import ClassMap
from thinwire.codec.scan import rank_changes, space_changes
from thinwire.codec.simd import BLOCK, CLASSES
from thinwire.patch import Bits, Patch
from thinwire.ulp import signed_float

__all__ = ["SEGMENT", "Changes", "Piece", "collect", "cut", "pad"]

Array = npt.NDArray[Any]

SEGMENT = 1 << 22
"""Elements."""


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of the tensor number ``tensor`` of a group."""

    tensor: int
    start: int
    stop: int


def cut(sizes: Sequence[int], segment: int = SEGMENT) -> list[list[Piece]]:
    """Pieces of each segment, for tensors of the given numbers of elements."""
    segments: list[list[Piece]] = []
    room = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                segments.append([])
                room = segment
            stop = min(size, start + room)
            segments[-1].append(Piece(tensor, start, stop))
            room -= stop - start
            start = stop
    return segments


def pad(bits: Bits) -> Bits:
    """Fewer than 64 elements, filled up to 64."""
    block = np.zeros(BLOCK, bits.dtype)
    block[: bits.size] = bits
    return block


@dataclass(frozen=True)
class Changes:
    """A segment's changes, class after class.

    Attributes:
        counts: ``(16,)`` int64, changes in each class.
        gaps: ``(n,)`` uint32.
        sizes: ``(n,)`` unsigned, step magnitude − 1.
        outward: ``(n,)`` uint8.
    """

    counts: Array
    gaps: Array
    sizes: Array
    outward: Array


@numba.njit(nogil=True, cache=True)
def _by_class(
    classes: Array,
    gaps: Array,
    sizes: Array,
    outward: Array,
    counts: Array,
    g: Array,
    s: Array,
    o: Array,
) -> None:
    for i in range(classes.size):
        counts[classes[i]] += 1
    starts = np.cumsum(counts) - counts
    for i in range(classes.size):
        at = starts[classes[i]]
        starts[classes[i]] = at + 1
        g[at] = gaps[i]
        s[at] = sizes[i]
        o[at] = outward[i]


def collect(
    pieces: Sequence[Piece],
    patches: Sequence[Patch],
    base: Sequence[Bits],
    classes: ClassMap | None,
) -> Changes:
    """One segment's changes.

    Args:
        patches: of the group's tensors; ``base``: their elements before the change.
        classes: None to count gaps over all elements alike, without reading the base for them.
    """
    spans = [_span(patches[piece.tensor], piece.start, piece.stop) for piece in pieces]
    total = sum(hi - lo for lo, hi in spans)
    kind = patches[pieces[0].tensor].spec.dtype
    gaps, sizes = np.empty(total, np.uint32), np.empty(total, kind.bits)
    outward = np.empty(total, np.uint8)
    if classes is None:
        plain = Changes(np.array([total] + [0] * (CLASSES - 1)), gaps, sizes, outward)
        _collect_plain(pieces, spans, patches, base, plain)
        return plain
    members = np.empty(total, np.uint8)
    counts, last = np.zeros(CLASSES, np.int32), np.zeros(CLASSES, np.int32)
    at = 0
    for piece, (lo, hi) in zip(pieces, spans):
        part = slice(at, at + hi - lo)
        changes = _Ranked(counts, last, members[part], gaps[part], sizes[part], outward[part])
        _rank(piece, patches[piece.tensor], slice(lo, hi), base[piece.tensor], classes, changes)
        at += hi - lo
    per_class = np.zeros(CLASSES, np.int64)
    ordered = Changes(per_class, np.empty_like(gaps), np.empty_like(sizes), np.empty_like(outward))
    _by_class(
        members, gaps, sizes, outward, per_class, ordered.gaps, ordered.sizes, ordered.outward
    )
    return ordered


def _span(patch: Patch, start: int, stop: int) -> tuple[int, int]:
    """Which of a patch's changes lie in elements ``start`` to ``stop``."""
    return _first_from(patch, start), _first_from(patch, stop)


def _first_from(patch: Patch, element: int) -> int:
    """The first change at or behind an element."""
    if element <= 0:
        return 0
    if element >= patch.spec.numel:
        return len(patch)
    # a needle of another type would have all positions converted to it
    needle = patch.positions.dtype.type(element)
    return int(np.searchsorted(patch.positions, needle))


def _collect_plain(
    pieces: Sequence[Piece],
    spans: Sequence[tuple[int, int]],
    patches: Sequence[Patch],
    base: Sequence[Bits],
    changes: Changes,
) -> None:
    at = pending = 0  # elements passed since the last change
    for piece, (lo, hi) in zip(pieces, spans):
        patch, part = patches[piece.tensor], slice(at, at + hi - lo)
        following = space_changes(
            base[piece.tensor],
            patch.positions[lo:hi],
            patch.bits[lo:hi],
            signed_float(patch.spec.dtype),
            piece.start - pending,
            changes.gaps[part],
            changes.sizes[part],
            changes.outward[part],
        )
        pending = piece.stop - following
        at += hi - lo


@dataclass(frozen=True)
class _Ranked:
    """What ranking carries through a segment, and fills for one piece."""

    counts: Array
    last: Array
    members: Array
    gaps: Array
    sizes: Array
    outward: Array


def _rank(
    piece: Piece, patch: Patch, span: slice, base: Bits, classes: ClassMap, changes: _Ranked
) -> None:
    elements = base[piece.start : piece.stop]
    positions, bits = patch.positions[span], patch.bits[span]
    whole = elements.size // BLOCK * BLOCK
    split = positions.size
    if whole < elements.size:
        split = _first_from(patch, piece.start + whole) - span.start
    parts = [(elements[:whole], whole, piece.start, slice(0, split))]
    if whole < elements.size:
        rest = slice(split, positions.size)
        parts.append((pad(elements[whole:]), elements.size - whole, piece.start + whole, rest))
    for block, size, origin, part in parts:
        rank_changes(
            block,
            size,
            classes.shift,
            classes.mask,
            classes.thresholds,
            classes.by_key,
            positions[part],
            origin,
            bits[part],
            signed_float(patch.spec.dtype),
            changes.counts,
            changes.last,
            changes.members[part],
            changes.gaps[part],
            changes.sizes[part],
            changes.outward[part],
        )
