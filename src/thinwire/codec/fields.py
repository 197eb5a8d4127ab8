"""Numbers in a payload's directory: written as varints, read without trust."""

from __future__ import annotations

from thinwire.errors import CorruptPayload

__all__ = ["Reader", "varint"]


def varint(value: int) -> bytes:
    """Unsigned LEB128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Reader:
    """Takes fields off a buffer from its start; running out is :class:`CorruptPayload`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes not taken yet."""
        return len(self._data) - self.at

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        if size > self.left:
            raise CorruptPayload(f"{size} bytes are missing at byte {self.at}")
        self.at += size
        return self._data[self.at - size : self.at]

    def byte(self, limit: int = 255) -> int:
        """The next byte, at most ``limit``."""
        value = self.take(1)[0]
        if value > limit:
            raise CorruptPayload(f"{value} at byte {self.at - 1} is more than {limit}")
        return value

    def varint(self, limit: int) -> int:
        """An unsigned LEB128 of at most ``limit``, in its shortest form."""
        data, at = self._data, self.at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise CorruptPayload(f"a number at byte {self.at} does not end")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if value > limit or (byte == 0 and shift):
            raise CorruptPayload(f"{value} before byte {at} is not a count up to {limit}")
        self.at = at
        return value
