"""Streams back to changes, trusting nothing.

Every count, length and position is checked before anything is allocated or written for it; what a
payload can claim is bounded by the schema's elements, and a thread never holds more than one
segment's changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.codec.classes import ClassMap, key_field
from thinwire.codec.coding import GAP_SUB, step_sub
from thinwire.codec.fields import Reader
from thinwire.codec.rans import SCALE, decode_run, decode_table
from thinwire.codec.scan import NEVER, locate_changes
from thinwire.codec.segments import SEGMENT, Piece, cut, pad
from thinwire.codec.simd import BLOCK, CLASSES
from thinwire.codec.tokens import read_values
from thinwire.dtypes import DTYPES, DType
from thinwire.errors import CorruptPayload
from thinwire.patch import Bits
from thinwire.schema import Schema
from thinwire.ulp import signed_float

__all__ = [
    "Found",
    "FoundSteps",
    "GroupHead",
    "decode_plain_segment",
    "decode_segment",
    "read_group",
    "read_ordinals",
]

Array = npt.NDArray[Any]
Found = tuple[Piece, Array, Bits]
"""A piece of a tensor, and the positions (in the tensor) and new bits of its changes."""
FoundSteps = tuple[Piece, Array, Bits, Array]
"""The same with steps in the place of bits: magnitudes − 1, and directions."""

_KINDS = tuple(DTYPES.values())
_STATE_WORDS = 8
_GAP_BITS = (SEGMENT - 1).bit_length()


@dataclass(frozen=True)
class SegmentHead:
    """What the directory says of a segment: changes per class, 16-bit words, and raw bytes."""

    counts: tuple[int, ...]
    words: int
    raw: int

    @property
    def size(self) -> int:
        """Bytes of its streams."""
        return 2 * self.words + self.raw


@dataclass(frozen=True)
class GroupHead:
    """What a payload says of a group before its streams.

    Attributes:
        kind: dtype of its tensors.
        classes: class map; None if gaps are counted over all elements alike.
        ordinals: its tensors.
        tables: decode tables: 2k for the gaps and 2k + 1 for the steps of class k.
        pieces: pieces of each segment.
        segments: the directory.
    """

    kind: DType
    classes: ClassMap | None
    ordinals: tuple[int, ...]
    tables: Mapping[int, Array]
    pieces: Sequence[Sequence[Piece]]
    segments: Sequence[SegmentHead]


def read_group(reader: Reader, schema: Schema, *, classed: bool) -> GroupHead:
    """Take a group's head off the reader.

    Raises:
        CorruptPayload: it does not fit the schema or contradicts itself.
    """
    kind = _KINDS[reader.byte(len(_KINDS) - 1)]
    used = list(reader.take(reader.byte(CLASSES - 1)))
    if any(a >= b for a, b in zip([0, *used], used)):
        raise CorruptPayload("class thresholds do not ascend")
    if used and not (classed and key_field(kind)[1]):
        raise CorruptPayload(f"{kind} has no classes here")
    classes = ClassMap.of(kind, used) if classed else None
    ordinals = read_ordinals(reader, schema)
    if not ordinals or any(schema[k].dtype != kind for k in ordinals):
        raise CorruptPayload(f"a group of {kind} has no tensors or others")
    present = int.from_bytes(reader.take(2), "little")
    members = [k for k in range(CLASSES) if present >> k & 1]
    if not members or (classes is None and members != [0]):
        raise CorruptPayload("impossible classes")
    tables = {2 * k + half: _read_table(reader) for k in members for half in (0, 1)}
    pieces = cut([schema[k].numel for k in ordinals])
    segments = [_read_segment(reader, piece, members, kind) for piece in pieces]
    return GroupHead(kind, classes, ordinals, tables, pieces, segments)


def read_ordinals(reader: Reader, schema: Schema) -> tuple[int, ...]:
    """Take a list of ascending ordinals off the reader.

    Raises:
        CorruptPayload: the schema does not have them.
    """
    ordinals = []
    last = -1
    for _ in range(reader.varint(len(schema))):
        last += 1 + reader.varint(len(schema))
        if last >= len(schema):
            raise CorruptPayload(f"there is no tensor number {last}")
        ordinals.append(last)
    return tuple(ordinals)


def _read_table(reader: Reader) -> Array:
    frequencies = [reader.varint(SCALE) for _ in range(reader.varint(256))]
    if not frequencies or not frequencies[-1] or sum(frequencies) != SCALE:
        raise CorruptPayload("a table's frequencies do not add up")
    return decode_table(np.array(frequencies, np.uint32))


def _read_segment(
    reader: Reader, pieces: Sequence[Piece], members: Sequence[int], kind: DType
) -> SegmentHead:
    elements = sum(piece.stop - piece.start for piece in pieces)
    counts = [0] * CLASSES
    for k in members:
        counts[k] = reader.varint(elements)
    total = sum(counts)
    if total > elements:
        raise CorruptPayload(f"{total} changes in {elements} elements")
    if not total:
        return SegmentHead(tuple(counts), 0, 0)
    # a symbol takes at most one word, and a value no more raw bits than it has bits
    words = _STATE_WORDS + reader.varint(2 * total)
    return SegmentHead(tuple(counts), words, reader.varint(total * (4 + kind.itemsize)))


def decode_segment(
    head: GroupHead, number: int, data: memoryview, base: Sequence[Bits]
) -> list[Found]:
    """One segment's changes by classes, piece by piece, positions increasing.

    Args:
        data: the segment's streams.
        base: of the group's tensors, before the change.

    Raises:
        CorruptPayload: the streams are not ones that an encoder writes for this base.
    """
    segment = head.segments[number]
    total = sum(segment.counts)
    if not total or head.classes is None:
        return []
    gaps, sizes, outward = _read_streams(head, segment, data)
    positions = np.empty(total, _index(head.pieces[number]))
    bits: Bits = np.empty(total, head.kind.bits)
    changes = _Changes(np.array(segment.counts, np.int64), gaps, sizes, outward, positions, bits)
    spans = _place_classed(head, number, head.classes, changes, base)
    if spans[-1][1] != total:
        raise CorruptPayload("a change lies beyond its segment")
    return [
        (piece, positions[start:stop], bits[start:stop])
        for piece, (start, stop) in zip(head.pieces[number], spans)
        if stop > start
    ]


def decode_plain_segment(head: GroupHead, number: int, data: memoryview) -> list[FoundSteps]:
    """One segment's changes by gaps over all elements alike: their positions are a running sum.

    Raises:
        CorruptPayload: the streams are not ones that an encoder writes.
    """
    segment, pieces = head.segments[number], head.pieces[number]
    if not sum(segment.counts):
        return []
    gaps, sizes, outward = _read_streams(head, segment, data)
    where = np.cumsum(gaps.astype(np.int64) + 1) - 1
    found: list[FoundSteps] = []
    passed = 0
    for piece in pieces:
        behind = passed + piece.stop - piece.start
        lo, hi = np.searchsorted(where, [passed, behind]).tolist()
        if hi > lo:
            local = (where[lo:hi] - (passed - piece.start)).astype(_index(pieces))
            found.append((piece, local, sizes[lo:hi], outward[lo:hi]))
        passed = behind
    if int(where[-1]) >= passed:
        raise CorruptPayload("a change lies beyond its segment")
    return found


def _index(pieces: Sequence[Piece]) -> type[np.signedinteger[Any]]:
    return np.int64 if any(piece.stop > 1 << 31 for piece in pieces) else np.int32


@dataclass(frozen=True)
class _Changes:
    """A segment's decoded values, class after class, and the arrays that their places fill."""

    counts: Array
    gaps: Array
    sizes: Array
    outward: Array
    positions: Array
    bits: Bits


def _read_streams(
    head: GroupHead, segment: SegmentHead, data: memoryview
) -> tuple[Array, Array, Array]:
    total = sum(segment.counts)
    words = np.frombuffer(data[: 2 * segment.words], "<u2").copy()  # aligned
    raw = np.zeros(segment.raw + 8, np.uint8)
    raw[: segment.raw] = np.frombuffer(data[2 * segment.words :], np.uint8)
    states = words[:_STATE_WORDS].view("<u4").copy()
    if (states < 1 << 16).any():
        raise CorruptPayload("a stream starts from a state below 2^16")
    gaps, sizes = np.empty(total, np.uint32), np.empty(total, head.kind.bits)
    outward = np.empty(total, np.uint8)
    at, bit, start = _STATE_WORDS, 0, 0
    for k, count in enumerate(segment.counts):
        if not count:
            continue
        part = slice(start, start + count)
        symbols = np.empty(count, np.uint8)
        for half, sub, longest, values in (
            (0, GAP_SUB, _GAP_BITS, gaps[part]),
            (1, step_sub(head.kind), head.kind.width - 1, sizes[part]),
        ):
            at = decode_run(words, at, states, head.tables[2 * k + half], symbols)
            if at < 0:
                raise CorruptPayload("a stream ends too soon")
            if half:
                np.bitwise_and(symbols, 1, out=outward[part])
                symbols >>= 1
            bit = read_values(symbols, sub, longest, raw, bit, values)
            if bit < 0:
                raise CorruptPayload("raw bits end too soon, or stand for too much")
        start += count
    if at != words.size or (states != 1 << 16).any() or (bit + 7) // 8 != segment.raw:
        raise CorruptPayload("a stream does not end where it should")
    if bit % 8 and raw[bit // 8] >> (bit % 8):
        raise CorruptPayload("there are bits after the last raw bit")
    return gaps, sizes, outward


def _place_classed(
    head: GroupHead, number: int, classes: ClassMap, changes: _Changes, base: Sequence[Bits]
) -> list[tuple[int, int]]:
    """Gaps within classes: one scan over the base finds the elements they count to."""
    ends = np.cumsum(changes.counts)
    cursors = ends - changes.counts
    left = np.full(CLASSES, NEVER, np.int32)
    for k in np.flatnonzero(changes.counts).tolist():
        left[k] = min(int(changes.gaps[cursors[k]]), NEVER)
    spans = []
    at = 0
    for piece in head.pieces[number]:
        elements = base[piece.tensor][piece.start : piece.stop]
        whole = elements.size // BLOCK * BLOCK
        start = at
        parts = [(elements[:whole], whole, piece.start)] if whole else []
        if whole < elements.size:
            parts.append((pad(elements[whole:]), elements.size - whole, piece.start + whole))
        for part, size, origin in parts:
            found = locate_changes(
                part,
                size,
                classes.shift,
                classes.mask,
                classes.thresholds,
                left,
                cursors,
                ends,
                changes.gaps,
                changes.sizes,
                changes.outward,
                signed_float(head.kind),
                origin,
                changes.positions[at:],
                changes.bits[at:],
            )
            if found < 0:
                raise CorruptPayload("there are more changes than announced")
            at += found
        spans.append((start, at))
    return spans
