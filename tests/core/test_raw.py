from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import codec
from thinwire.diff import diff
from thinwire.dtypes import DTYPES, dtype
from thinwire.errors import CorruptPayload, Misuse, SchemaMismatch, UnsupportedFormat
from thinwire.patch import Patch
from thinwire.schema import Schema, TensorSpec, schema_of
from thinwire.testing.strategies import StatePair, flat_tensors, state_pairs
from thinwire.weights import Weights

SCHEMA = schema_of([("a.w", "BF16", (3, 4)), ("b", "F32", (5,)), ("c.indices", "U8", (2,))])
METADATA = {"format": "thinwire-delta", "major": "1", "codec": "raw"}


def patch(name: str, positions: list[int], bits: list[int], schema: Schema = SCHEMA) -> Patch:
    ordinal = schema.ordinal(name)
    spec = schema[ordinal]
    return Patch(ordinal, spec, np.array(positions, "<i4"), np.array(bits, spec.dtype.bits))


PATCHES = [
    patch("a.w", [0, 5, 11], [0x3F80, 0x8000, 0x7FC1]),
    patch("b", [4], [0xFFFFFFFF]),
    patch("c.indices", [0, 1], [1, 255]),
]


def payload(patches: list[Patch], **options: Any) -> bytes:
    return b"".join(codec.encode(patches, **options))


def same(left: list[Patch], right: list[Patch]) -> bool:
    return [(p.ordinal, p.spec, p.positions.tolist(), p.bits.tolist()) for p in left] == [
        (p.ordinal, p.spec, p.positions.tolist(), p.bits.tolist()) for p in right
    ]


def test_round_trip() -> None:
    assert same(codec.decode(payload(PATCHES), SCHEMA), PATCHES)
    assert same(codec.decode(memoryview(payload(PATCHES)), SCHEMA), PATCHES)
    assert codec.decode(payload([]), SCHEMA) == []
    assert same(codec.decode(payload([patch("b", [], [])]), SCHEMA), [])


@given(state_pairs())
def test_round_trip_of_any_change(pair: StatePair) -> None:
    patches = diff(pair.old, Weights.matching(flat_tensors(pair.schema, pair.new), pair.schema))
    data = payload(patches, metadata={"version": "7"})
    assert same(codec.decode(data, pair.schema), patches)
    changed = sum(len(p) * (4 + p.spec.dtype.itemsize) for p in patches)
    assert len(data) <= changed + 256 + sum(220 + 12 * len(p.name.encode()) for p in patches)


def test_patches_are_written_without_copies() -> None:
    buffers = codec.encode(PATCHES)
    arrays = [array for p in PATCHES for array in (p.positions, p.bits)]
    addresses = {array.ctypes.data for array in arrays}
    assert {np.frombuffer(b, np.uint8).ctypes.data for b in buffers[1:]} == addresses


@pytest.mark.parametrize("kind", DTYPES.values(), ids=str)
def test_anyone_reads_it_with_safetensors(kind: Any, tmp_path: Path) -> None:
    schema = schema_of([("layers.0.w", kind, (7, 3)), ("é", "F64", (2,))])
    bits = [0, 1, (1 << kind.width) - 1]
    written = [patch("layers.0.w", [2, 3, 20], bits, schema), patch("é", [1], [5], schema)]
    (tmp_path / "delta.safetensors").write_bytes(payload(written, metadata={"version": "3"}))
    with safetensors.safe_open(tmp_path / "delta.safetensors", "pt") as file:
        assert set(file.keys()) == {
            "layers.0.w.indices",
            "layers.0.w.values",
            "é.indices",
            "é.values",
        }
        assert file.metadata() == {**METADATA, "version": "3"}
        indices, values = (file.get_tensor(f"layers.0.w.{x}") for x in ("indices", "values"))
    assert indices.dtype == torch.int32
    assert indices.tolist() == [2, 3, 20]
    assert dtype(values.dtype) is kind
    assert values.view(torch.uint8).numpy().tobytes() == np.array(bits, kind.bits).tobytes()


def foreign(tmp_path: Path, tensors: dict[str, torch.Tensor], **changes: str) -> bytes:
    safetensors.torch.save_file(tensors, tmp_path / "f", {**METADATA, **changes})
    return (tmp_path / "f").read_bytes()


def test_files_written_by_others_are_read(tmp_path: Path) -> None:
    data = foreign(
        tmp_path,
        {
            "b.indices": torch.tensor([1, 3], dtype=torch.int32),
            "b.values": torch.tensor([1.5, -0.0]),
            "a.w.indices": torch.tensor([11], dtype=torch.int32),
            "a.w.values": torch.tensor([1.0], dtype=torch.bfloat16),
        },
        later="a key of a newer minor version",
    )
    expected = [patch("a.w", [11], [0x3F80]), patch("b", [1, 3], [0x3FC00000, 0x80000000])]
    assert same(codec.decode(data, SCHEMA), expected)


def test_wide_positions_in_large_tensors(tmp_path: Path) -> None:
    schema = schema_of([("w", "U8", (2**31 + 1,))])
    spec = TensorSpec("w", DTYPES["U8"], (2**31 + 1,))
    written = [Patch(0, spec, np.array([5, 2**31], "<i8"), np.array([1, 2], np.uint8))]
    assert same(codec.decode(payload(written), schema), written)
    narrow = {
        "w.indices": torch.tensor([5], dtype=torch.int32),
        "w.values": torch.tensor([1], dtype=torch.uint8),
    }
    with pytest.raises(CorruptPayload, match="dtypes I32 and U8"):
        codec.decode(foreign(tmp_path, narrow), schema)


def one(positions: Any, values: Any) -> dict[str, torch.Tensor]:
    return {"b.indices": positions, "b.values": values}


I32 = torch.int32
HOSTILE: dict[str, dict[str, torch.Tensor]] = {
    "descending": one(torch.tensor([3, 1], dtype=I32), torch.ones(2)),
    "duplicate": one(torch.tensor([1, 1], dtype=I32), torch.ones(2)),
    "negative": one(torch.tensor([-1, 1], dtype=I32), torch.ones(2)),
    "out of range": one(torch.tensor([1, 5], dtype=I32), torch.ones(2)),
    "largest int32": one(torch.tensor([2**31 - 1], dtype=I32), torch.ones(1)),
    "more positions": one(torch.tensor([1, 2], dtype=I32), torch.ones(1)),
    "more values": one(torch.tensor([1], dtype=I32), torch.ones(2)),
    "two dimensions": one(torch.tensor([[1]], dtype=I32), torch.ones(1, 1)),
    "0-d": one(torch.tensor(1, dtype=I32), torch.tensor(1.0)),
    "int64 positions": one(torch.tensor([1]), torch.ones(1)),
    "uint32 positions": one(torch.tensor([1], dtype=torch.uint32), torch.ones(1)),
    "float positions": one(torch.tensor([1.0]), torch.ones(1)),
    "values of the same width": one(torch.tensor([1], dtype=I32), torch.ones(1, dtype=I32)),
    "values of another width": one(torch.tensor([1], dtype=I32), torch.ones(1).bfloat16()),
    "no values": {"b.indices": torch.tensor([1], dtype=I32)},
    "no positions": {"b.values": torch.ones(1)},
    "an unknown tensor": {"x.indices": torch.tensor([0], dtype=I32), "x.values": torch.ones(1)},
    "an extra tensor": {**one(torch.tensor([1], dtype=I32), torch.ones(1)), "note": torch.ones(1)},
    "another suffix": {"b.indexes": torch.tensor([1], dtype=I32), "b.values": torch.ones(1)},
    "the tensor itself": {"b": torch.ones(5)},
    "no name": {".indices": torch.tensor([1], dtype=I32), ".values": torch.ones(1)},
    "a suffix alone": {"indices": torch.tensor([1], dtype=I32), "values": torch.ones(1)},
}


@pytest.mark.parametrize("lie", list(HOSTILE))
def test_every_lie_is_corrupt(lie: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptPayload):
        codec.decode(foreign(tmp_path, HOSTILE[lie]), SCHEMA)


def test_an_alias_is_not_a_tensor(tmp_path: Path) -> None:
    schema = Schema(SCHEMA.tensors, {"head": "b"})
    tied = {"head.indices": torch.tensor([1], dtype=I32), "head.values": torch.ones(1)}
    with pytest.raises(CorruptPayload, match=r"'head\.(indices|values)' does not belong"):
        codec.decode(foreign(tmp_path, tied), schema)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": "pt"}, CorruptPayload),
        ({"format": ""}, CorruptPayload),
        ({"major": "2"}, UnsupportedFormat),
        ({"major": "0"}, UnsupportedFormat),
        ({"major": "1.0"}, UnsupportedFormat),
        ({"codec": "rawer"}, UnsupportedFormat),
    ],
)
def test_what_the_file_says_it_is(
    change: dict[str, str], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        codec.decode(foreign(tmp_path, {}, **change), SCHEMA)


def test_a_checkpoint_is_not_a_payload() -> None:
    with pytest.raises(CorruptPayload, match="not a thinwire payload"):
        codec.decode(safetensors.torch.save({"b": torch.ones(5)}), SCHEMA)


def test_unknown_codec_when_writing() -> None:
    with pytest.raises(Misuse, match="unknown codec 'zip'") as caught:
        codec.encode([], codec="zip")
    assert "raw" in caught.value.hint


def test_metadata_cannot_hide_what_a_file_is() -> None:
    data = payload(PATCHES, metadata={"format": "x", "major": "9", "codec": "y", "run": "r"})
    assert same(codec.decode(data, SCHEMA), PATCHES)


def require_decent(data: bytes) -> None:
    """Refused as it should be, or decoded to something that fits the schema."""
    try:
        patches = codec.decode(data, SCHEMA)
    except (CorruptPayload, UnsupportedFormat):
        return
    assert [p.ordinal for p in patches] == sorted({p.ordinal for p in patches})
    for decoded in patches:
        positions = decoded.positions.tolist()
        assert decoded.spec == SCHEMA[decoded.ordinal]
        assert positions == sorted(set(positions))
        assert all(0 <= p < decoded.spec.numel for p in positions)
        assert decoded.bits.dtype == decoded.spec.dtype.bits
        assert len(positions) == decoded.bits.size


def test_every_byte_flipped() -> None:
    data = bytearray(payload(PATCHES, metadata={"run": "0" * 32}))
    for at in range(len(data)):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            data[at] ^= flip
            require_decent(bytes(data))
            data[at] ^= flip


def test_truncated_at_every_byte() -> None:
    data = payload(PATCHES)
    for end in range(len(data)):
        with pytest.raises(CorruptPayload):
            codec.decode(data[:end], SCHEMA)
    with pytest.raises(CorruptPayload):
        codec.decode(data + b"\0", SCHEMA)


@given(st.data())
def test_several_bytes_replaced(data: st.DataObject) -> None:
    file = bytearray(payload(PATCHES))
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    require_decent(bytes(file))


def test_names_that_no_schema_holds() -> None:
    with pytest.raises(SchemaMismatch):
        SCHEMA.ordinal("a.w.indices")


def test_frozen_vector(vectors: Path) -> None:
    """Read forever, and written byte for byte the same while the major version stands."""
    data = (vectors / "raw-1.safetensors").read_bytes()
    described = json.loads((vectors / "raw-1.json").read_text())
    schema = Schema.from_json(described["schema"])
    patches = codec.decode(data, schema)
    assert [
        [p.name, p.positions.tolist(), [f"{b:0{2 * p.bits.itemsize}x}" for b in p.bits.tolist()]]
        for p in patches
    ] == described["patches"]
    again = payload(patches, metadata=described["metadata"])
    assert again == data
