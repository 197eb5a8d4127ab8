"""HTTP/1.1 messages as a proxy needs them (RFC 9112): a head kept to the byte, a body in pieces.

Heads are passed on as they came: the Host header and every signed header reach the other side
unchanged. Only the framing of a body is taken apart and put together again.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "BLOCK",
    "MAX_HEAD",
    "BadMessage",
    "Framing",
    "Head",
    "Stream",
    "pieces",
    "read_head",
    "write_pieces",
]

BLOCK = 64 << 10
MAX_HEAD = 256 << 10
LINGER_S = 1.0


class BadMessage(ConnectionError):
    """What came is no HTTP, or ended in the middle of a message."""


@dataclass(frozen=True)
class Framing:
    """How the end of a body is found; ``size`` is known for the kind "length" alone."""

    kind: Literal["none", "length", "chunked", "close"]
    size: int = 0


@dataclass
class Head:
    """A start line and header fields, and the bytes they came as."""

    raw: bytes
    start: tuple[str, str, str]
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.start[1])

    def get(self, name: str) -> str:
        """A field's value in lower case, or ""."""
        return self.fields.get(name, "").lower()

    def request_framing(self) -> Framing:
        if "chunked" in self.get("transfer-encoding"):
            return Framing("chunked")
        size = int(self.get("content-length") or 0)
        return Framing("length", size) if size else Framing("none")

    def response_framing(self, method: str) -> Framing:
        if method == "HEAD" or self.status < 200 or self.status in (204, 304):
            return Framing("none")
        if "chunked" in self.get("transfer-encoding"):
            return Framing("chunked")
        length = self.get("content-length")
        return Framing("length", int(length)) if length else Framing("close")

    def ends_connection(self) -> bool:
        """Whether the side that sent this head closes the connection after the message."""
        if "close" in self.get("connection"):
            return True
        return "HTTP/1.0" in self.start and "keep-alive" not in self.get("connection")


class Stream:
    """One connection: a reader and a writer that end together."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, host: str, port: int) -> Stream:
        return cls(*await asyncio.open_connection(host, port, limit=MAX_HEAD))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """End with a TCP reset: the other side sees a broken connection, not an end."""
        found = self.writer.get_extra_info("socket")
        if found is not None and found.fileno() >= 0:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()

    async def finish(self) -> None:
        """End in order: closing with a body unread would take the response back (RFC 9112, 9.6)."""
        if self.writer.can_write_eof():
            self.writer.write_eof()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drained(), LINGER_S)
        self.writer.close()

    async def _drained(self) -> None:
        while await self.reader.read(BLOCK):
            pass


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head, or None where the other side has ended the connection before one.

    Raises:
        BadMessage: it is no HTTP, or stops in the middle.
    """
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise BadMessage("a head that ends in the middle") from None
    except asyncio.LimitOverrunError:
        raise BadMessage("a head without an end") from None
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    start = first.split(" ", 2)
    if len(start) == 2 and start[0].startswith("HTTP/"):
        start.append("")  # a status line may come without a reason
    if len(start) != 3:
        raise BadMessage(f"not a start line: {first[:80]!r}")
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    return Head(raw, (start[0], start[1], start[2]), fields)


async def pieces(reader: asyncio.StreamReader, framing: Framing) -> AsyncIterator[bytes]:
    """A body without its framing, in pieces of at most ``BLOCK`` bytes.

    Raises:
        BadMessage: it stops before its end.
    """
    if framing.kind == "length":
        async for piece in _exactly(reader, framing.size):
            yield piece
    elif framing.kind == "close":
        while piece := await reader.read(BLOCK):
            yield piece
    elif framing.kind == "chunked":
        while size := _chunk_size(await _line(reader)):
            async for piece in _exactly(reader, size):
                yield piece
            if await _line(reader) != b"":
                raise BadMessage("a chunk longer than it says")
        while await _line(reader) != b"":
            pass  # trailers


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        try:
            piece = await reader.read(min(size, BLOCK))
        except ConnectionError as error:
            raise BadMessage(f"a body that ends in the middle: {error}") from None
        if not piece:
            raise BadMessage("a body that ends in the middle")
        size -= len(piece)
        yield piece


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n"))[:-2]
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        raise BadMessage("a chunk that ends in the middle") from None


def _chunk_size(line: bytes) -> int:
    found = re.match(rb"[0-9a-fA-F]+", line)
    if found is None:
        raise BadMessage(f"not the size of a chunk: {line[:40]!r}")
    return int(found[0], 16)


async def write_pieces(stream: Stream, framing: Framing, body: AsyncIterator[bytes]) -> None:
    """Send a body in the framing that its head has announced."""
    async for piece in body:
        if framing.kind == "chunked":
            await stream.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            await stream.send(piece)
    if framing.kind == "chunked":
        await stream.send(b"0\r\n\r\n")
