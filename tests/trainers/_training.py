"""A tiny model in a real Trainer, its weights at every step, and what a replica makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from thinwire import MemoryMirror, Replica
from thinwire.bucket import Bucket, open_bucket

Bits = dict[str, "np.ndarray[Any, Any]"]


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def examples(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def served_bits(model: torch.nn.Module) -> Bits:
    """What torch makes of the model's weights in bf16, without the names of tied copies."""
    return {
        name: parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().ravel().copy()
        for name, parameter in model.named_parameters()
    }


class Recorder(TrainerCallback):
    """Keeps the weights of every step, and every log record that it is shown."""

    def __init__(self) -> None:
        self.steps: dict[int, Bits] = {}
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[state.global_step] = served_bits(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[state.global_step] = served_bits(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


def make_trainer(
    folder: Path, *callbacks: TrainerCallback, model: Any = None, **settings: Any
) -> Trainer:
    settings.setdefault("save_strategy", "no")
    settings.setdefault("logging_steps", 1)
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        **settings,
    )
    return Trainer(
        model or tiny_model(),
        args,
        train_dataset=examples(),
        eval_dataset=examples(4),
        callbacks=[*callbacks],
    )


def history(bucket: Bucket | Path) -> tuple[list[int | None], list[Bits]]:
    """The trainer's step and the weights of every version, as a replica finds them."""
    steps: list[int | None] = []
    states: list[Bits] = []
    replica = Replica(open_bucket(bucket), MemoryMirror())
    for update in replica.catch_up():
        steps.append(update.commit.step)
        states.append(
            {
                spec.name: bits.copy().view(np.int16)
                for spec, bits in zip(replica.schema, replica.mirror.tensors)
            }
        )
    return steps, states


def require_same(found: Bits, expected: Bits) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []
