"""LZ4 frames, read in plain Python: what Xet compresses chunks with.

Follows the LZ4 frame and block format descriptions (lz4 ``doc/lz4_Frame_format.md`` and
``doc/lz4_Block_format.md``). Checksums are skipped. It is here so that the server can hand out
file contents, and check sizes, without the client under test doing it for the server.
"""

from __future__ import annotations

__all__ = ["decompress"]

MAGIC = b"\x04\x22\x4d\x18"


def decompress(frame: bytes | memoryview) -> bytes:
    """The content of one frame.

    Raises:
        ValueError: it is none, or it is damaged.
    """
    data = bytes(frame)
    if data[:4] != MAGIC:
        raise ValueError("not an LZ4 frame")
    flags = data[4]
    block_checksum, content_size, dictionary = flags & 16, flags & 8, flags & 1
    position = 7 + (8 if content_size else 0) + (4 if dictionary else 0)
    output = bytearray()
    try:
        while size := int.from_bytes(data[position : position + 4], "little"):
            position += 4
            length = size & 0x7FFFFFFF
            block = data[position : position + length]
            if len(block) != length:
                raise ValueError("an LZ4 block is cut short")
            if size >> 31:
                output += block
            else:
                _decode_block(block, output)
            position += length + (4 if block_checksum else 0)
    except IndexError:
        raise ValueError("an LZ4 block is damaged") from None
    return bytes(output)


def _decode_block(block: bytes, output: bytearray) -> None:
    """Append what a block says; matches may reach back into the blocks before it."""
    position, end = 0, len(block)
    while position < end:
        token = block[position]
        position += 1
        literals, position = _length(token >> 4, block, position)
        output += block[position : position + literals]
        position += literals
        if position >= end:  # the last sequence has no match
            return
        offset = block[position] | block[position + 1] << 8
        position += 2
        length, position = _length(token & 15, block, position)
        length += 4
        start = len(output) - offset
        if offset == 0 or start < 0:
            raise ValueError("an LZ4 match starts before the content")
        if offset >= length:
            output += output[start : start + length]
        else:  # the match overlaps what it makes: its own bytes, over and over
            pattern = bytes(output[start:])
            output += (pattern * (length // offset + 1))[:length]


def _length(nibble: int, block: bytes, position: int) -> tuple[int, int]:
    if nibble == 15:
        while True:
            more = block[position]
            position += 1
            nibble += more
            if more != 255:
                break
    return nibble, position
