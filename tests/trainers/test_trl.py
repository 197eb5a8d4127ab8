"""TRL's own trainers, on a CPU: `pip install -r requirements/trainer.txt`, then `make test-trl`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("trl")
pytestmark = pytest.mark.trl

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol  # noqa: E402

from servers.ports import free_port  # noqa: E402
from thinwire import open_bucket  # noqa: E402
from thinwire.errors import BucketUnavailable, Misuse  # noqa: E402
from thinwire.testing import FaultyBucket  # noqa: E402
from thinwire.trainers.callback import PublishCallback  # noqa: E402
from thinwire.trainers.trl import DeltaWeightTransfer  # noqa: E402
from thinwire.trainers.trl_cpu import varlen_attention  # noqa: E402
from trainers._async_grpo import make_trainer, tiny_checkpoint  # noqa: E402
from trainers._server import ReplicaServer  # noqa: E402
from trainers._training import Recorder, history, require_same, served_bits  # noqa: E402

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_the_protocol_is_whole() -> None:
    methods = [name for name in vars(WeightTransferProtocol) if not name.startswith("_")]
    assert methods
    assert all(callable(getattr(DeltaWeightTransfer, name)) for name in methods)


def test_async_grpo_moves_servers_version_by_version(tmp_path: Path, checkpoint: Path) -> None:
    bucket = tmp_path / "bucket"
    recorder = Recorder()
    servers = [ReplicaServer(bucket, tmp_path / f"mirror-{n}") for n in range(2)]
    with servers[0], servers[1]:
        transfer = DeltaWeightTransfer(bucket, servers=[s.url for s in servers])
        trainer = make_trainer(tmp_path, checkpoint, transfer, recorder, max_steps=4)
        transfer.attach(trainer)
        trainer.train()
        assert [s.version for s in servers] == [4, 4]
        for server in servers:
            require_same(server.bits(), recorder.steps[4])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mirror-0")
        assert AutoTokenizer.from_pretrained(tmp_path / "mirror-0").eos_token == "<|end|>"
    assert loaded.dtype == torch.bfloat16
    require_same(served_bits(loaded), recorder.steps[4])
    assert transfer.versions == [0, 1, 2, 3, 4]
    assert trainer.rollout_worker.versions == [1, 2, 3, 4, 5]
    steps, states = history(bucket)
    assert steps == [0, 1, 2, 3, 4]
    for step, state in zip(range(5), states, strict=True):
        require_same(state, recorder.steps[step])
    assert any(
        not np.array_equal(states[0][name], states[-1][name]) for name in states[0]
    )  # it did train
    records = [log for log in trainer.state.log_history if "thinwire/version" in log]
    assert records[-1]["thinwire/version"] == 4
    assert all("perf/weight_sync_transfer_s" in log for log in records)


def test_async_grpo_without_servers_resumes(tmp_path: Path, checkpoint: Path) -> None:
    bucket = tmp_path / "bucket"
    saving = {"save_strategy": "steps", "save_steps": 1}
    first, second = Recorder(), Recorder()
    transfer = DeltaWeightTransfer(bucket)
    make_trainer(tmp_path, checkpoint, transfer, first, max_steps=2, **saving).train()
    transfer = DeltaWeightTransfer(bucket, resume="require", wait="copied")
    trainer = make_trainer(tmp_path, checkpoint, transfer, second, max_steps=3, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert transfer.versions == [4, 5, 6]  # version 3 takes the run over
    states = history(bucket)[1]
    require_same(states[4], first.steps[1])
    require_same(states[-1], second.steps[3])


def test_a_failed_upload_ends_the_training(tmp_path: Path, checkpoint: Path) -> None:
    faulty = FaultyBucket(open_bucket(tmp_path / "bucket"))
    for operation in ("create", "put"):
        faulty.fail(operation, "deltas/*", times=None, skip=1)
    transfer = DeltaWeightTransfer(faulty)
    trainer = make_trainer(tmp_path, checkpoint, transfer, max_steps=4)
    with pytest.raises(BucketUnavailable):
        trainer.train()
    assert len(history(tmp_path / "bucket")[0]) == 2


def test_rank_0_publishes(tmp_path: Path, checkpoint: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command += [str(TESTS / "trainers" / "_grpo_ddp.py"), str(tmp_path), str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    steps, states = history(tmp_path / "bucket")
    assert len(steps) == 4
    for rank in range(2):
        last = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        require_same(states[-1], {k: np.array(v, np.int16) for k, v in last.items()})


def test_sft(tmp_path: Path, checkpoint: Path) -> None:
    bucket = tmp_path / "bucket"
    recorder = Recorder()
    trainer = SFTTrainer(
        model=str(checkpoint),
        args=SFTConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_dict({"text": ["some words to learn"] * 16}),
        callbacks=[recorder],
    )
    PublishCallback(bucket).attach(trainer)
    trainer.train()
    steps, states = history(bucket)
    assert steps == [0, 1, 2, 3]
    for step, state in zip(range(4), states, strict=True):
        require_same(state, recorder.steps[step])
    records = [log for log in trainer.state.log_history if "thinwire/version" in log]
    assert records
    # TRL's own figures are not taken apart by thinwire's
    assert all("mean_token_accuracy" in log for log in trainer.state.log_history if "loss" in log)


# --- attention on the CPU -------------------------------------------------------------------


@pytest.mark.parametrize("window", [-1, 2])
def test_attention_is_what_each_query_may_see(window: int) -> None:
    torch.manual_seed(0)
    sizes, key_sizes = [3, 1, 4], [5, 1, 4]
    q = torch.randn(sum(sizes), 4, 8)
    k, v = (torch.randn(sum(key_sizes), 2, 8) for _ in range(2))
    starts, key_starts = (
        torch.tensor([0, *np.cumsum(s)], dtype=torch.int32) for s in (sizes, key_sizes)
    )
    out = varlen_attention(
        q, k, v, starts, key_starts, 4, 5, softmax_scale=0.3, window_size=(window, 0)
    )
    at = 0
    for size, keys, first in zip(sizes, key_sizes, key_starts.tolist()):
        for n in range(size):
            own = keys - size + n
            low = 0 if window < 0 else max(0, own - window)
            rows = slice(first + low, first + own + 1)
            for head in range(4):
                scores = (k[rows, head // 2] @ q[at, head]) * 0.3
                expected = scores.softmax(0) @ v[rows, head // 2]
                assert torch.allclose(out[at, head], expected, atol=1e-5)
            at += 1


def test_attention_refuses_what_it_does_not_do() -> None:
    x, starts = torch.zeros(1, 1, 8), torch.tensor([0, 1])
    with pytest.raises(Misuse, match="softcap"):
        varlen_attention(x, x, x, starts, starts, 1, 1, softcap=30.0)
