"""Changes of one dtype to streams: class map, tables, and one stream pair per segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.codec.bits import ONE_BIT, log2
from thinwire.codec.classes import ClassMap, choose_thresholds
from thinwire.codec.fields import varint
from thinwire.codec.rans import SCALE_BITS, encode_runs, encode_table, normalise
from thinwire.codec.segments import Changes, collect, cut
from thinwire.codec.simd import BLOCK, CLASSES
from thinwire.codec.tokens import symbols_of, write_raw_runs, write_symbols
from thinwire.dtypes import DTYPES, DType
from thinwire.patch import Bits, Patch, bits_at
from thinwire.ulp import signed_float, steps_between
from thinwire.workers import parallel_map

__all__ = [
    "GAP_SUB",
    "Group",
    "choose_classes",
    "coded_bits",
    "encode_group",
    "step_sub",
    "symbol_costs",
]

Array = npt.NDArray[Any]

GAP_SUB = 1
"""Bits below the leading one that a gap's symbol holds."""

_SAMPLE_BLOCKS = 256
"""One block in at least so many is looked at to estimate how many elements each key has …"""

_SAMPLE_ELEMENTS = 1 << 19
"""… and about so many elements at most."""

_SAMPLE_CHANGES = 1 << 18
"""Changes looked at to choose classes."""


def step_sub(kind: DType) -> int:
    """Bits below the leading one that a step's symbol holds: with a direction it fits a byte."""
    return 1 if kind.width == 64 else 2


@dataclass(frozen=True)
class Group:
    """Changed tensors of one dtype, in schema order.

    Attributes:
        kind: their dtype.
        patches: their changes.
        base: per tensor ``(numel,)`` bits before the change.
    """

    kind: DType
    patches: Sequence[Patch]
    base: Sequence[Bits]


def _step_symbols(sizes: Array, outward: Array, kind: DType) -> tuple[Array, int]:
    symbols = np.empty(sizes.size, np.uint8)
    raw = symbols_of(sizes, step_sub(kind), symbols)
    return (symbols << 1) | outward, raw


def choose_classes(group: Group) -> ClassMap:
    """The class map that suits a group's changes, from a sample that depends on nothing else."""
    plain = ClassMap.of(group.kind, [])
    if not plain.mask:
        return plain
    stride = max(1, sum(map(len, group.patches)) // _SAMPLE_CHANGES)
    sample = [np.ascontiguousarray(patch.positions[::stride]) for patch in group.patches]
    old = np.concatenate([bits_at(b, some) for b, some in zip(group.base, sample)])
    new = np.concatenate([p.bits[::stride] for p in group.patches])
    sizes, outward = np.empty_like(old), np.empty(old.size, np.uint8)
    steps_between(old, new, signed_float(group.kind), sizes, outward)
    symbols, _ = _step_symbols(sizes, outward, group.kind)
    index = plain.keys(old).astype(np.int64) << 8 | symbols
    tokens = np.bincount(index, minlength=65536).reshape(256, 256) * stride
    skip = max(_SAMPLE_BLOCKS, sum(base.size for base in group.base) // _SAMPLE_ELEMENTS)
    blocks = np.concatenate([_sampled(base, skip) for base in group.base])
    population = np.bincount(plain.keys(blocks), minlength=256) * skip
    return ClassMap.of(group.kind, choose_thresholds(population, tokens))


def _sampled(base: Bits, skip: int) -> Bits:
    """One in ``skip`` blocks of a tensor, the first one among them."""
    blocks = base[: base.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    return blocks[::skip].ravel()


@dataclass(frozen=True)
class _Symbols:
    """A segment's changes as symbols, run after run, and the raw bits that go with them.

    Attributes:
        counts: ``(16,)`` changes in each class.
        symbols: ``(2n,)`` uint8: for each class its gaps, then its steps.
        tables: table number of each run: 2k for the gaps of class k, 2k + 1 for its steps.
        ends: where each run ends.
        histograms: ``(runs, 256)`` how often each symbol occurs in each run.
        raw: bytes of the raw bits.
        raw_bits: how many there are.
    """

    counts: Array
    symbols: Array
    tables: Array
    ends: Array
    histograms: Array
    raw: Array
    raw_bits: int


def _to_symbols(changes: Changes, kind: DType, *, coded: bool = True) -> _Symbols:
    """``coded``: False to only count, and leave the raw bits unwritten."""
    members = np.flatnonzero(changes.counts)
    counts = changes.counts[members]
    symbols = np.empty(2 * changes.gaps.size, np.uint8)
    histograms = np.zeros((2 * members.size, 256), np.int64)
    subs = GAP_SUB, step_sub(kind)
    raw_bits = write_symbols(
        counts, changes.gaps, changes.sizes, changes.outward, *subs, symbols, histograms
    )
    raw = np.zeros((raw_bits + 7) // 8 + 8 if coded else 8, np.uint8)
    if coded:
        write_raw_runs(counts, changes.gaps, changes.sizes, *subs, raw)
    tables = np.repeat(2 * members, 2)
    tables[1::2] += 1
    ends = np.cumsum(np.repeat(counts, 2))
    return _Symbols(changes.counts, symbols, tables, ends, histograms, raw[:-8], raw_bits)


def _words(segment: _Symbols, tables: Mapping[int, Array]) -> Array:
    """A segment's symbols, coded."""
    words = np.empty(segment.symbols.size + 8, "<u2")
    stacked = np.stack([tables[table] for table in segment.tables.tolist()])
    start = encode_runs(segment.symbols, segment.ends, stacked, words)
    stream: Array = words[start:].copy()
    return stream


@dataclass(frozen=True)
class Coded:
    """A group in bytes: its head with the directory of segments, its streams, and its tables."""

    head: bytes
    streams: list[memoryview]
    frequencies: Mapping[int, Array]

    @property
    def size(self) -> int:
        """Bytes of head and streams."""
        return len(self.head) + sum(stream.nbytes for stream in self.streams)


def encode_group(group: Group, classes: ClassMap | None, threads: int | None = None) -> Coded:
    """Code a group.

    Args:
        classes: None to count gaps over all elements alike.
    """
    pieces = cut([patch.spec.numel for patch in group.patches])

    def code(number: int) -> _Symbols:
        changes = collect(pieces[number], group.patches, group.base, classes)
        return _to_symbols(changes, group.kind)

    segments = parallel_map(code, range(len(pieces)), threads=threads)
    totals = np.zeros((2 * CLASSES, 256), np.int64)
    for segment in segments:
        totals[segment.tables] += segment.histograms
    frequencies = {
        table: normalise(totals[table]) for table in np.flatnonzero(totals.any(1)).tolist()
    }
    tables = {table: encode_table(f) for table, f in frequencies.items()}
    streams = parallel_map(
        lambda s: _words(s, tables) if s.symbols.size else None, segments, threads=threads
    )
    head = _group_head(group, classes, frequencies)
    present = sorted({table // 2 for table in frequencies})
    buffers: list[memoryview] = []
    for segment, words in zip(segments, streams):
        for k in present:
            head += varint(int(segment.counts[k]))
        if words is not None:
            head += varint(words.size - 8) + varint(segment.raw.size)
            buffers += [words.data.cast("B"), segment.raw.data]
    return Coded(bytes(head), buffers, frequencies)


def _group_head(
    group: Group, classes: ClassMap | None, frequencies: Mapping[int, Array]
) -> bytearray:
    used = [] if classes is None else classes.used
    head = bytearray([list(DTYPES).index(group.kind.name), len(used), *used])
    head += ordinals_field([patch.ordinal for patch in group.patches])
    head += sum(1 << k for k in {table // 2 for table in frequencies}).to_bytes(2, "little")
    for table in sorted(frequencies):
        values = frequencies[table]
        size = int(np.flatnonzero(values)[-1]) + 1
        head += varint(size) + b"".join(map(varint, values[:size].tolist()))
    return head


def ordinals_field(ordinals: Sequence[int]) -> bytes:
    """How many, and each as its distance from the one before, less one."""
    field = varint(len(ordinals))
    for before, ordinal in zip([-1, *ordinals], ordinals):
        field += varint(ordinal - before - 1)
    return field


def symbol_costs(frequencies: Mapping[int, Array]) -> Array:
    """``(tables, 256)`` bits that each symbol takes with these tables, in units of 2⁻¹⁶."""
    costs = np.zeros((2 * CLASSES, 256), np.int64)
    for table, values in frequencies.items():
        costs[table, : values.size] = SCALE_BITS * ONE_BIT - log2(values)
    return costs


def coded_bits(patch: Patch, base: Bits, classes: ClassMap | None, costs: Array) -> int:
    """About how many bits a tensor takes in a group whose symbols cost this much, rounded up."""
    total = 0
    group = Group(patch.spec.dtype, [patch], [base])
    for pieces in cut([patch.spec.numel]):
        changes = collect(pieces, group.patches, group.base, classes)
        segment = _to_symbols(changes, group.kind, coded=False)
        total += segment.raw_bits * ONE_BIT
        total += int((segment.histograms * costs[segment.tables]).sum())
    return -(-total // ONE_BIT)
