"""Rollouts recorded and replayed, and the verdict on both ways: `make test-wordle`.

The whole of it, with vLLM: `make wordle-control`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl")
pytest.importorskip("openenv")
pytestmark = pytest.mark.trl

from safetensors.torch import load_file  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402

from thinwire.demo.proof import folder_sha256  # noqa: E402
from thinwire.trainers.trl import DeltaWeightTransfer  # noqa: E402
from trainers._async_grpo import Rollouts, make_trainer, tiny_checkpoint  # noqa: E402
from trainers._server import ReplicaServer  # noqa: E402
from wordle import control_docs, full_sync  # noqa: E402
from wordle.control_train import Observed, masters_sha256  # noqa: E402
from wordle.control_verdict import Way, judge  # noqa: E402
from wordle.rollout_record import BadRecord, Replay, Taken, read_record, record  # noqa: E402

STEPS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class Files:
    """TRL's ``WeightTransferProtocol``: the checkpoint of every version, and nobody loads it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        full_sync.write_weights(self.folder / str(self.count), iterator)
        self.count += 1


class Sums(TrainerCallback):
    """The masters' sum after every step."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(masters_sha256(kwargs["model"]))


def train(folder: Path, checkpoint: Path, transfer: Any, worker: Any, path: Path | None) -> Any:
    """Train; the trainer, and the masters' sums."""
    sums = Sums()
    trainer = make_trainer(
        folder, checkpoint, transfer, sums, max_steps=STEPS, max_staleness=1, seed=3
    )
    trainer.rollout_worker = worker
    trainer.rollout_queue = worker.rollout_buffer
    if path is None:
        trainer.train()
    else:
        with record(trainer, path):
            trainer.train()
    return trainer, sums.found


class StaleNow(Rollouts):
    """Every ninth sample is too old."""

    def _produce(self) -> None:
        super()._produce()
        for n, sample in enumerate(list(self.rollout_buffer.queue)):
            if n % 9 == 0:
                sample.model_version = -7


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> tuple[Path, list[str], float]:
    """A record, and the sums and dropped samples of the training that it was made in."""
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "rollouts.jsonl"
    trainer, sums = train(folder, checkpoint, Files(folder / "files"), StaleNow(), path)
    return path, sums, dropped(trainer)


def dropped(trainer: Any) -> float:
    logs = trainer.state.log_history
    return sum(log.get("sample/dropped_stale_total", 0.0) for log in logs)


# --- a record and its replay ----------------------------------------------------------------


def sample(**other: Any) -> RolloutSample:
    fields: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "Guess ✓"}],
        "completion": [{"role": "assistant", "tool_calls": [{"function": {"name": "guess"}}]}],
        "input_ids": np.array([1, 2**53 + 1, 3], np.int64),
        "completion_mask": np.array([0, 1, 1], np.int8),
        "old_log_probs": np.array([0.0, -0.1, np.nan], np.float32),
        "advantage": 0.1 + 0.2,
        "model_version": 3,
        "group_id": 2,
        "metrics": {"reward": 1 / 3, "none": float("nan"), "much": float("inf")},
        "enqueued_at": 1e9 + 1 / 3,
    }
    return RolloutSample(**{**fields, **other})


def same(one: Any, other: Any) -> bool:
    """Equal in value, kind and bits."""
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return type(one) is type(other) and one == other


def test_a_line_is_the_sample_it_was_made_of() -> None:
    odd = np.array([0x7FC12345, 0xFF800001, 0x80000000], np.uint32).view(np.float32)
    for one in (sample(), sample(old_log_probs=odd, enqueued_at=None, prompt=[])):
        again = Taken.from_line(Taken(one, 5).to_line())
        assert again.version == 5
        for field in dataclasses.fields(RolloutSample):
            assert same(getattr(one, field.name), getattr(again.sample, field.name)), field.name


@pytest.mark.parametrize(
    "other",
    [{"advantage": object()}, {"input_ids": np.array([[1]])}, {"input_ids": np.array([None])}],
)
def test_what_has_no_place_in_a_record_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Taken(sample(**other), 0).to_line()


def test_a_replay_is_the_recording(tmp_path: Path) -> None:
    samples = [sample(model_version=n, group_id=n) for n in range(5)]
    source: queue.Queue[Any] = queue.Queue()
    trainer = SimpleNamespace(rollout_queue=source, model_version=4)
    for one in samples:
        source.put(copy.deepcopy(one))
    with record(trainer, tmp_path / "record"):
        assert trainer.rollout_queue.qsize() == 5
        got = [trainer.rollout_queue.get(timeout=1) for _ in samples]
        with pytest.raises(queue.Empty):
            trainer.rollout_queue.get(timeout=0.01)
    replay = Replay(tmp_path / "record")
    replay.update_model_version(4)
    replay.start()
    for one in got:
        again = replay.rollout_buffer.get(timeout=1)
        assert all(
            same(getattr(one, field.name), getattr(again, field.name))
            for field in dataclasses.fields(RolloutSample)
        )
    assert (replay.qsize(), replay.elsewhere) == (0, 0)
    with pytest.raises(queue.Empty):
        replay.get(timeout=1)
    with pytest.raises(BadRecord, match="more than the 5 samples"):
        replay.check_health(1.0)


def test_a_replayed_sample_is_as_stale_as_it_was(tmp_path: Path) -> None:
    source: queue.Queue[Any] = queue.Queue()
    source.put(sample(model_version=3))
    with record(SimpleNamespace(rollout_queue=source, model_version=5), tmp_path / "r"):
        pass
    assert read_record(tmp_path / "r") == []  # what nobody takes is not in it
    trainer = SimpleNamespace(rollout_queue=source, model_version=5)
    with record(trainer, tmp_path / "r"):
        trainer.rollout_queue.get()
    replay = Replay(tmp_path / "r")
    replay.update_model_version(11)
    assert replay.get().model_version == 11 - (5 - 3)
    assert replay.elsewhere == 1


def test_a_broken_off_recording_is_refused(tmp_path: Path) -> None:
    source: queue.Queue[Any] = queue.Queue()
    source.put(sample())
    trainer = SimpleNamespace(rollout_queue=source, model_version=0)
    with pytest.raises(queue.Empty), record(trainer, tmp_path / "r"):  # noqa: PT012
        trainer.rollout_queue.get()
        trainer.rollout_queue.get(block=False)
    with pytest.raises(BadRecord, match="not whole"):
        Replay(tmp_path / "r")


def test_a_spoiled_record_is_refused(tmp_path: Path, recorded: tuple[Path, Any, Any]) -> None:
    lines = recorded[0].read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    flipped = bytearray(lines[middle])
    flipped[len(flipped) // 2] ^= 1
    swapped = [*lines[:2], lines[3], lines[2], *lines[4:]]
    spoiled = {
        "a bit": [*lines[:middle], bytes(flipped), *lines[middle + 1 :]],
        "order": swapped,
        "a sample less": [*lines[:middle], *lines[middle + 1 :]],
        "the end": lines[:-1],
        "half a line": [*lines[:-1], lines[-1][:-20]],
        "the head": lines[1:],
        "another format": [lines[0].replace(b": 1", b": 2"), *lines[1:]],
        "nothing": [],
    }
    for what, broken in spoiled.items():
        path = tmp_path / "spoiled"
        path.write_bytes(b"".join(broken))
        with pytest.raises(BadRecord):
            pytest.fail(f"taken in spite of: {what}, {Replay(path).qsize()}")


# --- two trainings on one record ------------------------------------------------------------


def test_replays_train_bit_identically(
    tmp_path: Path, checkpoint: Path, recorded: tuple[Path, list[str], float]
) -> None:
    path, sums, stale = recorded
    assert stale > 0
    assert len(set(sums)) == STEPS  # it does train
    replay = Replay(path)
    trainer, again = train(tmp_path / "a", checkpoint, Files(tmp_path / "files"), replay, None)
    assert again == sums
    assert dropped(trainer) == stale
    assert (replay.qsize(), replay.elsewhere) == (0, 0)

    looks: list[float] = []
    bucket = tmp_path / "bucket"
    with ReplicaServer(bucket, tmp_path / "mirror") as server:
        transfer = DeltaWeightTransfer(bucket, servers=[server.url])
        observed = Observed(transfer, looks.append)
        _, with_deltas = train(tmp_path / "b", checkpoint, observed, Replay(path), None)
        assert server.version == STEPS
    assert with_deltas == sums
    assert len(looks) == STEPS + 1
    assert folder_sha256(tmp_path / "mirror") == folder_sha256(tmp_path / "files" / str(STEPS))


def test_another_order_trains_another_model(
    tmp_path: Path, checkpoint: Path, recorded: tuple[Path, list[str], float]
) -> None:
    replay = Replay(recorded[0])
    replay._all[1], replay._all[8] = replay._all[8], replay._all[1]  # of the first batch
    _, sums = train(tmp_path, checkpoint, Files(tmp_path / "files"), replay, None)
    assert sums != recorded[1]


def test_whole_checkpoints_are_rounded_as_deltas_are(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000001])
    ties = ties.to(torch.int32).view(torch.float32)
    size = full_sync.write_weights(tmp_path / "w", iter([("a", ties)]))
    found = load_file(tmp_path / "w" / "model.safetensors")["a"]
    bits = found.view(torch.int16).numpy().view("<u2").tolist()
    assert bits == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x8000]
    assert size == (tmp_path / "w" / "model.safetensors").stat().st_size


# --- the verdict ----------------------------------------------------------------------------


def events(cost: float, **end: Any) -> list[dict[str, Any]]:
    syncs = [
        {
            "event": "sync",
            "wait_s": cost,
            "bytes": None if k == 0 else int(1000 * cost),
            "changed": 5,
            "held_s": [None, None] if k == 0 else [cost, cost],
            "load_s": [cost / 2, cost / 2],
            "masters": f"masters {k}",
            "checksums": [{"a": f"{k}", "b": "same"}] * 2,
        }
        for k in range(STEPS + 1)
    ]
    return [*syncs, {"event": "end", "masters": "masters 4", "left": 0, "elsewhere": 0, **end}]


def ways(**spoil: Any) -> dict[str, Way]:
    found = {"delta": events(0.1), "full": copy.deepcopy(events(20.0))}
    spoil.get("spoil", lambda found: None)(found)
    return {name: Way.told(of) for name, of in found.items()}


def test_the_verdict_on_two_like_trainings() -> None:
    verdict = judge(ways(), STEPS)
    assert verdict["identical"]
    assert verdict["differences"] == []
    assert verdict["costs"]["ratio"] == pytest.approx(
        {"bytes": 200, "held_s": 200, "wait_s": 200, "load_s": 100}
    )
    assert verdict["costs"]["targets_met"] == {"held": True, "bytes": True}


SPOILS = {
    "another bit on one server": lambda f: f["full"][2]["checksums"].__setitem__(1, {"a": "2"}),
    "other weights on all servers of a way": lambda f: f["full"][3].update(
        checksums=[{"a": "?", "b": "same"}] * 2
    ),
    "no checksums": lambda f: [s.update(checksums=[{}, {}]) for w in f.values() for s in w[:1]],
    "one server": lambda f: [s.update(checksums=[{"a": "1"}]) for w in f.values() for s in w[:-1]],
    "other masters": lambda f: f["delta"][1].update(masters="?"),
    "other masters at the end": lambda f: f["delta"][-1].update(masters="?"),
    "a sync less in one": lambda f: f["full"].pop(-2),
    "a sync less in both": lambda f: [f["full"].pop(-2), f["delta"].pop(-2)],
    "no end": lambda f: f["delta"].pop(),
    "samples left": lambda f: f["full"][-1].update(left=1),
    "samples taken at another version": lambda f: f["full"][-1].update(elsewhere=1),
}


@pytest.mark.parametrize("what", SPOILS)
def test_the_verdict_on_unlike_trainings(what: str) -> None:
    verdict = judge(ways(spoil=SPOILS[what]), STEPS)
    assert not verdict["identical"]
    assert verdict["differences"]


def test_the_tables_go_into_a_page(tmp_path: Path) -> None:
    found = ways()
    document = {
        "verdict": judge(found, STEPS),
        "ways": {name: way.syncs for name, way in found.items()},
        "steps": STEPS,
        "lr": 1e-6,
        "samples": 7,
        "parameters": 1000,
        "machine": {"cores": 2, "architecture": "x86_64"},
    }
    page, told = tmp_path / "page.md", tmp_path / "control.json"
    told.write_text(json.dumps(document))
    page.write_text("before\n<!-- begin control -->\nold\n<!-- end control -->\nafter\n")
    control_docs.main([str(told), str(page)])
    made = page.read_text()
    assert made.startswith("before\n<!-- begin control -->\n2 trainings on the same 7 samples")
    assert "| bytes of a version | 100 | 20,000 | 200.0 |" in made
    assert "\nold\n" not in made
    assert made.count("| yes |") == STEPS
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="no place"):
        control_docs.main([str(told), str(page)])
