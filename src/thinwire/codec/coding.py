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
from thinwire.codec.simd import BLOCK
from thinwire.codec.tokens import symbols_of, write_raw
from thinwire.dtypes import DTYPES, DType
from thinwire.patch import Bits, Patch
from thinwire.ulp import signed_float, steps_between
from thinwire.workers import parallel_map

__all__ = ["GAP_SUB", "Group", "choose_classes", "coded_bits", "encode_group", "step_sub"]

Array = npt.NDArray[Any]

GAP_SUB = 1
"""Bits below the leading one that a gap's symbol holds."""

_SAMPLE_BLOCKS = 256
"""One block in so many is looked at to estimate how many elements each key has."""

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
    old = np.concatenate([b[p.positions[::stride]] for p, b in zip(group.patches, group.base)])
    new = np.concatenate([p.bits[::stride] for p in group.patches])
    sizes, outward = np.empty_like(old), np.empty(old.size, np.uint8)
    steps_between(old, new, signed_float(group.kind), sizes, outward)
    symbols, _ = _step_symbols(sizes, outward, group.kind)
    index = plain.keys(old).astype(np.int64) << 8 | symbols
    tokens = np.bincount(index, minlength=65536).reshape(256, 256) * stride
    sample = np.concatenate([_sampled(base) for base in group.base])
    population = np.bincount(plain.keys(sample), minlength=256) * _SAMPLE_BLOCKS
    return ClassMap.of(group.kind, choose_thresholds(population, tokens))


def _sampled(base: Bits) -> Bits:
    """Every so many blocks of a tensor, the first one among them."""
    blocks = base[: base.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    return blocks[::_SAMPLE_BLOCKS].ravel()


@dataclass(frozen=True)
class _Run:
    """Values of one class in one segment: gaps (even tables) or steps (odd ones), as symbols."""

    table: int
    symbols: Array
    values: Array
    sub: int


def _runs(changes: Changes, kind: DType) -> tuple[list[_Run], int]:
    """A segment's runs in stream order, and how many raw bits go with them."""
    runs = []
    raw = 0
    ends = np.cumsum(changes.counts)
    for k in np.flatnonzero(changes.counts).tolist():
        part = slice(int(ends[k] - changes.counts[k]), int(ends[k]))
        gaps, sizes = changes.gaps[part], changes.sizes[part]
        symbols = np.empty(gaps.size, np.uint8)
        raw += symbols_of(gaps, GAP_SUB, symbols)
        runs.append(_Run(2 * k, symbols, gaps, GAP_SUB))
        symbols, bits = _step_symbols(sizes, changes.outward[part], kind)
        raw += bits
        runs.append(_Run(2 * k + 1, symbols, sizes, step_sub(kind)))
    return runs, raw


def _stream(runs: Sequence[_Run], raw: int, tables: Mapping[int, Array]) -> tuple[Array, Array]:
    """A segment's words and raw bytes."""
    symbols = np.concatenate([run.symbols for run in runs])
    ends = np.cumsum([run.symbols.size for run in runs])
    words = np.empty(symbols.size + 8, "<u2")
    start = encode_runs(symbols, ends, np.stack([tables[run.table] for run in runs]), words)
    size = (raw + 7) // 8
    data = np.zeros(size + 8, np.uint8)
    bit = 0
    for run in runs:
        bit = write_raw(run.values, run.sub, data, bit)
    return words[start:].copy(), data[:size]


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

    def code(number: int) -> tuple[Array, list[_Run], int]:
        changes = collect(pieces[number], group.patches, group.base, classes)
        return changes.counts, *_runs(changes, group.kind)

    coded = parallel_map(code, range(len(pieces)), threads=threads)
    histograms: dict[int, Array] = {}
    for _, runs, _ in coded:
        for run in runs:
            counts = np.bincount(run.symbols, minlength=256)
            histograms[run.table] = histograms.get(run.table, 0) + counts
    frequencies = {table: normalise(counts) for table, counts in sorted(histograms.items())}
    tables = {table: encode_table(f) for table, f in frequencies.items()}
    streams = parallel_map(
        lambda c: _stream(c[1], c[2], tables) if c[1] else None, coded, threads=threads
    )
    head = _group_head(group, classes, frequencies)
    present = sorted({table // 2 for table in frequencies})
    buffers: list[memoryview] = []
    for (counts, _, _), stream in zip(coded, streams):
        for k in present:
            head += varint(int(counts[k]))
        if stream is not None:
            words, raw = stream
            head += varint(words.size - 8) + varint(raw.size)
            buffers += [words.data.cast("B"), raw.data]
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


def coded_bits(
    patch: Patch, base: Bits, classes: ClassMap | None, frequencies: Mapping[int, Array]
) -> int:
    """About how many bits a tensor takes in a group with these tables, rounded up."""
    total = 0
    group = Group(patch.spec.dtype, [patch], [base])
    for pieces in cut([patch.spec.numel]):
        runs, raw = _runs(collect(pieces, group.patches, group.base, classes), group.kind)
        total += raw * ONE_BIT
        for run in runs:
            counts = np.bincount(run.symbols, minlength=256)
            lengths = SCALE_BITS * ONE_BIT - log2(frequencies[run.table])
            total += int((counts[: lengths.size] * lengths).sum())
    return -(-total // ONE_BIT)
