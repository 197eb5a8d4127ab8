"""publish → pull is the identity on bits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import Publisher, Replica
from thinwire.bucket import LocalBucket, MemoryBucket
from thinwire.disk import DiskMirror
from thinwire.dtypes import DTYPES
from thinwire.mirror import MemoryMirror
from thinwire.schema import TensorSpec

names = st.text("abcxyz._é0", min_size=1, max_size=8).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
layouts = st.dictionaries(
    names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), min_size=1, max_size=5
)


def publish_and_pull(kit: SimpleNamespace, states: list[Any], folder: Path, max_shard: int) -> None:
    bucket = MemoryBucket()
    publisher = Publisher(bucket, states[0].source, max_shard=max_shard)
    memory = MemoryMirror()
    follower = Replica(bucket, memory)
    with DiskMirror(folder) as disk:
        stepwise = Replica(bucket, disk)
        for version, state in enumerate(states):
            if version:
                commit = publisher.publish(state.source, step=version).result()
                assert commit.changed == state.distance(states[version - 1])
            assert follower.sync()[-1].version == version
            assert stepwise.sync()[-1].version == version
            assert kit.held(memory) == kit.held(disk) == kit.on_disk(folder) == state.raw
            memory.rescan()
        disk.verify()
    assert kit.on_disk(folder) == states[-1].raw
    assert kit.history(bucket) == [state.raw for state in states]


@given(
    layouts,
    st.lists(st.sampled_from([0.0, 0.003, 0.05, 0.5, 1.0]), max_size=4),
    st.integers(0, 2**32),
    st.sampled_from([1, 40, 1 << 20]),
)
@settings(max_examples=30, deadline=None)
def test_any_small_state_arrives_bit_for_bit(
    kit: SimpleNamespace, layout: Any, densities: list[float], seed: int, max_shard: int
) -> None:
    states = [kit.State.random(seed, [(n, *what) for n, what in layout.items()])]
    for density in densities if layout and any(b.size for b in states[0].bits.values()) else []:
        states.append(states[-1].changed(seed + len(states), density))
    with tempfile.TemporaryDirectory() as folder:
        publish_and_pull(kit, states, Path(folder) / "mirror", max_shard)


@pytest.mark.parametrize("kind", sorted(DTYPES))
def test_every_dtype_at_every_density(kit: SimpleNamespace, kind: str, tmp_path: Path) -> None:
    layout = [("matrix", kind, (17, 23)), ("scalar", kind, ()), ("empty", kind, (4, 0))]
    states = [kit.State.random(3, layout)]
    for seed, density in enumerate([0.0, 0.001, 0.02, 0.3, 1.0]):
        states.append(states[-1].changed(seed, density))
    publish_and_pull(kit, states, tmp_path / "mirror", 1 << 30)


def test_every_bf16_pattern_as_old_and_as_new(kit: SimpleNamespace, tmp_path: Path) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    layout = (("w", "BF16", (1 << 16,)),)
    states = [
        kit.State(layout, {"w": bits})
        for bits in (patterns, np.roll(patterns, 1), patterns[::-1].copy(), patterns ^ 0x8000)
    ]
    publish_and_pull(kit, states, tmp_path / "mirror", 1 << 30)


def test_special_bf16_values_in_every_transition(kit: SimpleNamespace, tmp_path: Path) -> None:
    special = np.array(
        [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF],
        np.uint16,
    )
    old, new = (grid.reshape(-1).copy() for grid in np.meshgrid(special, special))
    layout = (("w", "BF16", (old.size,)),)
    states = [kit.State(layout, {"w": bits}) for bits in (old, new, old)]
    publish_and_pull(kit, states, tmp_path / "mirror", 1 << 30)


@pytest.mark.parametrize(("max_shard", "shards"), [(1 << 30, 1), (1000, 2), (1, 6)])
def test_anchors_in_any_number_of_shards(
    kit: SimpleNamespace, states: list[Any], tmp_path: Path, max_shard: int, shards: int
) -> None:
    publish_and_pull(kit, states, tmp_path / "mirror", max_shard)
    assert len(list((tmp_path / "mirror").glob("*.safetensors"))) == shards


def test_assets_travel_with_version_0(
    kit: SimpleNamespace, states: list[Any], tmp_path: Path
) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text('{"model_type": "tiny"}')
    (assets / "tokenizer.model").write_bytes(bytes(range(256)))
    (assets / "pytorch_model.bin").write_bytes(b"a pickle")
    bucket = LocalBucket(tmp_path / "bucket")
    Publisher(bucket, states[0].source, assets=assets, max_shard=1000).close()
    with Replica(bucket, tmp_path / "mirror") as replica:
        replica.sync()
    for name in ("config.json", "tokenizer.model"):
        assert (tmp_path / "mirror" / name).read_bytes() == (assets / name).read_bytes()
    assert not (tmp_path / "mirror" / "pytorch_model.bin").exists()


def test_tied_weights_travel_once_and_stay_tied(kit: SimpleNamespace) -> None:
    torch = pytest.importorskip("torch")
    head = torch.nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
    body = torch.nn.Embedding(16, 8, dtype=torch.bfloat16)
    head.weight = body.weight
    model = torch.nn.ModuleDict({"body": body, "head": head})
    bucket = MemoryBucket()
    publisher = Publisher(bucket, model)
    with torch.no_grad():
        body.weight[3, 5] += 1.0
    commit = publisher.publish(model).result()
    assert (commit.changed, commit.tensors) == (1, 1)
    truth = body.weight.detach().view(torch.int16).numpy().tobytes()
    assert kit.pulled(bucket) == {"body.weight": truth}
    assert dict(publisher.schema.aliases) == {"head.weight": "body.weight"}


def test_fp32_masters_are_served_in_bf16(kit: SimpleNamespace) -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(7)
    master = {
        "w": torch.randn(300, 41, generator=generator),
        "norm": torch.rand(17, generator=generator),
        "steps": torch.arange(5),
    }
    bucket = MemoryBucket()

    def keep_norm(spec: TensorSpec) -> str | None:
        return "bf16" if spec.name == "w" else None

    publisher = Publisher(bucket, master, dtype=keep_norm)
    for _ in range(3):
        master["w"] += 1e-3 * torch.randn(300, 41, generator=generator)
        master["norm"] *= 1.0001
        publisher.publish(master).result()
        served = {
            "w": master["w"].bfloat16().view(torch.int16),
            "norm": master["norm"],
            "steps": master["steps"],
        }
        assert kit.pulled(bucket) == {n: t.numpy().tobytes() for n, t in served.items()}


def test_an_update_lost_in_the_cast_is_no_change(kit: SimpleNamespace) -> None:
    torch = pytest.importorskip("torch")
    master = {"w": torch.ones(100)}
    publisher = Publisher(MemoryBucket(), master, dtype="bf16")
    master["w"] += 1e-4
    commit = publisher.publish(master).result()
    assert (commit.changed, commit.payloads) == (0, ())


@pytest.mark.parametrize("density", [0.002, 0.02, 0.5, 1.0])
def test_raw_payloads_cost_at_most_6_bytes_per_change_and_256_per_tensor(
    kit: SimpleNamespace, density: float
) -> None:
    parts = [
        *(f"self_attn.{which}_proj.weight" for which in "qkvo"),
        *(f"mlp.{which}_proj.weight" for which in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    layout = [
        (f"model.layers.{layer}.{part}", "BF16", (64, 96) if "proj" in part else (64,))
        for layer in range(24, 30)
        for part in parts
    ]
    state = kit.State.random(0, layout)
    bucket = MemoryBucket()
    publisher = Publisher(bucket, state.source)
    commit = publisher.publish(state.changed(1, density).source).result()
    assert commit.changed
    assert commit.payload_bytes <= 6 * commit.changed + 256 * commit.tensors
    assert sum(bucket.head(ref.key).size for ref in commit.payloads) == commit.payload_bytes
