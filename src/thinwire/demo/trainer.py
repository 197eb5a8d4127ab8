"""The trainer.

fp32 masters, AdamW, GRPO, and a publisher. It asks the rollout servers for completions over HTTP;
their weights come from the bucket, never from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from thinwire import Publisher, Receipt, open_bucket
from thinwire.demo.child import Channel
from thinwire.demo.client import RolloutClient
from thinwire.demo.events import Finished, Phase, Plan, Published, Stepped
from thinwire.demo.grpo import GrpoConfig, GrpoTrainer, bf16_is_faster, spread_masters
from thinwire.demo.models import smollm2_checkpoint, tiny_checkpoint
from thinwire.demo.proof import fingerprint
from thinwire.demo.rollouts import Batch, Prompt, RolloutPool, Sampling, to_batch
from thinwire.demo.settings import Settings
from thinwire.demo.tasks import LetterReversal, Task, WordSorting, best_constant

_CONSTANT_OVER = 256
"""Problems over which the best constant completion is sought: the search is quadratic in them."""


def train(channel: Channel) -> None:
    """Train for as many steps as the recipe has; then say what the masters are."""
    settings = Settings.from_json(channel.config["settings"])
    disable_progress_bar()
    torch.set_num_threads(settings.trainer_threads)
    torch.manual_seed(settings.seed)
    checkpoint = _checkpoint(channel, settings)
    channel.send(Phase("loads fp32 masters and spreads them inside their bf16 rounding cells"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    spread_masters(model, settings.seed)
    channel.send(Phase("publishes version 0: the whole checkpoint in bf16, with its tokenizer"))
    with Publisher(
        open_bucket(settings.bucket), model, dtype="bf16", assets=checkpoint, resume="new"
    ) as publisher:
        trainer = Trainer(channel, settings, model, tokenizer, publisher)
        trainer.announce()
        order = channel.receive()
        clients = {
            name: RolloutClient(url, channel.config["token"])
            for name, url in (order or {})["servers"].items()
        }
        trainer.run(clients)
        version = publisher.version
    channel.send(Phase("casts its masters once more, with torch, and hashes them"))
    channel.send(Finished(version, **asdict(fingerprint(model))))


def _checkpoint(channel: Channel, settings: Settings) -> Path:
    if settings.tiny:
        channel.send(Phase("makes a tiny model (a few seconds, then cached)"))
        return tiny_checkpoint()
    channel.send(
        Phase("converts SmolLM2-135M-Instruct from the installed package (once, then cached)")
    )
    return smollm2_checkpoint()


class Trainer:
    """The loop: collect completions, ask for the next, step, publish."""

    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        model: Any,
        tokenizer: Any,
        publisher: Publisher,
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._recipe = recipe = settings.recipe
        self._model = model
        self._publisher = publisher

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        self._task: Task = (
            LetterReversal() if settings.tiny else WordSorting(lambda text: len(encode(text)))
        )
        problems = self._task.problems(recipe.steps * recipe.prompts_per_step, settings.seed)
        self._prompts = [Prompt(problem, encode(problem.prompt)) for problem in problems]
        self._config = GrpoConfig(
            lr=recipe.lr,
            temperature=recipe.temperature,
            autocast=not settings.tiny and bf16_is_faster(),
        )
        self._receipts = ThreadPoolExecutor(1, thread_name_prefix="receipts")

    def announce(self) -> None:
        """Tell the coordinator what is coming."""
        recipe, schema = self._recipe, self._publisher.schema
        sample = [prompt.problem for prompt in self._prompts[:_CONSTANT_OVER]]
        constant, reward = best_constant(self._task, sample)
        self._channel.send(
            Plan(
                model="A tiny Llama" if self._settings.tiny else "SmolLM2-135M-Instruct",
                task="reverse four letters" if self._settings.tiny else "sort three words",
                parameters=schema.numel,
                tensors=len(schema),
                full_bytes=schema.nbytes,
                steps=recipe.steps,
                prompts_per_step=recipe.prompts_per_step,
                samples_per_prompt=recipe.samples_per_prompt,
                lr=recipe.lr,
                constant=constant,
                constant_reward=reward,
                autocast=self._config.autocast,
            )
        )

    def run(self, clients: dict[str, RolloutClient]) -> None:
        """Take all steps; returns when the last version is committed."""
        recipe, settings = self._recipe, self._settings
        sampling = Sampling(recipe.samples_per_prompt, self._task.max_tokens, recipe.temperature)
        pool = RolloutPool(clients, sampling, max_staleness=settings.max_staleness)
        grpo = GrpoTrainer(self._model, self._config)
        seeds = itertools.count(settings.seed * 1_000_003)
        pending: list[Any] = []
        prompts, seed = self._step_prompts(1), next(seeds)
        asked = pool.ask(prompts, seed, fresh=0)
        for step in range(1, recipe.steps + 1):
            began, dropped = perf_counter(), pool.dropped
            parts = pool.collect(asked, prompts, seed, current=step - 1)
            batch = to_batch(self._task, prompts, parts, recipe.samples_per_prompt)
            example = self._example(prompts, batch)
            if step < recipe.steps:
                prompts, seed = self._step_prompts(step + 1), next(seeds)
                asked = pool.ask(prompts, seed, fresh=step - 1)
            collected = perf_counter()
            stats = grpo.step(batch.groups)
            trained = perf_counter()
            receipt = self._publisher.publish(self._model, step=step)
            pending.append(self._receipts.submit(self._report, receipt))
            self._channel.send(
                Stepped(
                    step=step,
                    reward=stats.reward_mean,
                    loss=stats.loss,
                    grad_norm=stats.grad_norm,
                    ratio_mean=stats.ratio_mean,
                    clipped_share=stats.clipped_share,
                    groups_used=stats.groups_used,
                    tokens=stats.tokens,
                    used={str(version): n for version, n in sorted(batch.used.items())},
                    staleness=step - 1 - min(batch.used),
                    dropped=pool.dropped - dropped,
                    wait_s=collected - began,
                    train_s=trained - collected,
                    sample_s=batch.seconds,
                    example=example,
                )
            )
        for report in pending:
            report.result()

    def _step_prompts(self, step: int) -> list[Prompt]:
        count = self._recipe.prompts_per_step
        return self._prompts[(step - 1) * count : step * count]

    @staticmethod
    def _example(prompts: Sequence[Prompt], batch: Batch) -> dict[str, Any]:
        return {
            "prompt": prompts[0].problem.prompt,
            "answer": prompts[0].problem.answer,
            "completion": batch.text,
            "reward": batch.groups[0].rewards[0],
        }

    def _report(self, receipt: Receipt) -> None:
        """Wait for a publish to be committed and report it."""
        commit, stats = receipt.result(), receipt.stats()
        self._channel.send(
            Published(
                version=commit.version,
                step=commit.step or 0,
                changed=stats.changed,
                elements=stats.elements,
                tensors=stats.tensors,
                payload_bytes=stats.payload_bytes,
                commit_bytes=len(commit.encode()),
                full_bytes=stats.full_bytes,
                diff_s=stats.diff_s,
                encode_s=stats.encode_s,
                upload_s=stats.upload_s,
                commit_s=stats.commit_s,
                committed_at=commit.time_ms / 1e3,
            )
        )
