"""``compact`` and ``packed``: coded gaps and ULP steps in one U8 tensor.

``compact`` counts a change's gap among the elements whose old values share a class of exponents, so
decoding needs the whole base; ``packed`` counts over all elements alike and needs the base at the
changed positions only. A tensor whose changes would take more than the tensor itself is stored
densely. ``docs/format.md`` has the byte layout.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from thinwire.codec import wire
from thinwire.codec.coding import (
    Coded,
    Group,
    choose_classes,
    coded_bits,
    encode_group,
    ordinals_field,
    symbol_costs,
)
from thinwire.codec.decoding import (
    Found,
    FoundSteps,
    GroupHead,
    decode_plain_segment,
    decode_segment,
    read_group,
    read_ordinals,
)
from thinwire.codec.fields import Reader, varint
from thinwire.diff import diff_bits
from thinwire.dtypes import DTYPES
from thinwire.errors import CorruptPayload, Misuse
from thinwire.patch import Bits, Patch, StepPatch, bits_at, position_dtype
from thinwire.schema import Schema
from thinwire.ulp import resolve
from thinwire.weights import PIECE
from thinwire.workers import parallel_map

__all__ = [
    "decode_compact",
    "decode_packed",
    "decode_steps",
    "encode",
    "encode_compact",
    "encode_packed",
]

TENSOR = "changes"

_WORTH = 7.75
"""Bits per byte of the tensor that coding may take: what it saves beyond is not worth decoding."""

_SUSPECT = 8
"""A tensor with one change in so many elements, or more, is checked against storing it densely."""


def encode(
    patches: Sequence[Patch],
    metadata: Mapping[str, str],
    base: Sequence[Bits] | None,
    *,
    classed: bool,
    threads: int | None = None,
) -> list[memoryview]:
    """The file's bytes as consecutive buffers.

    Args:
        patches: in schema order, not empty.
        base: per tensor of the schema, by ordinal, ``(numel,)`` bits before the change.
        classed: ``compact`` rather than ``packed``.

    Raises:
        Misuse: there is no base.
    """
    if base is None:
        raise Misuse("this codec needs the weights before the change")
    directory, streams = bytearray(), list[memoryview]()
    dense: list[Patch] = []
    groups = 0
    patches = [patch for patch in patches if len(patch)]
    for kind in DTYPES.values():
        mine = [patch for patch in patches if patch.spec.dtype == kind]
        group = Group(kind, mine, [base[patch.ordinal] for patch in mine])
        coded, too_dense = _code(group, classed, threads)
        dense += too_dense
        if coded is not None:
            groups += 1
            directory += coded.head
            streams += coded.streams
    dense.sort(key=lambda patch: patch.ordinal)
    front = varint(groups) + directory + ordinals_field([patch.ordinal for patch in dense])
    streams += [_whole(patch, base[patch.ordinal]) for patch in dense]
    size = len(front) + sum(stream.nbytes for stream in streams)
    head, _ = wire.build_header([(TENSOR, DTYPES["U8"], (size,))], metadata)
    return [memoryview(head), memoryview(front), *streams]


def _code(group: Group, classed: bool, threads: int | None) -> tuple[Coded | None, list[Patch]]:
    """A coded group, and the patches that are better stored densely."""
    dense: list[Patch] = []
    while group.patches:
        classes = choose_classes(group) if classed else None
        coded = encode_group(group, classes, threads)
        costs = symbol_costs(coded.frequencies)
        worse = {
            patch.ordinal
            for patch, base in zip(group.patches, group.base)
            if len(patch) * _SUSPECT >= patch.spec.numel
            and coded_bits(patch, base, classes, costs) > _WORTH * patch.spec.nbytes
        }
        if coded.size > sum(patch.spec.nbytes for patch in group.patches):
            worse = {patch.ordinal for patch in group.patches}  # tables count as well
        if not worse:
            return coded, dense
        pairs = list(zip(group.patches, group.base))
        dense += [patch for patch, _ in pairs if patch.ordinal in worse]
        kept = [pair for pair in pairs if pair[0].ordinal not in worse]
        group = Group(group.kind, [p for p, _ in kept], [b for _, b in kept])
    return None, dense


def _whole(patch: Patch, base: Bits) -> memoryview:
    bits = base.copy()
    bits[patch.positions] = patch.bits
    whole: memoryview = bits.data.cast("B")
    return whole


def decode_compact(
    tensors: Mapping[str, Bits],
    header: wire.Header,
    schema: Schema,
    base: Sequence[Bits] | None,
    *,
    threads: int | None = None,
) -> list[Patch]:
    """The patches in a ``compact`` file, checked, in schema order.

    Raises:
        CorruptPayload: the bytes are not ones that an encoder writes for this base.
        Misuse: there is no base.
    """
    if base is None:
        raise Misuse(NO_BASE)
    content = _Content(tensors, header, schema, classed=True)
    patches: list[Patch] = []
    for head in content.heads:
        mine = [base[k] for k in head.ordinals]
        decode = functools.partial(_segment_of, head, content.take(head), mine)
        found = parallel_map(decode, range(len(head.segments)), threads=threads)
        for ordinal, (positions, bits) in _by_tensor(head, itertools.chain(*found)):
            patches.append(Patch(ordinal, schema[ordinal], positions, bits))
    patches += [_against(patch, base[patch.ordinal]) for patch in content.dense()]
    return sorted(patches, key=lambda patch: patch.ordinal)


def decode_packed(
    tensors: Mapping[str, Bits],
    header: wire.Header,
    schema: Schema,
    base: Sequence[Bits] | None,
    *,
    threads: int | None = None,
) -> list[Patch]:
    """The patches in a ``packed`` file, checked, in schema order. Raises as the above."""
    if base is None:
        raise Misuse(NO_BASE)
    found = decode_steps(tensors, header, schema, threads=threads)
    return parallel_map(
        lambda patch: (
            resolve(patch, bits_at(base[patch.ordinal], patch.positions))
            if isinstance(patch, StepPatch)
            else _against(patch, base[patch.ordinal])
        ),
        found,
        threads=threads,
    )


def decode_steps(
    tensors: Mapping[str, Bits],
    header: wire.Header,
    schema: Schema,
    *,
    threads: int | None = None,
) -> list[Patch | StepPatch]:
    """The changes in a ``packed`` file as ULP steps, in schema order; dense tensors as they are.

    Raises:
        CorruptPayload: the bytes are not ones that an encoder writes.
    """
    content = _Content(tensors, header, schema, classed=False)
    patches: list[Patch | StepPatch] = []
    for head in content.heads:
        decode = functools.partial(_plain_segment_of, head, content.take(head))
        found = parallel_map(decode, range(len(head.segments)), threads=threads)
        for ordinal, (positions, sizes, outward) in _by_tensor(head, itertools.chain(*found)):
            patches.append(StepPatch(ordinal, schema[ordinal], positions, sizes, outward))
    patches += content.dense()
    return sorted(patches, key=lambda patch: patch.ordinal)


NO_BASE = "this payload can only be read with the weights it applies to"


def _segment_of(
    head: GroupHead, data: Sequence[memoryview], base: Sequence[Bits], number: int
) -> list[Found]:
    return decode_segment(head, number, data[number], base)


def _plain_segment_of(head: GroupHead, data: Sequence[memoryview], number: int) -> list[FoundSteps]:
    return decode_plain_segment(head, number, data[number])


class _Content:
    """A file's directory, read and checked, and its streams in the order they are taken."""

    def __init__(
        self,
        tensors: Mapping[str, Bits],
        header: wire.Header,
        schema: Schema,
        *,
        classed: bool,
    ) -> None:
        entry = header.entries.get(TENSOR)
        if set(tensors) != {TENSOR} or entry is None:
            raise CorruptPayload(f"the file holds something else than {TENSOR!r}")
        if entry.dtype != DTYPES["U8"] or len(entry.shape) != 1:
            raise CorruptPayload(f"{TENSOR!r} is not one row of bytes")
        self._reader = Reader(tensors[TENSOR].data)
        self._schema = schema
        groups = self._reader.varint(len(DTYPES))
        self.heads = [read_group(self._reader, schema, classed=classed) for _ in range(groups)]
        self._dense = read_ordinals(self._reader, schema)
        ordinals = [k for head in self.heads for k in head.ordinals] + list(self._dense)
        if len(set(ordinals)) != len(ordinals):
            raise CorruptPayload("a tensor is there twice")

    def take(self, head: GroupHead) -> list[memoryview]:
        """The streams of a group's segments; groups are taken in their order."""
        return [self._reader.take(segment.size) for segment in head.segments]

    def dense(self) -> list[Patch]:
        """The tensors that are stored whole, as patches of all their elements; taken last."""
        patches = []
        for ordinal in self._dense:
            spec = self._schema[ordinal]
            bits = np.frombuffer(self._reader.take(spec.nbytes), np.uint8).view(spec.dtype.bits)
            positions = np.arange(spec.numel, dtype=position_dtype(spec.numel))
            patches.append(Patch(ordinal, spec, positions, bits))
        if self._reader.left:
            raise CorruptPayload(f"{self._reader.left} bytes are left over")
        return patches


def _by_tensor(
    head: GroupHead, found: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[int, list[Any]]]:
    """Ordinal and joined arrays of every tensor, from the pieces of all segments in order."""
    seen = 0
    for tensor, parts in itertools.groupby(found, key=lambda part: part[0].tensor):
        seen += 1
        columns = list(zip(*parts))[1:]
        yield head.ordinals[tensor], [c[0] if len(c) == 1 else np.concatenate(c) for c in columns]
    if seen != len(head.ordinals):
        raise CorruptPayload("a tensor is named that does not change")


def _against(whole: Patch, base: Bits) -> Patch:
    """What a tensor that is stored whole changes."""
    parts: list[tuple[Any, Bits]] = []
    for start in range(0, base.size, PIECE):
        piece = slice(start, start + PIECE)
        positions, new = diff_bits(base[piece], whole.bits[piece], whole.spec.dtype)
        parts.append((positions.astype(whole.positions.dtype) + start, new))
    if not any(new.size for _, new in parts):
        raise CorruptPayload("a tensor is named that does not change")
    index = whole.positions.dtype
    positions = np.concatenate([positions for positions, _ in parts]).astype(index, copy=False)
    return Patch(whole.ordinal, whole.spec, positions, np.concatenate([new for _, new in parts]))


encode_compact = functools.partial(encode, classed=True)
encode_packed = functools.partial(encode, classed=False)
