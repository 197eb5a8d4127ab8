"""Spoiled payloads that are still put together well enough to get past the first checks.

A payload is taken apart into its fields by the reference decoder, some fields are changed, and the
file is put together again with lengths that fit. The library and the reference decoder must then
agree: the same changes, or a refusal of the same kind.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import reference_decoder as reference
from thinwire import codec
from thinwire.dtypes import DTYPES
from thinwire.errors import CorruptPayload, UnsupportedFormat
from thinwire.patch import Bits
from thinwire.schema import Schema, TensorSpec

FOLDER = Path(__file__).parents[2] / "spec" / "vectors" / "v1"
NUMBERS = (0, 1, 2, 7, 15, 16, 127, 128, 255, 256, 4095, 4096, 4097, 65535, 65536)
NUMBERS += (1 << 22, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64)

Field = tuple[str, bytes]
Outcome = str | dict[str, list[tuple[int, int]]]


@dataclass
class Seed:
    """A payload that its base makes sense of.

    Attributes:
        file: the payload.
        schema: what it applies to; ``base`` its bytes by name.
    """

    file: bytes
    schema: Schema
    base: dict[str, bytes]

    @property
    def numel(self) -> int:
        """Elements of the schema."""
        return self.schema.numel

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The schema as the reference decoder takes it."""
        return [(t.name, t.dtype.name, t.shape) for t in self.schema]

    def bits(self) -> list[Bits]:
        """The base as the library takes it."""
        return [np.frombuffer(self.base[t.name], t.dtype.bits) for t in self.schema]


def seeds(folder: Path = FOLDER, largest: int = 100_000) -> list[Seed]:
    """The frozen vectors whose schema has at most ``largest`` elements."""
    found = []
    for path in sorted(folder.glob("*.json")):
        about = json.loads(path.read_text())
        specs = [TensorSpec(n, DTYPES[d], tuple(s)) for n, d, s in about["tensors"]]
        schema = Schema(tuple(specs))
        if schema.numel <= largest:
            base = {name: bytes.fromhex(data) for name, data in about["base"].items()}
            found.append(Seed(path.with_suffix(".safetensors").read_bytes(), schema, base))
    return found


def rebased(rng: random.Random, seed: Seed) -> Seed:
    """The seed with another base."""
    base = {name: rng.randbytes(len(data)) for name, data in seed.base.items()}
    return Seed(seed.file, seed.schema, base)


# Agreement


def library(file: bytes, seed: Seed, **options: Any) -> Outcome:
    """What the library makes of a file: changes, or the kind of its refusal."""
    try:
        patches = codec.decode(file, seed.schema, seed.bits(), **options)
    except CorruptPayload:
        return "corrupt"
    except UnsupportedFormat:
        return "unsupported"
    for patch in patches:
        patch.check()
    return {p.name: list(zip(p.positions.tolist(), p.bits.tolist())) for p in patches}


def second(file: bytes, seed: Seed) -> Outcome:
    """The same from the reference decoder."""
    try:
        changes: Outcome = reference.decode(file, seed.tensors, seed.base)
    except reference.Refused as refusal:
        kind: str = refusal.kind
        return kind
    return changes


def agree(file: bytes, seed: Seed) -> Outcome:
    """What both make of a file.

    Raises:
        AssertionError: they differ.
    """
    ours, theirs = library(file, seed), second(file, seed)
    if ours != theirs:
        raise AssertionError(f"library: {str(ours)[:200]}, reference: {str(theirs)[:200]}")
    return ours


# Mutations


def container(entries: Sequence[tuple[str, str, Any, bytes]], metadata: dict[str, str]) -> bytes:
    """A file with a header that fits its data."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(entry[3] for entry in entries)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(data: bytes) -> int:
    return sum((byte & 127) << 7 * i for i, byte in enumerate(data))


def fields_of(seed: Seed, body: bytes, classed: bool) -> list[Field]:
    """The fields of ``changes``, as far as it can be read, and the rest."""
    reader = reference.Fields(body)
    tensors = [reference.Tensor(*t) for t in seed.tensors]
    with contextlib.suppress(reference.Refused):
        reference.read_changes(reader, tensors, seed.base, classed=classed)
    fields = [(what, body[start:stop]) for start, stop, what in reader.seen]
    end = reader.seen[-1][1] if reader.seen else 0
    return [*fields, ("rest", body[end:])]


def is_number(field: Field) -> bool:
    return field[0] not in ("thresholds", "present", "words", "raw bits", "dense data", "rest")


def renumber(rng: random.Random, fields: list[Field]) -> None:
    """Another number in place of one."""
    i = pick(rng, fields, is_number)
    what, data = fields[i]
    value = number(data)
    value = rng.choice([*NUMBERS, value + 1, abs(value - 1), value * 2, rng.randrange(300)])
    new = bytes([value & 255]) if what in ("dtype", "number of thresholds") else varint(value)
    fields[i] = what, new


def move(rng: random.Random, fields: list[Field]) -> None:
    """Take from one frequency or count what another one gets: their sum stays."""
    kind = rng.choice(["frequency", "count"])
    places = [i for i, field in enumerate(fields) if field[0] == kind]
    if len(places) < 2:
        return
    k = rng.randrange(len(places) - 1)
    a, b = places[k], places[min(k + rng.randint(1, 5), len(places) - 1)]
    x, y = number(fields[a][1]), number(fields[b][1])
    amount = rng.choice([1, x, rng.randint(0, x)])
    if amount <= x:
        fields[a], fields[b] = (kind, varint(x - amount)), (kind, varint(y + amount))


def flip(rng: random.Random, fields: list[Field]) -> None:
    """Change bits or bytes of one field, streams more often than not."""
    streams = rng.random() < 0.7
    i = pick(rng, fields, lambda f: bool(f[1]) and (f[0] in ("words", "raw bits")) == streams)
    data = bytearray(fields[i][1])
    for _ in range(rng.choice([1, 1, 1, 4])):
        if data:
            at = rng.randrange(min(len(data), 16)) if rng.random() < 0.5 else -1
            data[at] = rng.choice([0, 255, data[at] ^ 1 << rng.randrange(8)])
    fields[i] = fields[i][0], bytes(data)


def resize(rng: random.Random, fields: list[Field]) -> None:
    """Cut or lengthen a stream together with its length, or a run of fields."""
    i = pick(rng, fields, lambda f: f[0] in ("words", "raw bits", "dense data", "thresholds"))
    what, data = fields[i]
    step = 2 if what == "words" else 1
    longer = rng.random() < 0.5
    fields[i] = what, data + bytes(step) if longer else data[:-step]
    named = {"words": "number of words", "raw bits": "raw size"}.get(what)
    sizes = [k for k in range(len(fields)) if fields[k][0] == named]
    streams = [k for k in range(len(fields)) if fields[k][0] == what]
    if named and i in streams and streams.index(i) < len(sizes) and data:
        at = sizes[streams.index(i)]
        value = number(fields[at][1]) + (1 if longer else -1)
        fields[at] = named, varint(max(0, value))


def shuffle(rng: random.Random, fields: list[Field]) -> None:
    """Swap, repeat or drop fields."""
    i, j = rng.randrange(len(fields)), rng.randrange(len(fields))
    choice = rng.randrange(4)
    if choice == 0:
        fields[i], fields[j] = fields[j], fields[i]
    elif choice == 1:
        fields.insert(i, fields[j])
    elif choice == 2:
        del fields[i]
    else:
        del fields[i + 1 :]
    if not fields:
        fields.append(("rest", b""))


def pick(rng: random.Random, fields: list[Field], suits: Callable[[Field], bool]) -> int:
    places = [i for i, field in enumerate(fields) if suits(field)]
    return rng.choice(places or range(len(fields)))


MUTATIONS = (renumber, renumber, move, move, flip, flip, resize, shuffle)


def mutate(rng: random.Random, seed: Seed, file: bytes | None = None) -> bytes:
    """A spoiled payload from ``file``, or from that of the seed."""
    file = seed.file if file is None else file
    try:
        metadata, entries = reference.read_container(file)
    except reference.Refused:
        return scribble(rng, file)
    if rng.random() < 0.05:
        return scribble(rng, file)
    if rng.random() < 0.05:
        metadata["codec"] = rng.choice(["raw", "packed", "compact", "other"])
    coded = metadata.get("codec") != "raw" and set(entries) == {"changes"}
    if not coded:
        return container(spoiled_entries(rng, entries), metadata)
    fields = fields_of(seed, entries["changes"][2], metadata.get("codec") == "compact")
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(MUTATIONS)(rng, fields)
    body = b"".join(data for _, data in fields)
    return container([("changes", "U8", [len(body)], body)], metadata)


def spoiled_entries(rng: random.Random, entries: Any) -> list[tuple[str, str, Any, bytes]]:
    spoiled = []
    for name, (dtype, shape, data) in entries.items():
        changed = bytearray(data)
        if changed and rng.random() < 0.5:
            changed[rng.randrange(len(changed))] = rng.choice([0, 1, 127, 128, 255])
        if rng.random() < 0.1:
            dtype = rng.choice(list(DTYPES))
        if rng.random() < 0.1:
            name = rng.choice([*entries, name + ".values", "changes", "x.indices"])
        if rng.random() < 0.1:
            size = DTYPES[dtype].itemsize
            changed = changed[: len(changed) // 2 // size * size]
            shape = [len(changed) // size]
        spoiled.append((name, dtype, shape, bytes(changed)))
    return spoiled


def scribble(rng: random.Random, file: bytes) -> bytes:
    """Damage without any sense."""
    data = bytearray(file)
    for _ in range(rng.choice([1, 2, 8])):
        if data:
            data[rng.randrange(len(data))] = rng.choice(b'\x00\x01\xff{}[]",:0919-e.tn ')
    if rng.random() < 0.2:
        del data[rng.randrange(len(data) + 1) :]
    return bytes(data)
