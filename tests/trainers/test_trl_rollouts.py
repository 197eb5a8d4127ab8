"""TRL's own rollout worker over several servers; one of them dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytestmark = pytest.mark.trl

import aiohttp  # noqa: E402
import numpy as np  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402

from servers.json_http import JsonServer  # noqa: E402
from servers.ports import free_port  # noqa: E402
from thinwire.errors import Misuse  # noqa: E402
from thinwire.trainers.trl import DeltaWeightTransfer  # noqa: E402
from thinwire.trainers.trl_rollouts import Servers, spread_rollouts  # noqa: E402
from trainers._async_grpo import make_trainer, tiny_checkpoint  # noqa: E402
from trainers._server import ReplicaServer  # noqa: E402

ASKED = ("POST", "/inference/v1/generate")


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, **steps: Any) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.get(f"step_{state.global_step}", lambda: None)()


@pytest.mark.timeout(150)
def test_rollouts_are_spread_and_survive_a_server(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    servers = [ReplicaServer(bucket, tmp_path / f"mirror-{n}") for n in range(2)]
    urls = [server.url for server in servers]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        transfer = DeltaWeightTransfer(bucket, servers=urls, patience=10)
        trainer = make_trainer(
            tmp_path,
            tiny_checkpoint(tmp_path / "checkpoint"),
            transfer,
            At(step_2=servers[1].stop, step_5=servers[1].start),
            own_rollouts=False,
            max_steps=8,
            num_generations=2,
            max_completion_length=4,
            max_inflight_tasks=4,
            queue_maxsize=8,
            max_staleness=50,
        )
        transfer.attach(trainer)
        spread_rollouts(trainer, transfer, urls)
        used: list[tuple[int, float]] = []
        get = trainer.rollout_queue.get

        def judged(*args: Any, **kwargs: Any) -> Any:
            sample = get(*args, **kwargs)
            used.append((sample.model_version, sample.metrics["thinwire/used_version"]))
            return sample

        trainer.rollout_queue.get = judged
        trainer.train()
        assert servers[0].version == 8
    assert used
    assert all(version == used_version + 1 for version, used_version in used)
    assert max(version for version, _ in used) > 2
    asked = [sum(request[:2] == ASKED for request in server.requests) for server in servers]
    assert min(asked) > 0


def test_a_worker_of_ones_own_is_not_spread(tmp_path: Path) -> None:
    transfer = DeltaWeightTransfer(tmp_path / "bucket")
    trainer = make_trainer(tmp_path, tiny_checkpoint(tmp_path / "checkpoint"), transfer)
    with pytest.raises(Misuse, match="Rollouts asks no servers"):
        spread_rollouts(trainer, transfer, ["http://127.0.0.1:1"])
    with pytest.raises(Misuse, match="names no server"):
        spread_rollouts(trainer, transfer, [])


@pytest.mark.parametrize(
    ("versions", "used", "behind"),
    [
        ([0, 1, 2, 3], 3, 0),
        ([0, 1, 2, 3], 1, 2),
        ([0, 2, 5], 3, 1),  # numbers that are no sync are not counted
        ([16, 17], 16, 1),
        ([16, 17], 4, 13),  # from before a restart
        ([16, 17], 15, 2),
    ],
)
def test_a_rollout_is_as_old_as_the_weights_it_used(
    tmp_path: Path, versions: list[int], used: int, behind: int
) -> None:
    transfer = DeltaWeightTransfer(tmp_path / "bucket")
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint")
    trainer = make_trainer(tmp_path, checkpoint, transfer, own_rollouts=False)
    spread_rollouts(trainer, transfer, ["http://127.0.0.1:1"])
    transfer.versions += versions
    trainer.model_version = 30
    sample = RolloutSample(
        prompt=[], completion=[], input_ids=np.array([1]), completion_mask=np.array([1]),
        old_log_probs=np.array([0.0]), advantage=0.0, model_version=30, group_id=0,
        metrics={"thinwire/used_version": float(used)},
    )  # fmt: skip
    trainer.rollout_worker.rollout_buffer.put(sample)
    assert trainer.rollout_queue.get(timeout=10).model_version == 30 - behind


def asked(status: int, answer: Any) -> tuple[dict[str, Any], list[int]]:
    """What is made of a server's answer."""
    port = free_port()
    server = JsonServer(port, lambda *request: (status, answer))

    async def ask() -> tuple[dict[str, Any], list[int]]:
        async with aiohttp.ClientSession() as session:
            return await Servers([f"http://127.0.0.1:{port}"]).ask(session, {}, 10.0)

    try:
        return asyncio.run(ask())
    finally:
        server.stop()


def spans(*versions: str | None) -> list[dict[str, Any]]:
    return [{"version": version, "start": n, "end": n + 1} for n, version in enumerate(versions)]


def test_versions_of_a_completion() -> None:
    choice = {"token_ids": [7, 8], "weight_versions": spans("3", "4")}
    assert asked(200, {"choices": [choice]}) == (choice, [3, 4])


@pytest.mark.parametrize("told", [None, []])
def test_a_completion_without_tokens_came_from_no_version(told: Any) -> None:
    choice = {"token_ids": [], "weight_versions": told}
    assert asked(200, {"choices": [choice]})[1] == []


@pytest.mark.parametrize("told", [None, [], spans("default"), spans("3", "default"), spans(None)])
def test_a_server_that_tells_no_versions(told: Any) -> None:
    with pytest.raises(Misuse, match=r"127\.0\.0\.1.* does not tell which version") as caught:
        asked(200, {"choices": [{"token_ids": [7], "weight_versions": told}]})
    assert "VLLM_PLUGINS=thinwire" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "hint"), [(404, "--enable-scale-out"), (401, "token="), (400, "")]
)
def test_a_server_that_takes_no_requests(status: int, hint: str) -> None:
    with pytest.raises(Misuse, match=f"{status} .*why not") as caught:
        asked(status, {"error": "why not"})
    assert hint in caught.value.hint
    assert bool(hint) == bool(caught.value.hint)
