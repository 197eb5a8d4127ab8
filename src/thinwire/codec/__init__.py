"""Patches to bytes and back. Every payload is a valid safetensors file that says what it is.

A codec is a pair of functions in a module of its own; this page picks one by name when writing
and by the file's ``__metadata__`` when reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.codec import raw, wire
from thinwire.errors import CorruptPayload, Misuse, UnsupportedFormat
from thinwire.patch import Bits, Patch
from thinwire.schema import Schema

__all__ = ["CODECS", "FORMAT", "Codec", "decode", "encode"]

FORMAT = "thinwire-delta"
MAJOR = 1


@dataclass(frozen=True)
class Codec:
    """A way to write patches.

    Attributes:
        name: what ``__metadata__["codec"]`` says.
        encode: patches and metadata to consecutive buffers of one file.
        decode: a file's tensors and header, and the schema, to checked patches.
    """

    name: str
    encode: Callable[[Sequence[Patch], Mapping[str, str]], list[memoryview]]
    decode: Callable[[Mapping[str, Bits], wire.Header, Schema], list[Patch]]


CODECS = {codec.name: codec for codec in (Codec("raw", raw.encode, raw.decode),)}


def encode(
    patches: Sequence[Patch], *, codec: str = "raw", metadata: Mapping[str, str] | None = None
) -> list[memoryview]:
    """One payload: a safetensors file as consecutive buffers, in which patches are not copied.

    Args:
        patches: of one version, in schema order.
        metadata: further ``__metadata__`` entries: which run and version this belongs to.

    Raises:
        Misuse: there is no such codec.
    """
    chosen = CODECS.get(codec)
    if chosen is None:
        raise Misuse(f"unknown codec {codec!r}", hint=f"known codecs: {', '.join(CODECS)}")
    return chosen.encode(
        patches, {**(metadata or {}), "format": FORMAT, "major": str(MAJOR), "codec": codec}
    )


def decode(data: bytes | memoryview, schema: Schema) -> list[Patch]:
    """The patches of one payload, each checked against the schema, in schema order.

    Arrays are read-only views of ``data`` where the codec allows it.

    Raises:
        CorruptPayload: the bytes are not a payload of this run.
        UnsupportedFormat: a newer major version of the format wrote it.
    """
    header, tensors = wire.split(data)
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        raise CorruptPayload(f"not a thinwire payload: format {metadata.get('format')!r}")
    if metadata.get("major") != str(MAJOR):
        raise UnsupportedFormat(f"payload format {metadata.get('major')!r}, this reads {MAJOR}")
    codec = CODECS.get(metadata.get("codec", ""))
    if codec is None:
        raise UnsupportedFormat(f"payload codec {metadata.get('codec')!r} is not known here")
    return codec.decode(tensors, header, schema)
