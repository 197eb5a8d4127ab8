"""Writes the frozen vectors of the payload format: once.

``python spec/make_vectors.py FOLDER`` writes every vector that FOLDER does not have, and refuses to
touch one that it has: vectors of a format version are never changed or removed, only added to.

A vector is a payload ``<codec>-1-<writer>-<case>.safetensors`` and a description of the same name,
``.json``; ``spec/README.md`` says what is in it. The writer is ``thinwire-<version>`` (the library's own
encoder), ``assembled`` (field by field, a valid payload that the library would not write) or
``refused`` (one rule of the specification is broken).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from assemble import (
    LOW,
    SCALE,
    Group,
    body,
    container,
    even_table,
    ordinals,
    payload,
    streams,
    table,
    varint,
    with_header,
)

from thinwire import __version__, codec
from thinwire.dtypes import DTYPES
from thinwire.patch import Patch, position_dtype
from thinwire.schema import Schema, TensorSpec
from thinwire.testing.strategies import changed_bits, random_bits

BF16, F32, U8, I64, F8 = (list(DTYPES).index(n) for n in ("BF16", "F32", "U8", "I64", "F8_E4M3"))
SEGMENT = 1 << 22
Tensors = Sequence[tuple[str, str, Sequence[int]]]


@dataclass
class State:
    """Tensors in schema order, their base as bytes to repeat, and new bits by tensor and position."""

    tensors: Tensors
    base: Mapping[str, bytes]
    changes: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(self, name: str, dtype: str, old: Any, new: Any, shape: Sequence[int] = ()) -> None:
        """A tensor as it was and as it is."""
        self.tensors = [*self.tensors, (name, dtype, shape or [old.size])]
        self.base = {**self.base, name: old.tobytes()}
        where = np.flatnonzero(old != new).tolist()
        if where:
            self.changes[name] = {p: int(new[p]) for p in where}


def hash_of(changes: Mapping[int, int]) -> str:
    """SHA-256 of u64 position, u64 bits, for each change by position."""
    pairs = b"".join(struct.pack("<QQ", *pair) for pair in sorted(changes.items()))
    return hashlib.sha256(pairs).hexdigest()


def description(state: State, file: bytes, about: str) -> dict[str, Any]:
    return {
        "about": about,
        "tensors": [[name, dtype, list(shape)] for name, dtype, shape in state.tensors],
        "base": {name: data.hex() for name, data in state.base.items()},
        "sha256": hashlib.sha256(file).hexdigest(),
    }


def accepted(state: State, file: bytes, about: str) -> tuple[bytes, dict[str, Any]]:
    changes = {
        name: {"count": len(some), "sha256": hash_of(some)}
        for name, some in sorted(state.changes.items())
    }
    return file, {**description(state, file, about), "changes": changes}


def refused(
    state: State, file: bytes, about: str, kind: str = "corrupt"
) -> tuple[bytes, dict[str, Any]]:
    return file, {**description(state, file, about), "refused": kind}


def encoded(state: State, name: str) -> bytes:
    """The state's changes as the library writes them."""
    schema = Schema(tuple(TensorSpec(n, DTYPES[d], tuple(s)) for n, d, s in state.tensors))
    base, patches = [], []
    for k, spec in enumerate(schema):
        pattern = state.base[spec.name]
        whole = (pattern * (-(-spec.nbytes // len(pattern))))[: spec.nbytes] if pattern else b""
        base.append(np.frombuffer(bytearray(whole), spec.dtype.bits))
        some = sorted(state.changes.get(spec.name, {}).items())
        if some:
            positions = np.array([p for p, _ in some], position_dtype(spec.numel))
            bits = np.array([b for _, b in some], spec.dtype.bits)
            patches.append(Patch(k, spec, positions, bits).check())
    return b"".join(codec.encode(patches, codec=name, base=base, metadata={"version": "7"}))


# What the library writes


def weights(count: int, seed: int) -> Any:
    """bf16 elements with exponents as weights have them."""
    rng = random.Random(seed)
    bits = [
        rng.getrandbits(1) << 15
        | (121 - _octave(rng)) << 7
        | rng.getrandbits(7)
        for _ in range(count)
    ]
    return np.array(bits, "<u2")


def _octave(rng: random.Random) -> int:
    octave = 0
    while octave < 20 and rng.getrandbits(1):
        octave += 1
    return octave


def nudged(old: Any, seed: int) -> Any:
    """Neighbouring bits, the more often the smaller the weight."""
    rng = random.Random(seed)
    new = old.copy()
    for i, bits in enumerate(old.tolist()):
        octave = 121 - (bits >> 7 & 255)
        if rng.random() < min(0.9, 0.004 * 4**octave):
            step = rng.choice([1, 1, 1, 2, 9])
            new[i] = bits + step if rng.random() < 0.5 else bits - step
    return new


def dtypes() -> State:
    state = State([], {})
    for k, kind in enumerate(DTYPES.values()):
        old = random_bits(kind, 150 + k, seed=k)
        state.add(f"t{k:02}", kind.name, old, changed_bits(old, 0.1, seed=100 + k))
    return state


def several_classes() -> State:
    state = State([], {})
    old = weights(8000, 1)
    state.add("w", "BF16", old, nudged(old, 2), [100, 80])
    return state


def one_class() -> State:
    state = State([], {})
    old = np.arange(128, dtype="<u2") + np.uint16(0x3F80)
    state.add("w", "BF16", old, changed_bits(old, 0.1, seed=1))
    return state


def infinities() -> State:
    state = State([], {})
    old = weights(500, 3)
    old[::7] = 0x7F80
    old[1::50] = 0xFF81
    new = old.copy()
    new[::21] = 0x7F7F
    new[2::30] ^= 0x8000
    state.add("w", "BF16", old, new)
    old = random_bits(DTYPES["F64"], 300, seed=4)
    state.add("x", "F64", old, changed_bits(old, 0.2, seed=5))
    return state


def dense() -> State:
    state = State([], {})
    for k, (kind, density) in enumerate([("BF16", 1.0), ("BF16", 0.02), ("U8", 1.0), ("F32", 0.9)]):
        old = random_bits(DTYPES[kind], 200, seed=k)
        state.add(f"t{k}", kind, old, changed_bits(old, density, seed=10 + k))
    return state


def wide_steps() -> State:
    state = State([], {})
    edges = [0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**62, 0x7FF0 << 48]
    old = np.array([a for a in edges for _ in edges] + [5] * 500, "<u8")
    new = np.array([b for _ in edges for b in edges] + [5] * 500, "<u8")
    for kind in ("F64", "I64", "U64"):
        state.add(kind.lower(), kind, old, new)
    return state


def sizes() -> State:
    state = State([], {})
    shapes = {"scalar": [], "one": [1], "empty": [0, 3], "63": [63], "64": [8, 8], "65": [65]}
    for k, (name, shape) in enumerate(shapes.items()):
        old = np.full(int(np.prod(shape)), 0x3F80 + k, "<u2")
        new = old.copy()
        new[-1:] += 1
        state.add(f"t{name}", "BF16", old, new)
        state.tensors = [*state.tensors[:-1], (f"t{name}", "BF16", shape)]
    state.add("wide", "BF16", old := weights(777, 5), old)
    return state


def several_segments() -> State:
    pattern = weights(1009, 6)
    shapes = {"a": SEGMENT - 100, "b": 300, "c": SEGMENT - 250, "d": 51, "e": 40}
    state = State(
        [(name, "BF16", [size]) for name, size in shapes.items()],
        dict.fromkeys(shapes, pattern.tobytes()),
    )
    # the first segment, with its first and last elements; nothing in the second; the third's first
    # and last; c and d meet at the border
    where = {
        "a": [0, 5, 63, 64, 1000, *range(5000, 9000, 37), SEGMENT - 101],
        "b": [0, 98, 99],
        "d": [50],
        "e": [0, 7, 39],
    }
    for name, positions in where.items():
        state.changes[name] = {p: int(pattern[p % 1009]) + 1 + p % 3 for p in positions}
    return state


def nothing() -> State:
    state = State([], {})
    state.add("w", "BF16", old := weights(10, 7), old)
    return state


WRITTEN: dict[str, tuple[Callable[[], State], str]] = {
    "dtypes": (dtypes, "a tensor of every dtype, all patterns of bits"),
    "several-classes": (several_classes, "weights whose changes depend on their exponents"),
    "one-class": (one_class, "elements of one exponent"),
    "infinities": (infinities, "key 255: class 15 whatever the thresholds"),
    "dense": (dense, "tensors that are stored whole among others that are coded"),
    "wide-steps": (wide_steps, "64-bit steps with up to 61 raw bits"),
    "sizes": (sizes, "0-d, empty, and tensors around a multiple of 64 elements"),
    "several-segments": (several_segments, "three segments, the second without a change"),
    "nothing": (nothing, "no tensor changes"),
}


# What a writer may do that the library does not


def simple(codec_name: str = "compact") -> tuple[State, Group]:
    """100 bf16 elements of exponent 127, every tenth one a step up, and an I64 tensor beside it."""
    old = np.arange(100, dtype="<u2") + np.uint16(0x3F80)
    new = old.copy()
    new[9::10] += 1
    state = State([], {})
    state.add("a", "BF16", old, new)
    state.add("b", "I64", old.astype("<u8"), old.astype("<u8"))
    return state, Group(BF16, 16, [0], {0: [(9, 0, 1)] * 10})


def assembled() -> dict[str, tuple[bytes, dict[str, Any]]]:
    found = {}

    def keep(name: str, state: State, file: bytes, about: str, kind: str = "compact") -> None:
        found[f"{kind}-1-assembled-{name}"] = accepted(state, file, about)

    state, group = simple()
    keep("plain", state, payload(body([group]), "compact"), "a segment with one-symbol tables")
    keep("plain", state, payload(body([group]), "packed"), "the same, packed", "packed")
    group = Group(BF16, 16, [0], {0: [(9, 0, 1)] * 10}, [128, 130, 255])
    keep("threshold-255", state, payload(body([group]), "compact"), "a threshold of 255, written")
    group = Group(BF16, 16, [0], {1: [(9, 0, 1)] * 10}, [127])
    group.tables[9] = (even_table([1]), even_table([0, 200]))
    keep("idle-class", state, payload(body([group]), "compact"), "a class without changes")

    state, group = simple()
    wide = Group(I64, 64, [1], {0: [(3, 2**63 - 1, 1), (0, 2**62 + 5, 0)]})
    state.changes["b"] = {3: 0x3F83 + 2**63, 4: (0x3F84 - 2**62 - 6) % 2**64}
    keep(
        "half-circle", state, payload(body([wide, group]), "compact"),
        "groups from the last dtype to the first; a step of 2^63 upward",
    )  # fmt: skip

    old = np.full(64, 0x38, "u1")
    state = State([], {})
    state.add("a", "F8_E4M3", old, old + np.uint8(1))
    state.add("b", "F8_E4M3", old, old + np.uint8(2))
    state.add("c", "F8_E4M3", old, np.where(np.arange(64) % 2, old, 0))
    groups = [Group(F8, 8, [k], {1: [(0, k, 1)] * 64}, [5]) for k in (1, 0)]
    data = bytes(np.where(np.arange(64) % 2, old, 0).astype("u1"))
    keep(
        "same-dtype-twice", state, payload(body(groups, [(2, data)]), "compact"),
        "two groups of one dtype, each element changed; a dense tensor that changes in part",
    )  # fmt: skip

    state, group = simple()
    header = payload(body([group]), "compact", unknown="key")
    length = struct.unpack("<Q", header[:8])[0]
    for shift in range(1, 4):
        file = with_header(header[8 : 8 + length] + b" " * shift, header[8 + length :])
        keep(f"alignment-{shift}", state, file, "data at another alignment; an unknown metadata key")
    old = np.array([(100 + i * 7 % 32) << 7 | i << 15 & 0x8000 for i in range(400)], "<u2")
    thresholds = list(range(101, 131, 2))
    chosen = [i for i in range(400) if i % 5 == 2 or i > 396]
    changes: dict[int, list[tuple[int, int, int]]] = {k: [] for k in range(16)}
    passed = [0] * 16
    new = old.copy()
    for i, bits in enumerate(old.tolist()):
        k = sum((bits >> 7 & 255) >= t for t in thresholds)
        if i in chosen:
            changes[k].append((passed[k], i % 50, i >> 2 & 1))
            new[i] = bits + (i % 50 + 1) * (1 if i >> 2 & 1 else -1)  # outward: a larger magnitude
            passed[k] = -1
        passed[k] += 1
    many = State([], {})
    many.add("w", "BF16", old, new)
    group = Group(BF16, 16, [0], changes, thresholds)
    keep("sixteen-classes", many, payload(body([group]), "compact"), "changes in all classes")
    positions, values = struct.pack("<2i", 0, 99), struct.pack("<2Q", 2**64 - 1, 1)
    state.changes = {"b": {0: 2**64 - 1, 99: 1}}
    entries = [("b.values", "I64", [2], values), ("b.indices", "I32", [2], positions)]
    file = container(entries, meta("raw"))
    keep("order", state, file, "values before indices", "raw")
    length = struct.unpack("<Q", file[:8])[0]
    file = with_header(file[8 : 8 + length] + b" " * (1 - length % 2 + 2), file[8 + length :])
    keep("alignment", state, file, "data at an odd place", "raw")
    return found


def meta(name: str, **other: str) -> dict[str, str]:
    return {"format": "thinwire-delta", "major": "1", "codec": name, **other}


# What a reader must refuse


def refusals() -> dict[str, tuple[bytes, dict[str, Any]]]:
    found: dict[str, tuple[bytes, dict[str, Any]]] = {}
    state, group = simple()
    good = body([group])
    parts = group.streams
    tail = ordinals() + parts.data
    counted = group.counts() + parts.sizes

    def bad(name: str, data: bytes, about: str, codec_name: str = "compact") -> None:
        found[f"{codec_name}-1-refused-{name}"] = refused(state, payload(data, codec_name), about)

    def front(**fields: bytes) -> bytes:
        return varint(1) + group.front(**fields) + counted + tail

    def directory(entry: bytes, streams_: bytes | None = None) -> bytes:
        data = parts.data if streams_ is None else streams_
        return varint(1) + group.front() + entry + ordinals() + data

    def coded(runs: Any, **options: Any) -> bytes:
        made = streams(runs, **options)
        return directory(group.counts() + made.sizes, made.data)

    # the container and its metadata
    def whole(
        name: str, file: bytes, about: str, kind: str = "corrupt", codec_name: str = "compact"
    ) -> None:
        found[f"{codec_name}-1-refused-{name}"] = refused(state, file, about, kind)

    entry = ("changes", "U8", [len(good)], good)
    whole("format", container([entry], meta("compact", format="other")), "another format")
    whole(
        "newer-major", container([entry], meta("compact", major="2")), "a newer major version",
        "unsupported",
    )  # fmt: skip
    whole("codec", container([entry], meta("dense")), "an unknown codec", "unsupported")
    whole("two-dimensions", container([("changes", "U8", [1, len(good)], good)], meta("compact")),
          "changes with two dimensions")  # fmt: skip
    whole("not-bytes", container([("changes", "I8", [len(good)], good)], meta("compact")),
          "changes of another dtype")  # fmt: skip
    whole("no-changes", container([("change", "U8", [len(good)], good)], meta("compact")),
          "no entry named changes")  # fmt: skip
    whole("second-entry", container([entry, ("x", "U8", [1], b"x")], meta("compact")),
          "an entry beside changes")  # fmt: skip
    file = payload(good, "compact")
    length = struct.unpack("<Q", file[:8])[0]
    header, data = file[8 : 8 + length], file[8 + length :]
    whole("cut-file", file[:-1], "a file that is shorter than its header says")
    whole("long-file", file + b"\0", "a byte after the data")
    whole("header-length", struct.pack("<Q", 2**63) + file[8:], "a header of 2^63 bytes")
    whole("tiny", b"\0" * 7, "seven bytes")
    whole("not-json", with_header(header[:-1], data), "a header that is no JSON")
    twice = header[:-1] + b"," + header[header.index(b'"changes"') :]
    whole("key-twice", with_header(twice, data), "a key that is there twice")
    whole("list", with_header(b"[]", b""), "a header that is a list")
    whole("depth", with_header(b"[" * 20_000, b""), "a header nested without end")
    entry_of = json.loads(header)
    entry_of["changes"]["shape"] = [float(len(good))]
    whole("float", with_header(json.dumps(entry_of).encode(), data), "a shape that is no integer")
    entry_of["changes"] = {"dtype": "U8", "shape": [len(good) - 1], "data_offsets": [1, len(good)]}
    whole("gap", with_header(json.dumps(entry_of).encode(), data), "data that starts with a gap")

    # the head of a group
    bad("nothing", b"", "no bytes at all")
    bad("groups-17", varint(17) + good[1:], "17 groups")
    bad("long-varint", b"\x81\x00" + good[1:], "a number in more bytes than it needs")
    bad("endless-varint", b"\xff" * 30, "a number that does not end")
    bad("dtype", front(dtype=b"\x10"), "dtype number 16")
    bad("thresholds-16", front(thresholds=bytes([16, *range(100, 116)])), "16 thresholds")
    bad("threshold-0", front(thresholds=bytes([1, 0])), "a threshold of 0")
    bad("thresholds-equal", front(thresholds=bytes([2, 128, 128])), "equal thresholds")
    bad("thresholds-fall", front(thresholds=bytes([2, 129, 128])), "descending thresholds")
    bad("thresholds", front(thresholds=bytes([1, 128])), "thresholds in packed", "packed")
    integers = Group(I64, 64, [1], {0: [(0, 0, 1)]})
    made = integers.streams
    bad(
        "thresholds-of-integers",
        varint(1) + integers.front(thresholds=b"\x01\x05") + integers.counts() + made.sizes
        + ordinals() + made.data,
        "thresholds for a dtype without an exponent",
    )  # fmt: skip
    bad("no-tensors", front(tensors=varint(0)) , "a group without tensors")
    bad("ordinal", front(tensors=varint(1) + varint(2)), "a tensor that the schema does not have")
    bad("ordinals-3", front(tensors=varint(3) + bytes(3)), "more tensors than the schema has")
    bad("other-dtype", front(tensors=ordinals(1)), "a tensor of another dtype")
    bad("no-class", front(present=b"\0\0", tables=b""), "no class")
    group.tables[1] = group.tables[0]
    idle = varint(1) + group.front() + counted[:1] + varint(0) + counted[1:] + tail
    del group.tables[1]
    bad("class-1", idle, "a second class in packed", "packed")
    gaps = table(group.tables[0][0])
    for name, wrong, about in (
        ("table-empty", varint(0), "a table without symbols"),
        ("table-257", varint(257) + varint(SCALE) + varint(0) * 255 + varint(0), "257 symbols"),
        ("table-end", varint(3) + varint(0) + varint(SCALE) + varint(0), "a table that ends with 0"),
        ("table-sum-less", table([0, SCALE - 1]), "frequencies that add up to 4095"),
        ("table-sum-more", table([1, SCALE]), "frequencies that add up to 4097"),
        ("table-frequency", table([0, SCALE + 1]), "a frequency of 4097"),
        ("table-wrap", table([SCALE] * 255 + [1]), "frequencies that add up to far too much"),
    ):
        bad(name, front(tables=gaps + wrong), about)
    bad("tensor-twice", varint(2) + group.head() * 2 + ordinals() + parts.data * 2,
        "a tensor in two groups")  # fmt: skip
    new = np.frombuffer(state.base["a"], "<u2") + np.uint16(1)
    bad("dense-twice", body([group], [(0, new.tobytes())]), "a coded tensor that is dense as well")
    bad("dense-same", body([], [(1, state.base["b"])]), "a dense tensor that does not change")
    bad("dense-ordinal", varint(0) + varint(1) + varint(2), "a dense tensor not in the schema")
    bad("dense-short", body([], [(0, new.tobytes()[:-1])]), "a dense tensor with a byte missing")
    bad("left-over", good + b"\0", "a byte after the last stream")

    # the directory
    bad("count-over", directory(varint(101) + parts.sizes), "more changes than elements")
    bad("count-huge", directory(varint(2**62) + parts.sizes), "2^62 changes")
    bad("count-none", directory(varint(0), b""), "a tensor without a change")
    bad("count-more", directory(varint(11) + parts.sizes), "a change that lies beyond the segment")
    bad("words-over", directory(group.counts() + varint(21) + varint(0)), "too many words")
    bad("raw-over", directory(group.counts() + varint(0) + varint(61)), "too many raw bytes")
    group.tables[1] = (even_table([0]), even_table([1]))
    sum_over = varint(1) + group.front() + varint(60) + varint(41) + parts.sizes + tail
    del group.tables[1]
    bad("counts-sum", sum_over, "classes with more changes together than elements")
    bad("cut-streams", good[:-1], "streams with a byte missing")
    bad("stop-in-head", varint(1) + group.head()[:-1], "a head that ends too soon")

    # the streams
    mixed = [(gap, i % 13, i & 1) for i, gap in enumerate([0, 1, 2, 5] * 8)]
    group = Group(BF16, 16, [0], {0: mixed})
    runs = group.runs()
    made = streams(runs)
    state.changes = {}
    bad("words-left", directory(group.counts() + varint(len(made.words) - 7) + varint(len(made.raw)),
        made.data[: 2 * len(made.words)] + b"\1\0" + made.raw), "a word too many")  # fmt: skip
    bad("words-short", directory(group.counts() + varint(len(made.words) - 9) + varint(len(made.raw)),
        made.data[: 2 * len(made.words) - 2] + made.raw), "a word too few")  # fmt: skip
    for lane in range(4):
        last = [LOW + (i == lane) for i in range(4)]
        bad(f"last-state-{lane}", coded(runs, last=last), f"state {lane} ends at 65537")
    bad("first-state", directory(group.counts() + made.sizes, made.data[:2] + b"\0\0" + made.data[4:]),
        "a first state below 65536")  # fmt: skip
    bad("raw-left", directory(group.counts() + varint(len(made.words) - 8) + varint(len(made.raw) + 1),
        made.data + b"\0"), "a raw byte too many")  # fmt: skip
    bad("raw-short", directory(group.counts() + varint(len(made.words) - 8) + varint(len(made.raw) - 1),
        made.data[:-1]), "a raw byte too few")  # fmt: skip
    bad("raw-junk", coded(runs, junk=1), "a bit set after the last raw bit")
    for name, long_gap in (("gap-symbol-44", 44), ("gap-symbol-255", 255)):
        group = Group(BF16, 16, [0], {0: [(0, 0, 1)]})
        raw = (long_gap >> 1) - 1
        group.tables[0] = (even_table([long_gap]), even_table([1]))
        runs = [
            ([long_gap], group.tables[0][0], [(0, raw)]), ([1], group.tables[0][1], [(0, 0)]),
        ]  # fmt: skip
        made = streams(runs)
        made.raw = made.raw[:6] if raw > 48 else made.raw
        bad(name, directory(group.counts() + made.sizes, made.data), "a gap symbol that is too long")
    for dtype, width, first in ((BF16, 16, 56), (BF16, 16, 127), (I64, 64, 126)):
        sub = 1 if width == 64 else 2
        group = Group(dtype, width, [int(width == 64)], {0: [(0, 0, 1)]})
        group.tables[0] = (even_table([0]), even_table([2 * first]))
        sizes_run = ([2 * first], group.tables[0][1], [(0, (first >> sub) - 1)])
        runs = [([0], group.tables[0][0], [(0, 0)]), sizes_run]
        bad(
            f"size-symbol-{first}-of-{width}", coded(runs),
            f"a size of more than {width - 1} bits in {width}-bit elements",
        )  # fmt: skip
    for name, kind in (("beyond", "compact"), ("beyond", "packed")):
        group = Group(BF16, 16, [0], {0: [(9, 0, 1)] * 10 + [(0, 0, 1)]})
        bad(name, body([group]), "a change one element behind the last", kind)
    group = Group(BF16, 16, [0], {0: [(SEGMENT - 1, 0, 1)]})
    bad("far-beyond", body([group]), "a gap of 2^22 - 1 in 100 elements")
    group = Group(BF16, 16, [0], {3: [(0, 0, 1)]}, [128])
    bad("empty-class", body([group]), "a change in a class that has no elements")
    everything = Group(BF16, 16, [0], {0: [(0, 0, 1)] * 100})
    state.changes = {}
    last = varint(1) + everything.front() + everything.counts() + everything.streams.sizes
    bad("unchanged-neighbour",
        last[:1] + everything.front(tensors=ordinals(0)) + everything.counts()
        + everything.streams.sizes + ordinals(1) + everything.streams.data + state.base["b"],
        "a dense tensor without a change beside a coded one")  # fmt: skip

    # raw
    def raw_file(name: str, entries: Any, about: str) -> None:
        whole(name, container(entries, meta("raw")), about, codec_name="raw")

    def pair(positions: Sequence[int], **other: Any) -> list[Any]:
        size = len(positions)
        indices = ("a.indices", "I32", [size], struct.pack(f"<{size}i", *positions))
        values = ("a.values", "BF16", [size], bytes(2 * size))
        return [other.get("indices", indices), other.get("values", values)]

    raw_file("unordered", pair([3, 3]), "a position twice")
    raw_file("descending", pair([3, 2]), "positions that descend")
    raw_file("negative", pair([-1, 2]), "a negative position")
    raw_file("outside", pair([3, 100]), "a position behind the tensor")
    raw_file("empty", pair([]), "a tensor without a change")
    raw_file("lone-indices", pair([1])[:1], "indices without values")
    raw_file("lone-values", pair([1])[1:], "values without indices")
    raw_file("wide-indices", pair([1], indices=("a.indices", "I64", [1], bytes(8))),
             "64-bit positions in a small tensor")  # fmt: skip
    raw_file("other-dtype", pair([1], values=("a.values", "F16", [1], bytes(2))), "another dtype")
    raw_file("lengths", pair([1], values=("a.values", "BF16", [2], bytes(4))), "other lengths")
    raw_file("column", pair([1], indices=("a.indices", "I32", [1, 1], bytes(4)),
                            values=("a.values", "BF16", [1, 1], bytes(2))), "two dimensions")  # fmt: skip
    raw_file("unknown", [("c.indices", "I32", [1], bytes(4)), ("c.values", "U8", [1], b"1")],
             "a tensor that the schema does not have")  # fmt: skip
    raw_file("suffix", [*pair([1]), ("a.other", "U8", [1], b"1")], "an entry of another kind")
    return found


def vectors() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Every vector, by name."""
    found = {}
    for case, (make, about) in WRITTEN.items():
        for name in ("raw", "packed", "compact"):
            state = make()
            file = accepted(state, encoded(state, name), about)
            found[f"{name}-1-thinwire-{__version__}-{case}"] = file
    return {**found, **assembled(), **refusals()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, (file, described) in vectors().items():
        paths = folder / f"{name}.safetensors", folder / f"{name}.json"
        if any(path.exists() for path in paths):
            print(f"kept     {name}")
            continue
        with paths[0].open("xb") as out:
            out.write(file)
        with paths[1].open("x") as out:
            json.dump(described, out, indent=1)
            out.write("\n")
        print(f"written  {name}")
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in listed(folder)]
    (folder / "SHA256SUMS").write_text("".join(sums))


def listed(folder: Path) -> list[Path]:
    """The vectors, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))


if __name__ == "__main__":
    main()
