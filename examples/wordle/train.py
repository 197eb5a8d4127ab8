"""The trainer: TRL's asynchronous GRPO, whose weights leave through the bucket and nowhere else.

    python -m wordle.train settings.json

What thinwire has to do with it: a ``DeltaWeightTransfer``, which it publishes through,
``spread_rollouts``, which asks several servers for games, ``use_cpu``, and the ``fingerprint`` that
the end is proved with.
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

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from thinwire.demo.proof import fingerprint
from thinwire.trainers.trl import DeltaWeightTransfer
from thinwire.trainers.trl_cpu import use_cpu
from thinwire.trainers.trl_rollouts import spread_rollouts
from wordle.made_up import PROMPT
from wordle.player import WordlePlayer
from wordle.recipe import TOP_P
from wordle.run_checkpoints import steps_done, whole_checkpoint
from wordle.settings import Settings

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
        # vLLM returns logprobs of the whole distribution, and TRL computes them so: their ratio is
        # unbiased. The tail, 0.28 % of a token's mass on average, is not explored, which keeps
        # malformed tool calls out.
        top_p=TOP_P,
        max_staleness=t.max_staleness,
        max_inflight_tasks=t.inflight,
        queue_maxsize=t.batch,  # what waits longer only gets older
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
    """Train, from the last whole checkpoint on if there is one."""
    settings = Settings.load(Path(sys.argv[1]))
    transfer = DeltaWeightTransfer(settings.bucket)  # the replicas follow by themselves
    told = Told(settings.events)
    last = whole_checkpoint(Path(settings.output))
    done = 0 if last is None else steps_done(last) or 0
    told.tell("begin", step=done)
    if last is not None and done >= settings.training.steps:
        model = _published(last, transfer)
    else:
        model = _trained(settings, transfer, told, last)
    told.tell("end", version=transfer.versions[-1], **asdict(fingerprint(model)))


def _trained(
    settings: Settings, transfer: DeltaWeightTransfer, told: Told, last: Path | None
) -> torch.nn.Module:
    trainer = make_trainer(settings, transfer, environment_factory=WordlePlayer, callbacks=[told])
    transfer.attach(trainer)
    spread_rollouts(trainer, transfer, settings.servers)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    model: torch.nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    return model


def _published(last: Path, transfer: DeltaWeightTransfer) -> torch.nn.Module:
    """Of a training that was killed after its last step: transformers would train one more."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    try:
        transfer.send_weights((name, p.detach()) for name, p in model.named_parameters())
    finally:
        transfer.destroy()
    return model


if __name__ == "__main__":
    main()
