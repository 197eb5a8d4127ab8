"""Payloads that each break one rule."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
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
from describe import BF16, I64, SEGMENT, Vector, meta, refused, simple


def refusals() -> dict[str, Vector]:
    """All of them, by name."""
    found: dict[str, Vector] = {}
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
        "newer-major",
        container([entry], meta("compact", major="2")),
        "a newer major version",
        "unsupported",
    )
    whole("codec", container([entry], meta("dense")), "an unknown codec", "unsupported")
    whole(
        "two-dimensions",
        container([("changes", "U8", [1, len(good)], good)], meta("compact")),
        "changes with two dimensions",
    )
    whole(
        "not-bytes",
        container([("changes", "I8", [len(good)], good)], meta("compact")),
        "changes of another dtype",
    )
    whole(
        "no-changes",
        container([("change", "U8", [len(good)], good)], meta("compact")),
        "no entry named changes",
    )
    whole(
        "second-entry",
        container([entry, ("x", "U8", [1], b"x")], meta("compact")),
        "an entry beside changes",
    )
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

    def header_with(name: str, about: str, metadata: Any = None, **fields: Any) -> None:
        """The plain payload under a header in which some fields are different."""
        size = len(good)
        plain = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        described = {
            "__metadata__": metadata or meta("compact"),
            "changes": {key: value for key, value in {**plain, **fields}.items() if value},
        }
        whole(name, with_header(json.dumps(described).encode(), good), about)

    size = len(good)
    header_with("metadata-list", "metadata that is no object", ["format", "major", "codec"])
    number = {**meta("compact"), "version": 7}
    header_with("metadata-number", "metadata with a number in it", number)
    header_with("entry-key", "an entry with a further key", strides=[1])
    header_with("entry-without-shape", "an entry without its shape", shape=None)
    header_with("unknown-dtype", "a dtype that does not exist", dtype="U9")
    header_with("dtype-list", "a dtype that is no string", dtype=["U8"])
    header_with("dimensions-33", "33 dimensions", shape=[size] + [1] * 32)
    header_with("three-offsets", "three offsets", data_offsets=[0, size, size])
    header_with("negative-offset", "a negative offset", data_offsets=[-size, 0])
    header_with("shape-product", "offsets that do not fit the shape", shape=[size + 1])
    header_with("shape-text", "a shape that is no list", shape=str(size))
    header_with("shape-true", "a shape of true", shape=[True])
    header_with("shape-huge", "a shape of 2^63", shape=[2**63, 0])
    empty = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    overlapping = {"__metadata__": meta("compact"), "changes": empty, "x": empty}
    file = with_header(json.dumps(overlapping).encode(), good)
    whole("overlap", file, "two entries of the same bytes")

    # the head of a group
    bad("nothing", b"", "no bytes at all")
    bad("groups-17", varint(17) + good[1:], "17 groups")
    bad("long-varint", b"\x81\x00" + good[1:], "a number in more bytes than it needs")
    bad("endless-varint", b"\xff" * 30, "a number that does not end")
    bad("varint-of-zeros", b"\x80" * 30, "a number that does not end, all zeros")
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
        varint(1)
        + integers.front(thresholds=b"\x01\x05")
        + integers.counts()
        + made.sizes
        + ordinals()
        + made.data,
        "thresholds for a dtype without an exponent",
    )
    bad("no-tensors", front(tensors=varint(0)), "a group without tensors")
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
        ("table-257", varint(257) + varint(SCALE) + bytes(256), "257 symbols"),
        ("table-end", table([0, SCALE, 0]), "a table that ends with 0"),
        ("table-sum-less", table([0, SCALE - 1]), "frequencies that add up to 4095"),
        ("table-sum-more", table([1, SCALE]), "frequencies that add up to 4097"),
        ("table-frequency", table([0, SCALE + 1]), "a frequency of 4097"),
        ("table-wrap", table([SCALE] * 255 + [1]), "frequencies that add up to far too much"),
    ):
        bad(name, front(tables=gaps + wrong), about)
    bad(
        "tensor-twice",
        varint(2) + group.head() * 2 + ordinals() + parts.data * 2,
        "a tensor in two groups",
    )
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
    words, raw = len(made.words) - 8, len(made.raw)
    coded_words, coded_raw = made.data[: 2 * len(made.words)], made.raw

    def resized(name: str, more_words: int, more_raw: int, data: bytes, about: str) -> None:
        entry = group.counts() + varint(words + more_words) + varint(raw + more_raw)
        bad(name, directory(entry, data), about)

    resized("words-left", 1, 0, coded_words + b"\1\0" + coded_raw, "a word too many")
    resized("words-short", -1, 0, coded_words[:-2] + coded_raw, "a word too few")
    resized("raw-left", 0, 1, made.data + b"\0", "a raw byte too many")
    resized("raw-short", 0, -1, made.data[:-1], "a raw byte too few")
    low = made.data[:2] + b"\0\0" + made.data[4:]
    resized("first-state", 0, 0, low, "a first state below 65536")
    low = made.data[:14] + b"\0\0" + made.data[16:]
    resized("first-state-3", 0, 0, low, "the last of the first states below 65536")
    for lane in range(4):
        last = [LOW + (i == lane) for i in range(4)]
        bad(f"last-state-{lane}", coded(runs, last=last), f"state {lane} ends at 65537")
    bad("raw-junk", coded(runs, junk=1), "a bit set after the last raw bit")
    for name, long_gap in (("gap-symbol-44", 44), ("gap-symbol-255", 255)):
        group = Group(BF16, 16, [0], {0: [(0, 0, 1)]})
        raw = (long_gap >> 1) - 1
        group.tables[0] = (even_table([long_gap]), even_table([1]))
        runs = [
            ([long_gap], group.tables[0][0], [(0, raw)]),
            ([1], group.tables[0][1], [(0, 0)]),
        ]
        made = streams(runs)
        made.raw = made.raw[:6] if raw > 48 else made.raw
        bad(
            name, directory(group.counts() + made.sizes, made.data), "a gap symbol that is too long"
        )
    for dtype, width, first in ((BF16, 16, 56), (BF16, 16, 127), (I64, 64, 126)):
        sub = 1 if width == 64 else 2
        group = Group(dtype, width, [int(width == 64)], {0: [(0, 0, 1)]})
        group.tables[0] = (even_table([0]), even_table([2 * first]))
        sizes_run = ([2 * first], group.tables[0][1], [(0, (first >> sub) - 1)])
        runs = [([0], group.tables[0][0], [(0, 0)]), sizes_run]
        bad(
            f"size-symbol-{first}-of-{width}",
            coded(runs),
            f"a size of more than {width - 1} bits in {width}-bit elements",
        )
    for name, kind in (("beyond", "compact"), ("beyond", "packed")):
        group = Group(BF16, 16, [0], {0: [(9, 0, 1)] * 10 + [(0, 0, 1)]})
        bad(name, body([group]), "a change one element behind the last", kind)
    group = Group(BF16, 16, [0], {0: [(SEGMENT - 1, 0, 1)]})
    bad("far-beyond", body([group]), "a gap of 2^22 - 1 in 100 elements")
    group = Group(BF16, 16, [0], {3: [(0, 0, 1)]}, [128])
    bad("empty-class", body([group]), "a change in a class that has no elements")
    state.add("c", "BF16", none := np.zeros(0, "<u2"), none)
    group = Group(BF16, 16, [0, 2], {0: [(9, 0, 1)] * 10})
    bad("empty-tensor", body([group]), "a tensor without elements in a group")
    bad("empty-dense", body([], [(2, b"")]), "a dense tensor without elements")
    state, _ = simple()
    everything = Group(BF16, 16, [0], {0: [(0, 0, 1)] * 100})
    last = varint(1) + everything.front() + everything.counts() + everything.streams.sizes
    bad(
        "unchanged-neighbour",
        last[:1]
        + everything.front(tensors=ordinals(0))
        + everything.counts()
        + everything.streams.sizes
        + ordinals(1)
        + everything.streams.data
        + state.base["b"],
        "a dense tensor without a change beside a coded one",
    )

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
    raw_file(
        "wide-indices",
        pair([1], indices=("a.indices", "I64", [1], bytes(8))),
        "64-bit positions in a small tensor",
    )
    raw_file("other-dtype", pair([1], values=("a.values", "F16", [1], bytes(2))), "another dtype")
    raw_file("lengths", pair([1], values=("a.values", "BF16", [2], bytes(4))), "other lengths")
    raw_file(
        "column",
        pair(
            [1],
            indices=("a.indices", "I32", [1, 1], bytes(4)),
            values=("a.values", "BF16", [1, 1], bytes(2)),
        ),
        "two dimensions",
    )
    raw_file(
        "unknown",
        [("c.indices", "I32", [1], bytes(4)), ("c.values", "U8", [1], b"1")],
        "a tensor that the schema does not have",
    )
    raw_file("suffix", [*pair([1]), ("a.other", "U8", [1], b"1")], "an entry of another kind")
    return found
