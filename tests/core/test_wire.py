"""The safetensors container: we write for others, read what others write, and refuse lies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.codec import wire
from thinwire.dtypes import DTYPES, dtype
from thinwire.errors import CorruptPayload, InvalidCheckpoint


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(code: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": code, "shape": shape, "data_offsets": offsets}


def nested(opening: str, closing: str, depth: int = 50_000) -> bytes:
    return f'{{"a":{opening * depth}{closing * depth}}}'.encode()


DATA = b"data"
GOOD = file_of({"a": entry()}, DATA)


def test_the_smallest_good_files() -> None:
    header, tensors = wire.split(GOOD)
    assert tensors["a"].tobytes() == DATA
    assert header.entries["a"] == wire.Entry("a", DTYPES["U8"], (4,), len(GOOD) - 4, len(GOOD))
    assert (header.metadata, header.size) == ({}, len(GOOD))
    assert wire.split(file_of({}))[1] == {}
    assert wire.split(file_of({"__metadata__": {"k": "v"}}))[0].metadata == {"k": "v"}


def test_tensors_are_read_only_views() -> None:
    tensors = wire.split(memoryview(GOOD))[1]
    assert not tensors["a"].flags.writeable
    assert tensors["a"].base is not None


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "header longer than the file": (10**6).to_bytes(8, "little") + b"{}",
    "header of 2**64 - 1": b"\xff" * 8 + b"{}",
    "header longer by one": (len(GOOD) - 8 + 1).to_bytes(8, "little") + GOOD[8:],
    "empty header": file_of(b""),
    "not JSON": file_of(b"{'a':1}"),
    "not UTF-8": file_of(b'{"\xff":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', DATA),
    "UTF-16": file_of('{"a":1}'.encode("utf-16")),
    "a list": file_of([]),
    "a number": file_of(7),
    "null": file_of(None),
    "two values": file_of(b"{}{}"),
    "entry is null": file_of({"a": None}),
    "entry is a list": file_of({"a": ["U8", [4], [0, 4]]}, DATA),
    "entry without dtype": file_of({"a": {"shape": [4], "data_offsets": [0, 4]}}, DATA),
    "entry with more": file_of({"a": {**entry(), "x": 1}}, DATA),
    "key repeated": file_of(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), DATA),
    "key repeated inside": file_of(
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', DATA
    ),
    "metadata repeated": file_of(b'{"__metadata__":{"a":"1","a":"2"}}'),
    "metadata is a list": file_of({"__metadata__": ["a"]}),
    "metadata is null": file_of({"__metadata__": None}),
    "metadata is text": file_of({"__metadata__": "format"}),
    "metadata of numbers": file_of({"__metadata__": {"major": 1}}),
    "metadata nested": file_of({"__metadata__": {"major": {"a": "b"}}}),
    "unknown dtype": file_of({"a": entry("F4")}, DATA),
    "lower-case dtype": file_of({"a": entry("u8")}, DATA),
    "dtype is a number": file_of({"a": entry(8)}, DATA),
    "dtype is a list": file_of({"a": entry(["U8"])}, DATA),
    "negative dimensions": file_of({"a": entry(shape=[-2, -2])}, DATA),
    "boolean dimension": file_of({"a": entry(shape=[True, 4])}, DATA),
    "float dimension": file_of({"a": entry(shape=[4.0])}, DATA),
    "text dimension": file_of({"a": entry(shape=["4"])}, DATA),
    "shape is a number": file_of({"a": entry(shape=4)}, DATA),
    "shape is an object": file_of({"a": entry(shape={"4": 4})}, DATA),
    "shape is null": file_of({"a": entry(shape=None)}, DATA),
    "33 dimensions": file_of({"a": entry(shape=[1] * 32 + [4])}, DATA),
    "huge dimension": file_of({"a": entry(shape=[2**63, 0], offsets=(0, 0))}),
    "product wraps": file_of({"a": entry(shape=[2**32, 2**32], offsets=(0, 0))}),
    "ten thousand digits": file_of(
        b'{"a":{"dtype":"U8","shape":[%b],"data_offsets":[0,4]}}' % (b"9" * 10_000), DATA
    ),
    "one offset": file_of({"a": entry(offsets=[0])}, DATA),
    "three offsets": file_of({"a": entry(offsets=[0, 4, 4])}, DATA),
    "negative offsets": file_of({"a": entry(offsets=[-4, 0])}, DATA),
    "float offsets": file_of({"a": entry(offsets=[0.0, 4.0])}, DATA),
    "NaN offset": file_of({"a": entry(offsets=[0, math.nan])}, DATA),
    "infinite offset": file_of({"a": entry(offsets=[0, math.inf])}, DATA),
    "boolean offset": file_of({"a": entry(shape=[1], offsets=[False, True])}, b"d"),
    "offsets backwards": file_of({"a": entry(offsets=[4, 0])}, DATA),
    "offsets of another size": file_of({"a": entry(offsets=[0, 3])}, DATA),
    "gap before": file_of({"a": entry(offsets=[4, 8])}, DATA * 2),
    "gap between": file_of({"a": entry(), "b": entry(offsets=[5, 9])}, bytes(9)),
    "overlap": file_of({"a": entry(), "b": entry(offsets=[3, 7])}, bytes(7)),
    "one range twice": file_of({"a": entry(), "b": entry()}, DATA),
    "empty tensor inside another": file_of(
        {"a": entry(), "b": entry(shape=[0], offsets=[2, 2])}, DATA
    ),
    "bytes after the end": GOOD + b"x",
    "a byte missing": GOOD[:-1],
    "end beyond the file": file_of({"a": entry(shape=[8], offsets=[0, 8])}, DATA),
    "nested lists": file_of(nested("[", "]")),
    "nested objects": file_of(nested('{"a":', "}")),
}


@pytest.mark.parametrize("lie", list(HOSTILE))
def test_every_lie_is_corrupt(lie: str) -> None:
    with pytest.raises(CorruptPayload) as caught:
        wire.split(HOSTILE[lie])
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("lie", ["nothing", "unknown dtype", "gap before", "nested lists"])
def test_the_same_in_a_file_names_the_file(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[lie])
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors"):
        wire.read_header(path)


def test_header_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_HEADER", len(GOOD) - 8 - 4 - 1)
    with pytest.raises(CorruptPayload, match="the header claims"):
        wire.split(GOOD)
    monkeypatch.setattr(wire, "MAX_HEADER", len(GOOD) - 8 - 4)
    wire.split(GOOD)


def test_a_header_cut_short() -> None:
    with pytest.raises(CorruptPayload, match="cut short"):
        wire.parse_header(GOOD[:-8], len(GOOD))


SHAPES = [(3,), (), (2, 0), (5, 3)]


@pytest.mark.parametrize("name", list(DTYPES))
def test_files_of_the_reference_implementation(name: str, tmp_path: Path) -> None:
    kind = getattr(torch, DTYPES[name].torch_name)
    source = {
        f"t{k}": torch.randint(0, 2, (math.prod(shape) * kind.itemsize,), dtype=torch.uint8)
        .view(kind)
        .reshape(shape)
        for k, shape in enumerate(SHAPES)
    }
    safetensors.torch.save_file(source, tmp_path / "f", {"written": "elsewhere"})
    header, tensors = wire.split((tmp_path / "f").read_bytes())
    assert header == wire.read_header(tmp_path / "f")
    assert header.metadata == {"written": "elsewhere"}
    assert header.entries.keys() == source.keys()
    for key, value in source.items():
        assert header.entries[key].dtype is dtype(value.dtype) is DTYPES[name]
        assert header.entries[key].shape == tuple(value.shape)
        assert tensors[key].tobytes() == value.flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", list(DTYPES))
def test_the_reference_implementation_reads_ours(name: str, tmp_path: Path) -> None:
    kinds = [DTYPES[name], DTYPES["F64"], DTYPES["U8"]]
    tensors = [(f"{k}{i}", k, shape) for k in kinds for i, shape in enumerate(SHAPES)]
    tensors = [*{t[0]: t for t in tensors}.values()]
    head, order = wire.build_header(tensors, {"format": "pt"})
    assert len(head) % 8 == 0
    by_name = {t[0]: t for t in tensors}
    data = [
        bytes([k % 2]) * (math.prod(by_name[n][2]) * by_name[n][1].itemsize)
        for k, n in enumerate(order)
    ]
    (tmp_path / "f").write_bytes(head + b"".join(data))
    with safetensors.safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(by_name)
        for key, expected in zip(order, data):
            tensor = file.get_tensor(key)
            assert (dtype(tensor.dtype), tuple(tensor.shape)) == by_name[key][1:]
            assert tensor.flatten().view(torch.uint8).numpy().tobytes() == expected
    for key, found in wire.split(head + b"".join(data))[1].items():
        assert found.ctypes.data % found.itemsize == 0 or found.size == 0, key


@given(st.data())
def test_flipped_bytes_are_corrupt_or_still_a_whole_file(data: st.DataObject) -> None:
    head, _ = wire.build_header(
        [("a", DTYPES["BF16"], (3, 2)), ("é.b", DTYPES["F32"], (2,))], {"k": "v"}
    )
    file = bytearray(head + bytes(20))
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        _, tensors = wire.split(bytes(file))
    except CorruptPayload:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) == len(file) - len(head)


@given(st.binary(max_size=300))
def test_arbitrary_bytes(junk: bytes) -> None:
    for file in (junk, file_of(junk)):
        try:
            wire.split(file)
        except CorruptPayload:
            continue
        assert len(file) >= 10


def test_unaligned_data_is_read() -> None:
    values = np.arange(2, dtype="<f4").tobytes()
    for padding in range(8):
        header = json.dumps({"a": entry("F32", (2,), (0, 8))}).encode() + b" " * padding
        tensors = wire.split(file_of(header, values))[1]
        assert tensors["a"].view(np.float32).tolist() == [0.0, 1.0]
