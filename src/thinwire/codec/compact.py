"""``compact`` and ``packed``: coded gaps and ULP steps in one U8 tensor.

``compact`` counts a change's gap among the elements whose old values share a class of exponents, so
decoding needs the whole base; ``packed`` counts over all elements alike and needs the base at the
changed positions only. A tensor whose changes would take more than the tensor itself is stored
densely. ``docs/format.md`` has the byte layout.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
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
)
from thinwire.codec.decoding import GroupHead, decode_segment, read_group, read_ordinals
from thinwire.codec.fields import Reader, varint
from thinwire.diff import diff_bits
from thinwire.dtypes import DTYPES
from thinwire.errors import CorruptPayload, Misuse
from thinwire.patch import Bits, Patch, position_dtype
from thinwire.schema import Schema
from thinwire.weights import PIECE
from thinwire.workers import parallel_map

__all__ = ["decode", "encode"]

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
        worse = {
            patch.ordinal
            for patch, base in zip(group.patches, group.base)
            if len(patch) * _SUSPECT >= patch.spec.numel
            and coded_bits(patch, base, classes, coded.frequencies) > _WORTH * patch.spec.nbytes
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


def decode(
    tensors: Mapping[str, Bits],
    header: wire.Header,
    schema: Schema,
    base: Sequence[Bits] | None,
    *,
    classed: bool,
    threads: int | None = None,
) -> list[Patch]:
    """The patches in a file, checked, in schema order.

    Raises:
        CorruptPayload: the bytes are not ones that an encoder writes for this base.
        Misuse: there is no base.
    """
    if base is None:
        raise Misuse("this payload can only be read with the weights it applies to")
    if set(tensors) != {TENSOR} or header.entries[TENSOR].dtype != DTYPES["U8"]:
        raise CorruptPayload(f"the file holds something else than {TENSOR!r}")
    reader = Reader(tensors[TENSOR].data)
    heads = [read_group(reader, schema, classed=classed) for _ in range(reader.varint(len(DTYPES)))]
    dense = read_ordinals(reader, schema)
    ordinals = [k for head in heads for k in head.ordinals] + list(dense)
    if len(set(ordinals)) != len(ordinals):
        raise CorruptPayload("a tensor is there twice")
    patches: list[Patch] = []
    for head in heads:
        patches += _decode_group(head, reader, schema, base, threads)
    patches += [_decode_dense(k, reader, schema, base[k]) for k in dense]
    if reader.left:
        raise CorruptPayload(f"{reader.left} bytes are left over")
    return sorted(patches, key=lambda patch: patch.ordinal)


def _decode_group(
    head: GroupHead, reader: Reader, schema: Schema, base: Sequence[Bits], threads: int | None
) -> list[Patch]:
    data = [reader.take(segment.size) for segment in head.segments]
    mine = [base[k] for k in head.ordinals]
    segments = parallel_map(
        lambda number: decode_segment(head, number, data[number], mine),
        range(len(data)),
        threads=threads,
    )
    found = itertools.groupby(itertools.chain(*segments), key=lambda f: f[0].tensor)
    patches = []
    for tensor, parts in found:
        _, positions, bits = zip(*parts)
        ordinal = head.ordinals[tensor]
        index = position_dtype(schema[ordinal].numel)
        joined = positions[0] if len(positions) == 1 else np.concatenate(positions)
        patches.append(
            Patch(
                ordinal,
                schema[ordinal],
                joined.astype(index, copy=False),
                bits[0] if len(bits) == 1 else np.concatenate(bits),
            )
        )
    if len(patches) != len(head.ordinals):
        raise CorruptPayload("a tensor is named that does not change")
    return patches


def _decode_dense(ordinal: int, reader: Reader, schema: Schema, base: Bits) -> Patch:
    spec = schema[ordinal]
    bits = np.frombuffer(reader.take(spec.nbytes), np.uint8).view(spec.dtype.bits)
    index = position_dtype(spec.numel)
    parts: list[tuple[Any, Bits]] = []
    for start in range(0, spec.numel, PIECE):
        positions, new = diff_bits(
            base[start : start + PIECE], bits[start : start + PIECE], spec.dtype
        )
        parts.append((positions.astype(index) + index.type(start), new))
    if not any(new.size for _, new in parts):
        raise CorruptPayload("a tensor is named that does not change")
    return Patch(
        ordinal,
        spec,
        np.concatenate([positions for positions, _ in parts]),
        np.concatenate([new for _, new in parts]),
    )


encode_compact = functools.partial(encode, classed=True)
encode_packed = functools.partial(encode, classed=False)
decode_compact = functools.partial(decode, classed=True)
decode_packed = functools.partial(decode, classed=False)
