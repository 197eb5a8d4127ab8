"""A server that generates while its replica patches the mirror never changes mid-forward."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from thinwire import Publisher, Replica
from thinwire.bucket import MemoryBucket
from thinwire.disk import DiskMirror
from thinwire.errors import MirrorInUse
from thinwire.mirror import Mirror

torch = pytest.importorskip("torch")


def network(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
    ).to(torch.bfloat16)


def trained(model: Any, steps: int) -> list[dict[str, Any]]:
    """States of a model that random updates move on."""
    states = []
    for step in range(steps + 1):
        if step:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
        states.append({name: t.clone() for name, t in model.state_dict().items()})
    return states


@pytest.fixture
def run() -> tuple[MemoryBucket, list[dict[str, Any]]]:
    bucket = MemoryBucket()
    states = trained(network(0), 20)
    with Publisher(bucket, states[0]) as publisher:
        for state in states[1:]:
            publisher.publish(state)
    return bucket, states


@pytest.fixture
def question() -> Any:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(9)).bfloat16()


@torch.no_grad()
def answer(model: Any, question: Any) -> Any:
    return model(question)


def copied_out(mirror: Mirror) -> dict[str, Any]:
    with mirror.reading():
        return {
            spec.name: torch.from_numpy(bits.view("int16").copy())
            .view(torch.bfloat16)
            .reshape(spec.shape)
            for spec, bits in zip(mirror.schema, mirror.tensors)
        }


@torch.no_grad()
def apply(model: Any, patches: Any) -> None:
    parameters = dict(model.named_parameters())
    for patch in patches:
        bits = parameters[patch.name].view(torch.int16).view(-1)
        bits[torch.from_numpy(patch.positions.copy()).long()] = torch.from_numpy(
            patch.bits.view("int16").copy()
        )


def test_outputs_change_only_when_the_engine_applies_an_update(
    run: tuple[MemoryBucket, list[dict[str, Any]]], question: Any, tmp_path: Path
) -> None:
    bucket, states = run
    expected = []
    for state in states:
        model = network(1)
        model.load_state_dict(state)
        expected.append(answer(model, question))
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(expected))
    with Replica(bucket, tmp_path / "mirror") as replica:
        replica.sync(0)
        model = network(2)
        model.load_state_dict(copied_out(replica.mirror), strict=True)
        done = threading.Event()
        outputs: list[Any] = []

        def generate() -> None:
            while not done.is_set():
                outputs.append(answer(model, question))

        def generate_during(work: Any) -> list[Any]:
            """Forwards in one thread while the mirror moves on in this one."""
            outputs.clear()
            done.clear()
            server = threading.Thread(target=generate)
            server.start()
            try:
                result = work()
                while len(outputs) < 3:
                    done.wait(0.001)
            finally:
                done.set()
                server.join()
            return result

        version = 0
        for target in (1, 2, 7, 20):
            updates = generate_during(lambda target=target: replica.sync(target))
            assert len(outputs) >= 3
            assert all(torch.equal(output, expected[version]) for output in outputs)
            for update in updates:
                apply(model, update.patches)
            version = target
            assert torch.equal(answer(model, question), expected[version])


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="who maps a file is told by Linux only"
)
@pytest.mark.parametrize("loader", ["safe_open", "load_file", "from_file"])
def test_a_model_that_aliases_the_mirror_is_caught_before_it_changes(
    run: tuple[MemoryBucket, list[dict[str, Any]]], question: Any, tmp_path: Path, loader: str
) -> None:
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("safetensors.torch")
    bucket, states = run
    shard = tmp_path / "mirror" / "model.safetensors"
    with Replica(bucket, tmp_path / "mirror") as replica:
        replica.sync(0)
        model = network(2)
        if loader == "load_file":
            tensors = safetensors.torch.load_file(shard)
        elif loader == "safe_open":
            with safetensors.safe_open(shard, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            tensors = mapped_by_torch(shard)
        model.load_state_dict(tensors, assign=True)
        before = answer(model, question)
        with pytest.raises(MirrorInUse):
            replica.sync()
        assert replica.version == 0
        assert torch.equal(answer(model, question), before)
    # new files beside the old ones leave such a model as it is
    with DiskMirror(tmp_path / "mirror", swap=True) as mirror:
        Replica(bucket, mirror).sync()
        assert torch.equal(answer(model, question), before)
        fresh = network(3)
        fresh.load_state_dict(copied_out(mirror))
    reference = network(4)
    reference.load_state_dict(states[-1])
    assert torch.equal(answer(fresh, question), answer(reference, question))


def mapped_by_torch(shard: Path) -> dict[str, Any]:
    import json

    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    whole = torch.from_file(str(shard), shared=True, size=len(data), dtype=torch.uint8)
    return {
        name: whole[8 + size + entry["data_offsets"][0] : 8 + size + entry["data_offsets"][1]]
        .view(torch.bfloat16)
        .reshape(entry["shape"])
        for name, entry in json.loads(data[8 : 8 + size]).items()
        if name != "__metadata__"
    }


def test_without_the_refusal_an_aliasing_model_would_change(
    run: tuple[MemoryBucket, list[dict[str, Any]]],
    question: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shows that the tests above would see it."""
    bucket, _ = run
    with Replica(bucket, tmp_path / "mirror") as replica:
        replica.sync(0)
        model = network(2)
        model.load_state_dict(mapped_by_torch(tmp_path / "mirror/model.safetensors"), assign=True)
        before = answer(model, question)
        monkeypatch.setattr("thinwire.disk.mapped_elsewhere", lambda _: [])
        replica.sync()
        assert not torch.equal(answer(model, question), before)
