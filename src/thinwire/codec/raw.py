"""``raw``: positions and new values, readable by anyone with safetensors.

For every changed tensor ``<name>.indices``, int32 (int64 above 2³¹ elements), and
``<name>.values`` in the tensor's own dtype: the layout that Hugging Face's TRL published for its
delta weight sync. Decoding needs no base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from thinwire.codec import wire
from thinwire.dtypes import DTYPES, DType
from thinwire.errors import CorruptPayload
from thinwire.patch import Bits, Patch, StepPatch, position_dtype
from thinwire.schema import Schema

__all__ = ["decode", "decode_steps", "encode"]

_INDEX = {"<i4": DTYPES["I32"], "<i8": DTYPES["I64"]}


def encode(
    patches: Sequence[Patch],
    metadata: Mapping[str, str],
    base: Sequence[Bits] | None = None,
    *,
    threads: int | None = None,
) -> list[memoryview]:
    """The file's bytes as consecutive buffers; the patches' own arrays are not copied."""
    buffers: dict[str, memoryview] = {}
    tensors = []
    for patch in patches:
        if not len(patch):
            continue
        index = _INDEX[position_dtype(patch.spec.numel).str]
        columns: tuple[tuple[str, DType, npt.NDArray[Any]], ...] = (
            (".indices", index, patch.positions),
            (".values", patch.spec.dtype, patch.bits),
        )
        for suffix, kind, array in columns:
            tensors.append((patch.name + suffix, kind, (len(patch),)))
            buffers[patch.name + suffix] = array.data.cast("B")
    head, order = wire.build_header(tensors, metadata)
    return [memoryview(head)] + [buffers[name] for name in order]


def decode(
    tensors: Mapping[str, Bits],
    header: wire.Header,
    schema: Schema,
    base: Sequence[Bits] | None = None,
    *,
    threads: int | None = None,
) -> list[Patch]:
    """The patches in a file, checked against the schema, in schema order.

    Raises:
        CorruptPayload: an entry does not belong, or does not fit its tensor.
    """
    patches = []
    for key in tensors:
        name, _, suffix = key.rpartition(".")
        partner = name + (".values" if suffix == "indices" else ".indices")
        if suffix not in ("indices", "values") or name not in schema or partner not in tensors:
            raise CorruptPayload(f"{key[:80]!r} does not belong in this file")
        if suffix == "indices":
            patches.append(_patch(name, tensors, header, schema))
    return sorted(patches, key=lambda patch: patch.ordinal)


def decode_steps(
    tensors: Mapping[str, Bits], header: wire.Header, schema: Schema
) -> list[Patch | StepPatch]:
    """Like :func:`decode`: this codec needs no base to begin with."""
    return [*decode(tensors, header, schema)]


def _patch(name: str, tensors: Mapping[str, Bits], header: wire.Header, schema: Schema) -> Patch:
    ordinal = schema.ordinal(name)
    spec = schema[ordinal]
    index = position_dtype(spec.numel)
    indices, values = header.entries[name + ".indices"], header.entries[name + ".values"]
    if indices.dtype != _INDEX[index.str] or values.dtype != spec.dtype:
        raise CorruptPayload(f"{name}: dtypes {indices.dtype} and {values.dtype} do not fit {spec}")
    if len(indices.shape) != 1 or indices.shape != values.shape or not indices.shape[0]:
        raise CorruptPayload(
            f"{name}: shapes {indices.shape} and {values.shape} are not one length"
        )
    positions = tensors[name + ".indices"].view(index)
    return Patch(ordinal, spec, positions, tensors[name + ".values"]).check()
