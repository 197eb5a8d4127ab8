"""TRL's asynchronous GRPO on a tiny model, with rollouts that need no server."""

from __future__ import annotations

import os
import queue
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from thinwire.trainers.trl_cpu import use_cpu


def tiny_checkpoint(folder: Path) -> Path:
    """A Qwen3 with random weights and a byte-level tokenizer."""
    bytes_of = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*bytes_of, "<|end|>", "<|pad|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    # one that TRL knows how to parse
    templates = Path(trl.__file__).parent / "chat_templates"
    fast.chat_template = (templates / "qwen3.jinja").read_text()
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM on a CPU takes no less
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


class Rollouts:
    """TRL's ``RolloutWorkerProtocol``: made-up samples of the version that is live."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.versions: list[int] = []
        self.random = random.Random(0)

    def start(self) -> None:
        self._produce()

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the trainer has used up the rollouts there are")

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)
        self._produce()

    def _produce(self) -> None:
        version = self.versions[-1] if self.versions else 0
        for n in range(64):
            size = self.random.randint(6, 12)
            ids = [1, 2, 3] + [self.random.randrange(256) for _ in range(size)]
            mask = np.array([0] * 3 + [1] * size)
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(ids),
                    completion_mask=mask,
                    old_log_probs=np.where(mask, -5.5, 0.0).astype(np.float32),
                    advantage=1.0 if n % 2 else -1.0,
                    model_version=version,
                    group_id=version,
                    metrics={"reward": float(n % 2)},
                )
            )


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward: how many different letters there are."""
    return [float(len(set(messages[0]["content"]))) for messages in completions]


def make_trainer(
    folder: Path,
    checkpoint: Path,
    transfer: Any,
    *callbacks: Any,
    own_rollouts: bool = True,
    **settings: Any,
) -> AsyncGRPOTrainer:
    use_cpu(threads=1)
    config = AsyncGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        token_budget=128,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **settings},
    )
    return AsyncGRPOTrainer(
        model=str(checkpoint),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "go"}]] * 8}),
        reward_funcs=letters,
        rollout_worker=Rollouts() if own_rollouts else None,
        weight_transfer=transfer,
        callbacks=[*callbacks],
    )
