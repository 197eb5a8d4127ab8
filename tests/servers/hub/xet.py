"""Xet's binary formats: xorbs and shards, read; and the plainest xorb, written.

Formats: hub-docs ``docs/xet/xorb.md`` and ``docs/xet/shard.md``. Integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from servers.hub import lz4

__all__ = [
    "Shard",
    "Term",
    "XorbLayout",
    "hash_text",
    "pack_xorb",
    "read_shard",
    "read_xorb",
    "unpack_chunk",
]

SHARD_TAG = b"HFRepoMetaData"
HEADER_SIZE = ENTRY_SIZE = 48
BOOKEND = b"\xff" * 32
WITH_VERIFICATION, WITH_METADATA = 1 << 31, 1 << 30

FOOTER_TAG = b"XETBLOB"
CHUNK_HEADER = 8
PLAIN, LZ4, GROUPED_LZ4 = range(3)
MAX_XORB = 64 << 20
MAX_CHUNK = 128 << 10


class Term(NamedTuple):
    """A stretch of a file: chunks ``first`` to ``end`` (exclusive) of a xorb, ``size`` bytes."""

    xorb: str
    size: int
    first: int
    end: int


@dataclass(frozen=True)
class Shard:
    """What a client says about the files it uploads.

    Attributes:
        files: terms of each file, by the file's hash.
        xorbs: unpacked sizes of the chunks of each new xorb, by the xorb's hash.
    """

    files: dict[str, list[Term]]
    xorbs: dict[str, list[int]]


@dataclass(frozen=True)
class XorbLayout:
    """Where a xorb's chunks are.

    Attributes:
        offsets: where each chunk's header starts, and where the last chunk ends.
        sizes: unpacked bytes of each chunk.
    """

    offsets: list[int]
    sizes: list[int]


def hash_text(raw: bytes) -> str:
    """A hash as API paths and JSON have it: four little-endian 64-bit words (docs/xet/api.md)."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def read_shard(data: bytes) -> Shard:
    """A shard as uploaded, without footer.

    Raises:
        ValueError: it is malformed.
    """
    if data[: len(SHARD_TAG)] != SHARD_TAG or struct.unpack_from("<Q", data, 32)[0] != 2:
        raise ValueError("not a shard of version 2")
    try:
        files, position = _read_files(data, HEADER_SIZE)
        return Shard(files, _read_xorbs(data, position))
    except struct.error:
        raise ValueError("the shard is cut short") from None


def _read_files(data: bytes, position: int) -> tuple[dict[str, list[Term]], int]:
    files: dict[str, list[Term]] = {}
    while True:
        raw, flags, count, _ = struct.unpack_from("<32sIIQ", data, position)
        position += ENTRY_SIZE
        if raw == BOOKEND:
            return files, position
        terms = []
        for _ in range(count):
            xorb, _flags, size, first, end = struct.unpack_from("<32s4I", data, position)
            terms.append(Term(hash_text(xorb), size, first, end))
            position += ENTRY_SIZE
        if not flags & WITH_VERIFICATION:
            raise ValueError("an uploaded shard needs verification entries")
        position += count * ENTRY_SIZE
        if flags & WITH_METADATA:
            position += ENTRY_SIZE
        files[hash_text(raw)] = terms


def _read_xorbs(data: bytes, position: int) -> dict[str, list[int]]:
    xorbs: dict[str, list[int]] = {}
    while True:
        raw, _flags, count, total, _packed = struct.unpack_from("<32s4I", data, position)
        position += ENTRY_SIZE
        if raw == BOOKEND:
            return xorbs
        sizes = []
        for _ in range(count):
            _chunk, _start, size, _ = struct.unpack_from("<32sIIQ", data, position)
            sizes.append(size)
            position += ENTRY_SIZE
        if sum(sizes) != total:
            raise ValueError("a xorb's chunks do not add up to its size")
        xorbs[hash_text(raw)] = sizes


def read_xorb(data: bytes) -> XorbLayout:
    """Where the chunks of a serialised xorb are; a footer is allowed and not looked at.

    Raises:
        ValueError: it is too large, cut short, or no xorb.
    """
    offsets, sizes, position = [0], [], 0
    while position < len(data) and not data.startswith(FOOTER_TAG, position):
        version, packed, scheme, size = _chunk_header(data, position)
        if version != 0 or scheme > GROUPED_LZ4 or size > MAX_CHUNK:
            raise ValueError(f"no chunk at byte {position}")
        position += CHUNK_HEADER + packed
        offsets.append(position)
        sizes.append(size)
    if position > len(data) or not sizes:
        raise ValueError("the xorb is cut short")
    # The documents limit what is serialised, but hf_xet 1.8 counts without headers and footer.
    if sum(sizes) > MAX_XORB:
        raise ValueError("the xorb holds more than 64 MiB")
    return XorbLayout(offsets, sizes)


def unpack_chunk(data: bytes, position: int) -> bytes:
    """The content of the chunk whose header is at ``position``.

    Raises:
        ValueError: it does not unpack to the size its header names.
    """
    _version, packed, scheme, size = _chunk_header(data, position)
    content = data[position + CHUNK_HEADER : position + CHUNK_HEADER + packed]
    if scheme != PLAIN:
        content = lz4.decompress(content)
    if scheme == GROUPED_LZ4:
        content = _ungroup(content)
    if len(content) != size:
        raise ValueError(f"a chunk unpacks to {len(content)} bytes instead of {size}")
    return content


def pack_xorb(content: bytes) -> bytes:
    """``content`` as a xorb of uncompressed chunks, without footer."""
    return b"".join(_plain_chunks(content))


def _plain_chunks(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), MAX_CHUNK):
        chunk = content[start : start + MAX_CHUNK]
        size = len(chunk).to_bytes(3, "little")
        yield b"\0" + size + bytes([PLAIN]) + size + chunk


def _chunk_header(data: bytes, position: int) -> tuple[int, int, int, int]:
    header = data[position : position + CHUNK_HEADER]
    if len(header) < CHUNK_HEADER:
        raise ValueError("the xorb is cut short")
    packed, size = int.from_bytes(header[1:4], "little"), int.from_bytes(header[5:], "little")
    return header[0], packed, header[4], size


def _ungroup(grouped: bytes) -> bytes:
    """Bytes back from four groups: first those at indices 0, 4, 8 …, then 1, 5, 9 …"""
    output = bytearray(len(grouped))
    start = 0
    for first in range(4):
        count = len(range(first, len(grouped), 4))
        output[first::4] = grouped[start : start + count]
        start += count
    return bytes(output)
