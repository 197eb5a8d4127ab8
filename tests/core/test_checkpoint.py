from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.checkpoint import (
    INDEX,
    SINGLE,
    Checkpoint,
    asset_files,
    index_json,
    lay_out,
)
from thinwire.dtypes import dtype
from thinwire.errors import InvalidCheckpoint
from thinwire.patch import Bits
from thinwire.schema import Schema, schema_of
from thinwire.testing.strategies import random_bits, schemas, states

SCHEMA = schema_of(
    [
        ("a", "BF16", (4, 2)),
        ("b", "F32", (3,)),
        ("c", "U8", (5,)),
        ("d", "F64", (2,)),
        ("e", "I8", ()),
    ]
)
STATE = [random_bits(spec.dtype, spec.numel, k) for k, spec in enumerate(SCHEMA)]


def write(folder: Path, schema: Schema, state: list[Bits], max_shard: int) -> list[str]:
    shards = lay_out(schema, max_shard=max_shard)
    for shard in shards:
        data = shard.head + b"".join(state[k].tobytes() for k in shard.ordinals)
        assert len(data) == shard.size
        (folder / shard.name).write_bytes(data)
    if len(shards) > 1:
        (folder / INDEX).write_bytes(index_json(schema, shards))
    return [shard.name for shard in shards]


@pytest.mark.parametrize(("max_shard", "count"), [(1, 5), (16, 5), (17, 3), (28, 2), (10**9, 1)])
def test_what_is_written_loads_elsewhere_and_here(
    max_shard: int, count: int, tmp_path: Path
) -> None:
    names = write(tmp_path, SCHEMA, STATE, max_shard)
    assert len(names) == count
    if count == 1:
        assert names == [SINGLE]
    else:
        assert names[0] == f"model-00001-of-{count:05d}.safetensors"
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"] == {"total_size": SCHEMA.nbytes}
        assert set(index["weight_map"]) == {spec.name for spec in SCHEMA}
    found: dict[str, torch.Tensor] = {}
    for name in names:
        shard = safetensors.torch.load_file(tmp_path / name)
        if count > 1:
            assert {index["weight_map"][key] for key in shard} == {name}
            sizes = [tensor.nbytes for tensor in shard.values()]
            assert sum(sizes) <= max_shard or len(sizes) == 1
        found |= shard
    assert {(k, dtype(t.dtype).name, tuple(t.shape)) for k, t in found.items()} == {
        (s.name, s.dtype.name, s.shape) for s in SCHEMA
    }
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.schema() == SCHEMA
    mapped = checkpoint.map()
    for spec, bits in zip(SCHEMA, STATE):
        np.testing.assert_array_equal(mapped[spec.name], bits)
        expected = found[spec.name].flatten().view(torch.uint8).numpy().tobytes()
        assert bits.tobytes() == expected


@given(schemas().flatmap(lambda s: st.tuples(st.just(s), states(s))), st.integers(1, 20_000))
def test_layouts_of_any_schema(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Schema, list[Bits]], max_shard: int
) -> None:
    schema, state = drawn
    folder = tmp_path_factory.mktemp("checkpoint")
    write(folder, schema, state, max_shard)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.schema(schema.aliases) == schema
    mapped = checkpoint.map()
    assert [mapped[spec.name].tobytes() for spec in schema] == [bits.tobytes() for bits in state]
    assert all(mapped[s.name].ctypes.data % s.dtype.itemsize == 0 for s in schema if s.numel)
    for shard in lay_out(schema, max_shard=max_shard):
        sizes = [schema[k].nbytes for k in shard.ordinals]
        assert sum(sizes) <= max_shard or sum(size > 0 for size in sizes) == 1


@pytest.mark.parametrize("max_shard", [2000, 10**9])
def test_transformers_loads_it(tmp_path: Path, max_shard: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "saved")
    saved = Checkpoint.open(tmp_path / "saved")
    mapped, schema = saved.map(), saved.schema()
    ours = tmp_path / "ours"
    ours.mkdir()
    config.save_pretrained(ours)
    write(ours, schema, [mapped[spec.name] for spec in schema], max_shard)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        ours, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_mapping_is_read_only_unless_asked(tmp_path: Path) -> None:
    write(tmp_path, SCHEMA, STATE, 10**9)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.map()["c"][0] = 1
    mapped = checkpoint.map(write=True)["c"]
    mapped[0] ^= 0xFF
    assert Checkpoint.open(tmp_path).map()["c"][0] == mapped[0] == STATE[2][0] ^ 0xFF


def test_tensors_are_a_source_for_publishing(tmp_path: Path) -> None:
    write(tmp_path, SCHEMA, STATE, 20)
    pairs = dict(Checkpoint.open(tmp_path).tensors())
    assert {name: (t.dtype, t.shape) for name, t in pairs.items()} == {
        spec.name: (spec.dtype, spec.shape) for spec in SCHEMA
    }


def test_a_single_file_of_any_name(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert [t.name for t in Checkpoint.open(tmp_path).schema()] == ["a"]
    safetensors.torch.save_file({"b": torch.ones(2)}, tmp_path / "more.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"holds no model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_file_that_changed_under_its_header(tmp_path: Path) -> None:
    write(tmp_path, SCHEMA, STATE, 10**9)
    checkpoint = Checkpoint.open(tmp_path)
    with (tmp_path / SINGLE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(InvalidCheckpoint, match="bytes, expected"):
        checkpoint.map()
    (tmp_path / SINGLE).unlink()
    with pytest.raises(InvalidCheckpoint, match="No such file"):
        checkpoint.map()


def index_of(weight_map: Any) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no model\.safetensors"),
        ({"pytorch_model.bin": b""}, r"holds no model\.safetensors"),
        ({SINGLE: b""}, "too few"),
        ({SINGLE: b"\xff" * 100}, "the header claims"),
        ({INDEX: b"{"}, "JSONDecodeError"),
        ({INDEX: b"[]"}, "TypeError"),
        ({INDEX: b"{}"}, "KeyError"),
        ({INDEX: b"[" * 100_000}, "RecursionError"),
        ({INDEX: b'{"weight_map":{"a":"\xff"}}'}, "UnicodeDecodeError"),
        ({INDEX: index_of([])}, "AttributeError"),
        ({INDEX: index_of({})}, "names no shard"),
        ({INDEX: index_of({"a": ["x"]})}, "TypeError"),
        ({INDEX: index_of({"a": 7})}, "leads out of the folder"),
        ({INDEX: index_of({"a": ""})}, "leads out of the folder"),
        ({INDEX: index_of({"a": "."})}, "leads out of the folder"),
        ({INDEX: index_of({"a": ".."})}, "leads out of the folder"),
        ({INDEX: index_of({"a": "../x.safetensors"})}, "leads out of the folder"),
        ({INDEX: index_of({"a": "/etc/passwd"})}, "leads out of the folder"),
        ({INDEX: index_of({"a": "sub/x.safetensors"})}, "leads out of the folder"),
        ({INDEX: index_of({"a": "x/"})}, "leads out of the folder"),
        ({INDEX: index_of({"a": "x\0y"})}, "leads out of the folder"),
        ({INDEX: index_of({"a": "missing.safetensors"})}, "No such file"),
    ],
)
def test_folders_that_are_no_checkpoint(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidCheckpoint, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "model.safetensors" in caught.value.hint


def test_not_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(InvalidCheckpoint, match="is not a folder"):
            Checkpoint.open(path)
        with pytest.raises(InvalidCheckpoint, match="is not a folder"):
            asset_files(path)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / name)
    (tmp_path / INDEX).write_bytes(index_of({"a": "x.safetensors", "b": "y.safetensors"}))
    with pytest.raises(InvalidCheckpoint, match="'a' is in two shards"):
        Checkpoint.open(tmp_path)


def test_a_shard_without_what_the_index_promises(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_bytes(index_of({"a": "x.safetensors", "b": "x.safetensors"}))
    with pytest.raises(InvalidCheckpoint, match="'b' is not in the shards"):
        Checkpoint.open(tmp_path)


def test_assets_are_everything_but_weights(tmp_path: Path) -> None:
    assets = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "README",
    ]
    others = [SINGLE, INDEX, "pytorch_model.bin", "model.gguf", ".gitattributes", "x.pt"]
    others += ["pytorch_model.bin.index.json", "model-00001-of-00002.safetensors"]
    others += ["manifest.json"]  # an anchor's own, in a checkpoint copied out of a bucket
    for name in assets + others:
        (tmp_path / name).touch()
    (tmp_path / "onnx").mkdir()
    assert [path.name for path in asset_files(tmp_path)] == sorted(assets)
