"""What a Trainer trains arrives bit by bit, at the steps asked for; what fails is raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from thinwire import Publisher, Replica, open_bucket
from thinwire.errors import (
    BucketNotFound,
    BucketUnavailable,
    CommitUnresolved,
    Misuse,
    RunExists,
    RunNotFound,
)
from thinwire.testing import FaultyBucket
from thinwire.trainers.callback import PublishCallback
from trainers._training import (
    Recorder,
    history,
    make_trainer,
    require_same,
    tiny_model,
)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def test_every_step_arrives_bit_by_bit(tmp_path: Path, bucket: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder, max_steps=5)
    callback = PublishCallback(bucket).attach(trainer)
    trainer.train()
    steps, states = history(bucket)
    assert steps == [0, 1, 2, 3, 4, 5]
    for step, state in zip(range(6), states, strict=True):
        require_same(state, recorder.steps[step])
    assert callback.publisher is None


def test_the_mirror_is_a_loadable_checkpoint(tmp_path: Path, bucket: Path) -> None:
    model = tiny_model()
    model.config.dtype = torch.float32  # as after loading a checkpoint to train it
    model.config.use_cache = False
    trainer = make_trainer(tmp_path, PublishCallback(bucket), model=model, max_steps=2)
    trainer.train()
    assert (trainer.model.config.dtype, model.config.use_cache) == (torch.float32, False)
    with Replica(open_bucket(bucket), tmp_path / "mirror") as replica:
        replica.sync()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mirror")
    assert loaded.dtype == loaded.config.dtype == torch.bfloat16
    assert loaded.config.use_cache
    assert trainer.model.dtype == torch.float32
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16)), name


def test_assets_of_ones_own(tmp_path: Path, bucket: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text('{"mine": 1}')
    make_trainer(tmp_path, PublishCallback(bucket, assets=own), max_steps=1).train()
    with Replica(open_bucket(bucket), tmp_path / "mirror") as replica:
        replica.sync()
    assert (tmp_path / "mirror" / "config.json").read_text() == '{"mine": 1}'


@pytest.mark.parametrize("accumulated", [1, 3])
def test_every_counts_optimizer_steps_and_the_last_state_is_published(
    tmp_path: Path, bucket: Path, accumulated: int
) -> None:
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path,
        recorder,
        PublishCallback(bucket, every=2),
        max_steps=5,
        gradient_accumulation_steps=accumulated,
    )
    trainer.train()
    steps, states = history(bucket)
    assert steps == [0, 2, 4, 5]
    for step, state in zip(steps, states):
        require_same(state, recorder.steps[step or 0])


def test_a_resumed_run_is_a_diff_against_the_last_commit(tmp_path: Path, bucket: Path) -> None:
    first, second = Recorder(), Recorder()
    saving = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, first, PublishCallback(bucket), max_steps=4, **saving).train()
    again = make_trainer(
        tmp_path,
        second,
        PublishCallback(bucket, resume="require"),
        model=tiny_model(seed=9),
        max_steps=5,
        **saving,
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    steps, states = history(bucket)
    # None: the empty version that takes the run over
    assert steps == [0, 1, 2, 3, 4, None, 2, 3, 4, 5]
    require_same(states[6], first.steps[2])
    for step, state in zip([2, 3, 4, 5], states[6:], strict=True):
        require_same(state, second.steps[step])


def test_training_again_goes_on_in_the_run(tmp_path: Path, bucket: Path) -> None:
    trainer = make_trainer(tmp_path, PublishCallback(bucket, resume="new"), max_steps=1)
    trainer.train()
    trainer.train()
    steps, _ = history(bucket)
    assert steps == [0, 1, None, 0, 1]


def test_resume_insists(tmp_path: Path, bucket: Path) -> None:
    with pytest.raises((BucketNotFound, RunNotFound)):
        make_trainer(tmp_path, PublishCallback(bucket, resume="require"), max_steps=1).train()
    Publisher(open_bucket(bucket), tiny_model(), dtype="bf16").close()
    with pytest.raises(RunExists):
        make_trainer(tmp_path, PublishCallback(bucket, resume="new"), max_steps=1).train()


def test_the_best_model_is_what_is_published_last(tmp_path: Path, bucket: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        PublishCallback(bucket),
        max_steps=4,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=1,
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="step",
        greater_is_better=False,
    )
    evaluate = trainer.evaluate

    def evaluated(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {**evaluate(*args, **kwargs), "eval_step": float(trainer.state.global_step)}

    trainer.evaluate = evaluated
    trainer.train()
    steps, states = history(bucket)
    assert steps == [0, 1, 2, 3, 4, 4]
    require_same(states[5], states[1])


# --- the log ------------------------------------------------------------------------------


def test_figures_are_in_the_trainers_records(tmp_path: Path, bucket: Path) -> None:
    reporter = Recorder()  # like any reporter, there before the callback
    trainer = make_trainer(tmp_path, reporter, max_steps=4, logging_steps=2)
    PublishCallback(bucket).attach(trainer)
    trainer.train()
    recorded = [log for log in reporter.logs if "thinwire/version" in log]
    assert recorded[-1]["thinwire/version"] == 4
    assert any("loss" in log for log in recorded)
    for log in recorded:
        assert 0 < log["thinwire/changed_share"] <= 1
        count, mean = log["thinwire/publishes"], log["thinwire/payload_bytes"]
        assert log["thinwire/payload_bytes_total"] == pytest.approx(count * mean)
        assert log["thinwire/payload_bytes_max"] >= mean > 0
        assert all(log[f"thinwire/{k}_s"] >= 0 for k in ("diff", "encode", "upload", "commit"))
    # nothing of the trainer's own is lost
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [2, 4]


def test_figures_without_attaching_are_in_the_history(tmp_path: Path, bucket: Path) -> None:
    trainer = make_trainer(tmp_path, PublishCallback(bucket), max_steps=3)
    trainer.train()
    versions = [
        log["thinwire/version"] for log in trainer.state.log_history if "thinwire/version" in log
    ]
    assert versions == sorted(versions)
    assert versions[-1] == 3


# --- what goes wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("skip", [0, 2], ids=["first", "last"])
def test_a_failed_upload_is_raised(tmp_path: Path, bucket: Path, skip: int) -> None:
    faulty = FaultyBucket(open_bucket(bucket))
    for operation in ("create", "put"):
        faulty.fail(operation, "deltas/*", times=None, skip=skip)
    callback = PublishCallback(faulty)
    with pytest.raises(BucketUnavailable):
        make_trainer(tmp_path, callback, max_steps=3).train()
    callback.close()
    assert history(bucket)[0] == list(range(skip + 1))


@pytest.mark.parametrize("skip", [1, 3], ids=["first", "last"])
def test_a_commit_that_stays_unknown_is_raised(tmp_path: Path, bucket: Path, skip: int) -> None:
    faulty = FaultyBucket(open_bucket(bucket)).fail("create", "commits/*", times=None, skip=skip)
    callback = PublishCallback(faulty)
    with pytest.raises(CommitUnresolved):
        make_trainer(tmp_path, callback, max_steps=3).train()
    assert history(bucket)[0] == list(range(skip))


@pytest.mark.parametrize("arrived", [True, False])
def test_training_goes_on_while_a_commits_outcome_is_open(
    tmp_path: Path, bucket: Path, arrived: bool
) -> None:
    """It cannot be learned for a while; the next publish settles it."""
    faulty = FaultyBucket(open_bucket(bucket))
    faulty.fail("create", "commits/*2.json", after=arrived)
    faulty.fail("create", "commits/*2.json", times=3)  # a publish asks four times
    for operation in ("get", "stream", "head"):
        faulty.fail(operation, "commits/*2.json", times=4)
    make_trainer(tmp_path, PublishCallback(faulty), max_steps=4).train()
    creates = [call for call in faulty.calls if call == ("create", "commits/0000000002.json")]
    assert len(creates) == 5
    steps, _ = history(bucket)
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("every", [0, -1, True])
def test_every_is_checked(bucket: Path, every: int) -> None:
    with pytest.raises(Misuse, match="every="):
        PublishCallback(bucket, every=every)


def test_a_busy_publisher_is_skipped_but_not_at_the_end(tmp_path: Path, bucket: Path) -> None:
    slow = FaultyBucket(open_bucket(bucket)).delay(2.5, "create", "deltas/*")
    slow.delay(2.5, "put", "deltas/*")
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder, PublishCallback(slow, busy="skip"), max_steps=6)
    trainer.train()
    steps, states = history(bucket)
    assert steps[0] == 0
    assert steps[-1] == 6
    assert len(steps) < 7
    require_same(states[-1], recorder.steps[6])
