"""TRL's own rollout worker over several servers; one of them dies and comes back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytestmark = pytest.mark.trl

from transformers import TrainerCallback  # noqa: E402

from thinwire.errors import Misuse  # noqa: E402
from thinwire.trainers.trl import DeltaWeightTransfer  # noqa: E402
from thinwire.trainers.trl_rollouts import spread_rollouts  # noqa: E402
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
