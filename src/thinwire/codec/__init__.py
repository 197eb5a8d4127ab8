"""Patches to bytes and back. Every payload is a valid safetensors file that says what it is.

A codec is a pair of functions in a module of its own; this page picks one by name when writing
and by the file's ``__metadata__`` when reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from thinwire.codec import compact, raw, wire
from thinwire.errors import CorruptPayload, Misuse, UnsupportedFormat
from thinwire.patch import Bits, Patch, StepPatch
from thinwire.schema import Schema, TensorSpec

__all__ = ["CODECS", "FORMAT", "Codec", "decode", "decode_steps", "encode", "resolve"]

FORMAT = "thinwire-delta"
MAJOR = 1

AnyPatch: TypeAlias = Patch | StepPatch


class Encode(Protocol):
    """Patches, metadata and the base to consecutive buffers of one file."""

    def __call__(
        self,
        patches: Sequence[Patch],
        metadata: Mapping[str, str],
        base: Sequence[Bits] | None,
        *,
        threads: int | None = None,
    ) -> list[memoryview]: ...


class Decode(Protocol):
    """A file's tensors and header, the schema and the base to checked patches."""

    def __call__(
        self,
        tensors: Mapping[str, Bits],
        header: wire.Header,
        schema: Schema,
        base: Sequence[Bits] | None,
        *,
        threads: int | None = None,
    ) -> list[Patch]: ...


@dataclass(frozen=True)
class Codec:
    """A way to write patches.

    Attributes:
        name: what ``__metadata__["codec"]`` says.
        encode: see :class:`Encode`.
        decode: see :class:`Decode`.
        needs_base: whether decoding takes the weights that the payload applies to.
        decode_steps: decoding without them, to patches or steps; None if that is impossible.
    """

    name: str
    encode: Encode
    decode: Decode
    needs_base: bool
    decode_steps: Callable[[Mapping[str, Bits], wire.Header, Schema], list[AnyPatch]] | None = None


CODECS = {
    codec.name: codec
    for codec in (
        Codec("raw", raw.encode, raw.decode, False, raw.decode_steps),
        Codec("packed", compact.encode_packed, compact.decode_packed, True, compact.decode_steps),
        Codec("compact", compact.encode_compact, compact.decode_compact, needs_base=True),
    )
}

AUTO = "compact"
"""What ``"auto"`` means: the smallest payloads, wherever replicas keep a mirror."""


def resolve(name: str) -> str:
    """The codec that a user's choice means.

    Raises:
        Misuse: there is no such codec.
    """
    chosen = AUTO if name == "auto" else name
    if chosen not in CODECS:
        raise Misuse(f"unknown codec {name!r}", hint=f"known codecs: auto, {', '.join(CODECS)}")
    return chosen


def encode(
    patches: Sequence[Patch],
    *,
    codec: str = "raw",
    metadata: Mapping[str, str] | None = None,
    base: Sequence[Bits] | None = None,
    threads: int | None = None,
) -> list[memoryview]:
    """One payload: a safetensors file as consecutive buffers.

    Args:
        patches: of one version, in schema order.
        metadata: further ``__metadata__`` entries: which run and version this belongs to.
        base: per tensor of the schema ``(numel,)`` bits before the change; ``raw`` needs none.

    Raises:
        Misuse: there is no such codec, it needs the base, or the base does not fit the tensors.
    """
    name = resolve(codec)
    if base is not None:
        _check_base([(patch.ordinal, patch.spec) for patch in patches], base)
    identity = {"format": FORMAT, "major": str(MAJOR), "codec": name}
    return CODECS[name].encode(patches, {**(metadata or {}), **identity}, base, threads=threads)


def decode(
    data: bytes | memoryview,
    schema: Schema,
    base: Sequence[Bits] | None = None,
    *,
    threads: int | None = None,
) -> list[Patch]:
    """The patches of one payload, each checked against the schema, in schema order.

    Args:
        base: per tensor of the schema ``(numel,)`` bits that the payload applies to. A wrong base
            gives wrong patches or an error; the digests that follow tell.

    Raises:
        CorruptPayload: the bytes are not a payload of this run.
        UnsupportedFormat: a newer major version of the format wrote it.
        Misuse: the payload cannot be read without a base, or this is none of the schema.
    """
    codec, header, tensors = _open(data)
    if base is not None:
        _check_base(list(enumerate(schema)), base)
    return codec.decode(tensors, header, schema, base, threads=threads)


def _check_base(specs: Sequence[tuple[int, TensorSpec]], base: Sequence[Bits]) -> None:
    """Kernels trust that the base has the elements that the schema says."""
    for ordinal, spec in specs:
        if ordinal >= len(base):
            raise Misuse(f"{spec.name}: the base ends before this tensor")
        bits = base[ordinal]
        if bits.shape != (spec.numel,) or bits.dtype != spec.dtype.bits:
            raise Misuse(
                f"{spec.name}: the base is {bits.dtype} of shape {bits.shape}, "
                f"the tensor has {spec.numel} elements of {spec.dtype}"
            )


def decode_steps(data: bytes | memoryview, schema: Schema) -> list[AnyPatch]:
    """Like :func:`decode`, without the weights that the payload applies to: changes as ULP steps.

    Raises:
        CorruptPayload, UnsupportedFormat: as for :func:`decode`.
        Misuse: the payload's codec counts positions by the weights themselves.
    """
    codec, header, tensors = _open(data)
    if codec.decode_steps is None:
        raise Misuse(
            f"{codec.name} payloads can only be read with a mirror",
            hint='keep a mirror, or publish with codec="packed"',
        )
    return codec.decode_steps(tensors, header, schema)


def _open(data: bytes | memoryview) -> tuple[Codec, wire.Header, dict[str, Bits]]:
    header, tensors = wire.split(data)
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        raise CorruptPayload(f"not a thinwire payload: format {metadata.get('format')!r}")
    if metadata.get("major") != str(MAJOR):
        raise UnsupportedFormat(f"payload format {metadata.get('major')!r}, this reads {MAJOR}")
    codec = CODECS.get(metadata.get("codec", ""))
    if codec is None:
        raise UnsupportedFormat(f"payload codec {metadata.get('codec')!r} is not known here")
    return codec, header, tensors
