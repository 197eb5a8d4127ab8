"""Payloads put together field by field, so that any one of them can be wrong.

Plain Python after ``docs/format.md``. It makes the vectors that the library's own writer would not
write: valid ones that use a writer's freedom, and ones that a reader must refuse.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SCALE = 4096
LOW = 65536


def varint(value: int) -> bytes:
    """Unsigned LEB128."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def container(
    entries: Sequence[tuple[str, str, Sequence[int], bytes]], metadata: Mapping[str, str]
) -> bytes:
    """A safetensors file of entries: name, dtype, shape, data."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return with_header(json.dumps(header).encode(), b"".join(data for *_, data in entries))


def with_header(header: bytes, data: bytes) -> bytes:
    """A file of any header and data."""
    return struct.pack("<Q", len(header)) + header + data


def payload(body: bytes, codec: str, **metadata: str) -> bytes:
    """A file of one ``changes`` entry."""
    identity = {"format": "thinwire-delta", "major": "1", "codec": codec, **metadata}
    return container([("changes", "U8", [len(body)], body)], identity)


def ordinals(*numbers: int) -> bytes:
    """The field for ascending ordinals."""
    out, before = varint(len(numbers)), -1
    for number in numbers:
        out += varint(number - before - 1)
        before = number
    return out


def table(frequencies: Sequence[int]) -> bytes:
    """The field for a table."""
    return varint(len(frequencies)) + b"".join(map(varint, frequencies))


def even_table(symbols: Sequence[int]) -> list[int]:
    """A table that gives the given symbols about equal frequencies."""
    kinds = sorted(set(symbols))
    frequencies = [0] * (kinds[-1] + 1)
    for symbol in kinds:
        frequencies[symbol] = SCALE // len(kinds)
    frequencies[kinds[0]] += SCALE - sum(frequencies)
    return frequencies


def symbol_of(value: int, sub: int) -> tuple[int, int, int]:
    """Symbol, raw bits, and how many of these."""
    r = max(0, value.bit_length() - 1 - sub)
    return (value >> r) + (r << sub), value & ((1 << r) - 1), r


@dataclass
class Streams:
    """A segment's streams.

    Attributes:
        words: 16-bit words, the eight of the states among them.
        raw: bytes of raw bits.
    """

    words: list[int]
    raw: bytes

    @property
    def data(self) -> bytes:
        """Both streams."""
        return struct.pack(f"<{len(self.words)}H", *self.words) + self.raw

    @property
    def sizes(self) -> bytes:
        """Their sizes in the directory."""
        return varint(len(self.words) - 8) + varint(len(self.raw))


Run = tuple[list[int], list[int], list[tuple[int, int]]]
"""Symbols, their table, and (raw bits, how many) for each."""


def streams(runs: Sequence[Run], last: Sequence[int] = (LOW,) * 4, junk: int = 0) -> Streams:
    """Code runs.

    Args:
        last: the states to start coding from, which decoding must end with.
        junk: what to set above the last raw bit.
    """
    states, words = list(last), list[int]()
    for symbols, frequencies, _ in reversed(runs):
        for i in reversed(range(len(symbols))):
            frequency = frequencies[symbols[i]]
            x = states[i % 4]
            if x >= frequency << 20:
                words.insert(0, x & 65535)
                x >>= 16
            start = sum(frequencies[: symbols[i]])
            states[i % 4] = (x // frequency << 12) + x % frequency + start
    bits = at = 0
    for _, _, raw in runs:
        for value, count in raw:
            bits |= value << at
            at += count
    size = (at + 7) // 8
    head = [half for x in states for half in (x & 65535, x >> 16)]
    return Streams(head + words, (bits | junk << at).to_bytes(size, "little"))


@dataclass
class Group:
    """A group of one segment, which :meth:`head` and :attr:`streams` put into bytes.

    Attributes:
        dtype: number of the dtype.
        width: bits of an element.
        tensors: the ordinals.
        changes: per class (gap, size, direction) of each change.
        thresholds: of the class map.
        tables: per class tables to use instead of even ones.
    """

    dtype: int
    width: int
    tensors: Sequence[int]
    changes: Mapping[int, Sequence[tuple[int, int, int]]]
    thresholds: Sequence[int] = ()
    tables: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def runs(self) -> list[Run]:
        """The runs of the segment."""
        runs: list[Run] = []
        for k, changes in sorted(self.changes.items()):
            if not changes:
                continue
            gaps = [symbol_of(gap, 1) for gap, _, _ in changes]
            sizes = [symbol_of(size, 1 if self.width == 64 else 2) for _, size, _ in changes]
            a = [symbol for symbol, _, _ in gaps]
            b = [s[0] << 1 | direction for s, (_, _, direction) in zip(sizes, changes)]
            mine = self.tables.setdefault(k, (even_table(a), even_table(b)))
            runs.append((a, mine[0], [s[1:] for s in gaps]))
            runs.append((b, mine[1], [s[1:] for s in sizes]))
        return runs

    @property
    def streams(self) -> Streams:
        """The streams of the segment."""
        return streams(self.runs())

    def front(self, **other: bytes) -> bytes:
        """The head without the directory; ``other`` replaces fields by name."""
        self.runs()
        present = sorted({*self.tables, *self.changes})
        fields = {
            "dtype": bytes([self.dtype]),
            "thresholds": bytes([len(self.thresholds), *self.thresholds]),
            "tensors": ordinals(*self.tensors),
            "present": sum(1 << k for k in present).to_bytes(2, "little"),
            "tables": b"".join(table(t) for k in present for t in self.tables[k]),
        }
        return b"".join({**fields, **other}.values())

    def counts(self) -> bytes:
        """The counts of the directory's entry."""
        present = sorted({*self.tables, *self.changes})
        return b"".join(varint(len(self.changes.get(k, ()))) for k in present)

    def head(self) -> bytes:
        """The head with its directory."""
        return self.front() + self.counts() + self.streams.sizes


def body(groups: Sequence[Group], dense: Sequence[tuple[int, bytes]] = ()) -> bytes:
    """The bytes of ``changes``."""
    return b"".join(
        [
            varint(len(groups)),
            *(group.head() for group in groups),
            ordinals(*(ordinal for ordinal, _ in dense)),
            *(group.streams.data for group in groups),
            *(data for _, data in dense),
        ]
    )
