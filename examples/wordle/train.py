"""The trainer: TRL's asynchronous GRPO, whose weights leave through the bucket and nowhere else.

    python train.py settings.json

Everything thinwire has to do with it is in :func:`main`: a ``DeltaWeightTransfer``, which it
publishes through, and ``spread_rollouts``, which asks several servers for games.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from thinwire.demo.proof import fingerprint
from thinwire.trainers.trl import DeltaWeightTransfer
from thinwire.trainers.trl_cpu import use_cpu
from thinwire.trainers.trl_rollouts import spread_rollouts
from wordle.player import WordlePlayer
from wordle.settings import Settings
from wordle.warmup import PROMPT

__all__ = ["Told", "make_trainer"]

_GUESSES = 6


def make_trainer(settings: Settings, transfer: Any, **others: Any) -> AsyncGRPOTrainer:
    """TRL's trainer as the settings want it; ``others`` are further arguments of its own."""
    use_cpu(threads=settings.threads)
    t = settings.training
    config = AsyncGRPOConfig(
        output_dir=settings.output,
        use_cpu=True,
        bf16=False,
        dtype="float32",
        seed=settings.seed,
        learning_rate=t.lr,
        max_steps=t.steps,
        per_device_train_batch_size=t.batch,
        num_generations=t.generations,
        token_budget=-1,  # by games, not by tokens
        max_completion_length=64,  # of one turn
        max_tool_calling_iterations=_GUESSES,
        top_p=0.98,
        max_staleness=t.max_staleness,
        max_inflight_tasks=t.inflight,
        vllm_server_base_url=settings.servers[0],
        gradient_checkpointing=False,
        save_strategy="steps",
        save_steps=t.save_every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    )
    first = settings.seed * 1_000_000
    games = [
        {"prompt": [{"role": "user", "content": PROMPT}], "seed": first + n}
        for n in range(t.steps * t.batch)
    ]
    return AsyncGRPOTrainer(
        model=settings.checkpoint,
        args=config,
        train_dataset=Dataset.from_list(games),
        weight_transfer=transfer,
        **others,
    )


class Told(TrainerCallback):  # type: ignore[misc]
    """Adds what the trainer logs to a file, one JSON object per line."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One line per step."""
        logs = {k: v for k, v in (kwargs.get("logs") or {}).items() if isinstance(v, (int, float))}
        self.tell("step", step=state.global_step, logs=logs)

    def tell(self, event: str, **what: Any) -> None:
        """Add a line."""
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **what}) + "\n")


def main() -> None:
    settings = Settings.load(Path(sys.argv[1]))
    transfer = DeltaWeightTransfer(settings.bucket)  # the replicas follow by themselves
    told = Told(settings.events)
    trainer = make_trainer(settings, transfer, environment_factory=WordlePlayer, callbacks=[told])
    transfer.attach(trainer)
    spread_rollouts(trainer, transfer, settings.servers)
    last = get_last_checkpoint(settings.output) if Path(settings.output).is_dir() else None
    told.tell("begin", step=trainer.state.global_step, resumed=last is not None)
    trainer.train(resume_from_checkpoint=last)
    model = trainer.accelerator.unwrap_model(trainer.model)
    told.tell("end", version=transfer.versions[-1], **asdict(fingerprint(model)))


if __name__ == "__main__":
    main()
