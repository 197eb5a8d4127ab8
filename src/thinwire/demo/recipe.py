"""The constants of the two demo runs, found by measurement on two CPU cores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How much is sampled and how hard each optimizer step pushes.

    ``prompts_per_step`` is a multiple of the number of rollout servers, which share the prompts
    evenly. ``lr`` is AdamW's, and with it the share of bf16 weights that change per step.
    """

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    lr: float
    temperature: float = 1.0


FULL = Recipe(steps=32, prompts_per_step=12, samples_per_prompt=8, lr=2e-6)
QUICK = Recipe(steps=8, prompts_per_step=16, samples_per_prompt=8, lr=3e-6)
