"""A second reader of payloads, written from ``docs/format.md`` alone: plain, slow, no dependencies.

It shares no code with the library, so that the two of them and the specification hold each other
to account. Nothing here is fast, and nothing is meant to be.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Change = tuple[int, int]
"""A position and the new bits."""


class Refused(Exception):
    """The file is not one that a reader may accept.

    Attributes:
        kind: ``"corrupt"``, or ``"unsupported"`` for another major version or codec.
    """

    def __init__(self, reason: str, kind: str = "corrupt") -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Kind:
    """A dtype: bits of an element, and the shift and mask that give its key (mask 0: no sign)."""

    width: int
    shift: int
    mask: int


KINDS = {
    "BOOL": Kind(8, 0, 0),
    "U8": Kind(8, 0, 0),
    "I8": Kind(8, 0, 0),
    "F8_E4M3": Kind(8, 3, 15),
    "F8_E5M2": Kind(8, 2, 31),
    "F8_E8M0": Kind(8, 0, 0),
    "I16": Kind(16, 0, 0),
    "U16": Kind(16, 0, 0),
    "F16": Kind(16, 10, 31),
    "BF16": Kind(16, 7, 255),
    "I32": Kind(32, 0, 0),
    "U32": Kind(32, 0, 0),
    "F32": Kind(32, 23, 255),
    "I64": Kind(64, 0, 0),
    "U64": Kind(64, 0, 0),
    "F64": Kind(64, 55, 255),
}
NUMBERS = list(KINDS)

SEGMENT = 1 << 22
SCALE = 4096
LOW = 65536


@dataclass(frozen=True)
class Tensor:
    """A tensor of the schema."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        return KINDS[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.kind.width // 8


def element(data: bytes, index: int, width: int) -> int:
    size = width // 8
    return int.from_bytes(data[index * size : (index + 1) * size], "little")


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Refused(reason)


def decode(
    file: bytes, tensors: Iterable[tuple[str, str, Iterable[int]]], base: Mapping[str, bytes]
) -> dict[str, list[Change]]:
    """The changes of one payload, by tensor; only tensors that change.

    Args:
        file: the payload.
        tensors: name, dtype and shape of every tensor of the schema.
        base: their bytes, little-endian, in the state that the payload applies to.

    Raises:
        Refused: as the specification demands.
    """
    schema = [Tensor(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
    schema.sort(key=lambda tensor: tensor.name.encode())
    metadata, entries = read_container(file)
    require(metadata.get("format") == "thinwire-delta", "another format")
    if metadata.get("major") != "1":
        raise Refused("another major version", "unsupported")
    codec = metadata.get("codec")
    if codec == "raw":
        return read_raw(entries, {tensor.name: tensor for tensor in schema})
    if codec not in ("packed", "compact"):
        raise Refused("an unknown codec", "unsupported")
    require(set(entries) == {"changes"}, "not exactly one entry")
    dtype, shape, data = entries["changes"]
    require(dtype == "U8" and len(shape) == 1, "changes is not a row of bytes")
    return read_changes(Fields(data), schema, base, classed=codec == "compact")


# The container

Entry = tuple[str, list[int], bytes]


def read_container(file: bytes) -> tuple[dict[str, str], dict[str, Entry]]:
    require(len(file) >= 8, "no header")
    (length,) = struct.unpack("<Q", file[:8])
    require(length <= 100_000_000 and 8 + length <= len(file), "the header is too long")
    try:
        header = json.loads(file[8 : 8 + length].decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise Refused("the header is not JSON") from None
    require(isinstance(header, dict), "the header is not an object")
    metadata = header.pop("__metadata__", {})
    require(isinstance(metadata, dict), "metadata is not an object")
    require(all(isinstance(value, str) for value in metadata.values()), "metadata is not strings")
    data = file[8 + length :]
    spans = {name: entry_span(value) for name, value in header.items()}
    at = 0
    for begin, end in sorted(spans.values()):
        require(begin == at, "a gap or an overlap")
        at = end
    require(at == len(data), "the data does not end with the file")
    return metadata, {
        name: (header[name]["dtype"], header[name]["shape"], data[begin:end])
        for name, (begin, end) in spans.items()
    }


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len(dict(pairs)) == len(pairs), "a key is there twice")
    return dict(pairs)


def entry_span(value: Any) -> tuple[int, int]:
    require(
        isinstance(value, dict) and set(value) == {"dtype", "shape", "data_offsets"}, "not an entry"
    )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    require(isinstance(dtype, str) and dtype in KINDS, "an unknown dtype")
    for numbers in (shape, offsets):
        require(isinstance(numbers, list), "not a list")
        require(all(type(n) is int and 0 <= n < 1 << 63 for n in numbers), "not counts")
    require(len(shape) <= 32 and len(offsets) == 2, "too many numbers")
    size = math.prod(shape) * KINDS[dtype].width // 8
    require(offsets[1] - offsets[0] == size, "offsets do not fit the shape")
    return offsets[0], offsets[1]


# raw


def read_raw(entries: Mapping[str, Entry], schema: Mapping[str, Tensor]) -> dict[str, list[Change]]:
    found = {}
    for key in entries:
        name, _, part = key.rpartition(".")
        require(part in ("indices", "values") and name in schema, "an entry of no tensor")
        require({f"{name}.indices", f"{name}.values"} <= set(entries), "an entry without partner")
        found[name] = read_raw_tensor(
            schema[name], entries[f"{name}.indices"], entries[f"{name}.values"]
        )
    return found


def read_raw_tensor(tensor: Tensor, indices: Entry, values: Entry) -> list[Change]:
    dtype = "I64" if tensor.numel > 1 << 31 else "I32"
    require(indices[0] == dtype and values[0] == tensor.dtype, "another dtype")
    require(len(indices[1]) == 1 and indices[1] == values[1] and indices[1][0] > 0, "other shapes")
    count = indices[1][0]
    positions = struct.unpack(f"<{count}{'q' if dtype == 'I64' else 'i'}", indices[2])
    last = -1
    for position in positions:
        require(last < position < tensor.numel, "positions out of order or range")
        last = position
    return [(p, element(values[2], i, tensor.kind.width)) for i, p in enumerate(positions)]


# packed and compact


@dataclass
class Fields:
    """Takes fields off the front of bytes, and remembers where each one was.

    Attributes:
        seen: (start, stop, what) of every field taken.
    """

    data: bytes
    at: int = 0
    seen: list[tuple[int, int, str]] = field(default_factory=list)

    def take(self, size: int, what: str) -> bytes:
        require(self.at + size <= len(self.data), f"{what}: bytes are missing")
        self.at += size
        self.seen.append((self.at - size, self.at, what))
        return self.data[self.at - size : self.at]

    def byte(self, limit: int, what: str) -> int:
        value = self.take(1, what)[0]
        require(value <= limit, f"{what}: over its limit")
        return value

    def varint(self, limit: int, what: str) -> int:
        start, value, shift = self.at, 0, 0
        while True:
            require(self.at < len(self.data), f"{what}: bytes are missing")
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            require(value <= limit, f"{what}: over its limit")
            if byte < 128:
                break
            require(shift < 64, f"{what}: does not end")
        self.seen.append((start, self.at, what))
        require(byte != 0 or shift == 7, f"{what}: longer than it needs to be")
        return value


@dataclass
class Segment:
    """A directory entry: changes of each class, and bytes of the two streams."""

    counts: dict[int, int]
    words: int = 0
    raw: int = 0


@dataclass
class Group:
    kind: Kind
    thresholds: list[int]
    ordinals: list[int]
    tables: dict[int, tuple[list[int], list[int]]]
    segments: list[Segment]


def read_changes(
    fields: Fields, schema: list[Tensor], base: Mapping[str, bytes], *, classed: bool
) -> dict[str, list[Change]]:
    groups = [read_group(fields, schema, classed) for _ in range(fields.varint(16, "groups"))]
    dense = read_ordinals(fields, len(schema), "dense")
    named = [k for group in groups for k in group.ordinals] + dense
    require(len(set(named)) == len(named), "a tensor is named twice")
    found: dict[str, list[Change]] = {schema[k].name: [] for k in named}
    for group in groups:
        mine = [schema[k] for k in group.ordinals]
        for number, segment in enumerate(group.segments):
            words = fields.take(2 * segment.words, "words")
            raw = fields.take(segment.raw, "raw bits")
            if segment.words:
                changes = decode_streams(group, segment, words, raw)
                elements = segment_elements(mine, number, base)
                for name, change in place(group, changes, elements, classed):
                    found[name].append(change)
    for k in dense:
        found[schema[k].name] = read_dense(fields, schema[k], base[schema[k].name])
    require(fields.at == len(fields.data), "bytes are left over")
    require(all(found.values()), "a tensor is named that does not change")
    return found


def read_ordinals(fields: Fields, count: int, what: str) -> list[int]:
    ordinals: list[int] = []
    last = -1
    for _ in range(fields.varint(count, f"number of {what}")):
        last += 1 + fields.varint(count, f"{what} ordinal")
        require(last < count, "there is no such tensor")
        ordinals.append(last)
    return ordinals


def read_group(fields: Fields, schema: list[Tensor], classed: bool) -> Group:
    dtype = NUMBERS[fields.byte(15, "dtype")]
    kind = KINDS[dtype]
    thresholds = list(fields.take(fields.byte(15, "number of thresholds"), "thresholds"))
    require(thresholds == sorted(set(thresholds) - {0}), "thresholds do not ascend")
    require(not thresholds or (classed and kind.mask != 0), "there are no classes here")
    ordinals = read_ordinals(fields, len(schema), "tensor")
    require(len(ordinals) > 0, "a group without tensors")
    require(all(schema[k].dtype == dtype for k in ordinals), "a tensor of another dtype")
    (bitmap,) = struct.unpack("<H", fields.take(2, "present"))
    present = [k for k in range(16) if bitmap >> k & 1]
    require(len(present) > 0 and (classed or present == [0]), "impossible classes")
    tables = {k: (read_table(fields), read_table(fields)) for k in present}
    total = sum(schema[k].numel for k in ordinals)
    segments = [
        read_segment(fields, min(SEGMENT, total - start), present, kind)
        for start in range(0, total, SEGMENT)
    ]
    return Group(kind, thresholds, ordinals, tables, segments)


def read_table(fields: Fields) -> list[int]:
    size = fields.varint(256, "table size")
    frequencies = [fields.varint(SCALE, "frequency") for _ in range(size)]
    require(size > 0 and frequencies[-1] > 0, "a table without symbols, or with too many")
    require(sum(frequencies) == SCALE, "frequencies do not add up")
    return frequencies


def read_segment(fields: Fields, elements: int, present: list[int], kind: Kind) -> Segment:
    counts = {k: fields.varint(elements, "count") for k in present}
    total = sum(counts.values())
    require(total <= elements, "more changes than elements")
    if total == 0:
        return Segment(counts)
    words = 8 + fields.varint(2 * total, "number of words")
    return Segment(counts, words, fields.varint(total * (4 + kind.width // 8), "raw size"))


@dataclass
class RawBits:
    """Bits from the lowest of each byte up."""

    data: bytes
    at: int = 0

    def take(self, count: int) -> int:
        require(self.at + count <= 8 * len(self.data), "raw bits end too soon")
        first, last = self.at // 8, (self.at + count + 7) // 8
        whole = int.from_bytes(self.data[first:last], "little") >> self.at % 8
        self.at += count
        return whole & ((1 << count) - 1)

    def end(self) -> None:
        require((self.at + 7) // 8 == len(self.data), "raw bytes are left over")
        require(self.at % 8 == 0 or self.data[-1] >> self.at % 8 == 0, "raw bits are left over")


@dataclass
class Rans:
    """The four states, and the words still to come."""

    words: list[int]
    at: int = 8

    def __post_init__(self) -> None:
        self.states = [self.words[2 * i] | self.words[2 * i + 1] << 16 for i in range(4)]
        require(min(self.states) >= LOW, "a first state is too low")

    def run(self, frequencies: list[int], count: int) -> list[int]:
        slots = [(s, place) for s, f in enumerate(frequencies) for place in range(f)]
        symbols = []
        for i in range(count):
            x = self.states[i % 4]
            symbol, place = slots[x & (SCALE - 1)]
            x = frequencies[symbol] * (x >> 12) + place
            if x < LOW:
                require(self.at < len(self.words), "words end too soon")
                x = x << 16 | self.words[self.at]
                self.at += 1
            self.states[i % 4] = x
            symbols.append(symbol)
        return symbols

    def end(self) -> None:
        require(self.at == len(self.words), "words are left over")
        require(self.states == [LOW] * 4, "a last state is wrong")


def value_of(symbol: int, sub: int, longest: int, raw: RawBits) -> int:
    r = max(0, (symbol >> sub) - 1)
    require(r == 0 or r + sub + 1 <= longest, "a symbol stands for too long a value")
    return ((symbol - (r << sub)) << r) + raw.take(r)


Coded = tuple[int, int, int]
"""A gap, a size and a direction."""


def decode_streams(
    group: Group, segment: Segment, words: bytes, raw_bytes: bytes
) -> dict[int, list[Coded]]:
    """Per class its changes."""
    rans = Rans(list(struct.unpack(f"<{segment.words}H", words)))
    raw = RawBits(raw_bytes)
    width = group.kind.width
    found = {}
    for k, count in sorted(segment.counts.items()):
        if count == 0:
            continue
        gap_table, step_table = group.tables[k]
        gaps = [value_of(s, 1, 22, raw) for s in rans.run(gap_table, count)]
        steps = [
            (value_of(s >> 1, 1 if width == 64 else 2, width - 1, raw), s & 1)
            for s in rans.run(step_table, count)
        ]
        found[k] = [(gap, *step) for gap, step in zip(gaps, steps)]
    rans.end()
    raw.end()
    return found


def segment_elements(
    tensors: list[Tensor], number: int, base: Mapping[str, bytes]
) -> Iterable[tuple[str, int, Callable[[], int]]]:
    """Name, position and a way to the old bits of every element of a segment."""
    start, stop = number * SEGMENT, (number + 1) * SEGMENT
    passed = 0
    for tensor in tensors:
        width = tensor.kind.width
        data = base[tensor.name]
        for position in range(max(0, start - passed), min(tensor.numel, stop - passed)):
            yield tensor.name, position, lambda d=data, p=position, w=width: element(d, p, w)
        passed += tensor.numel


def place(
    group: Group,
    changes: dict[int, list[Coded]],
    elements: Iterable[tuple[str, int, Callable[[], int]]],
    classed: bool,
) -> Iterable[tuple[str, Change]]:
    thresholds = group.thresholds + [255] * (15 - len(group.thresholds))
    kind = group.kind
    class_of = [sum(key >= t for t in thresholds) for key in range(kind.mask + 1)]
    waiting = {k: iter(some) for k, some in changes.items()}
    following = {k: next(some) for k, some in waiting.items()}
    left = {k: change[0] for k, change in following.items()}
    for name, position, old_bits in elements:
        k = class_of[old_bits() >> kind.shift & kind.mask] if classed else 0
        if k not in left:
            continue
        if left[k]:
            left[k] -= 1
            continue
        _, size, direction = following[k]
        yield name, (position, stepped(old_bits(), size, direction, kind))
        change = next(waiting[k], None)
        if change is None:
            del left[k]
            if not left:
                return
        else:
            following[k], left[k] = change, change[0]
    require(not left, "a change lies beyond its segment")


def stepped(old: int, size: int, direction: int, kind: Kind) -> int:
    sign, signed = 1 << (kind.width - 1), kind.mask != 0
    negative = signed and old >= sign
    at = old ^ (sign - 1) if negative else old
    up = direction == 0 if negative else direction == 1
    at = (at + size + 1 if up else at - size - 1) % (1 << kind.width)
    return at ^ (sign - 1) if signed and at >= sign else at


def read_dense(fields: Fields, tensor: Tensor, old: bytes) -> list[Change]:
    new = fields.take(tensor.nbytes, "dense data")
    width = tensor.kind.width
    return [
        (i, element(new, i, width))
        for i in range(tensor.numel)
        if element(new, i, width) != element(old, i, width)
    ]
