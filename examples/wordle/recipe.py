"""What the model is and how long it learns: one recipe to look at the parts, one to learn by."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256

__all__ = ["FULL", "QUICK", "TOP_P", "Model", "Recipe", "Training"]

TOP_P = 0.98
"""Games are sampled from this share of the likeliest tokens."""


@dataclass(frozen=True)
class Model:
    """A small Qwen3, and how it learns to play by the rules before it learns to play well.

    Attributes:
        hidden, layers: its width and depth; heads have 32 dimensions, which vLLM needs on a CPU.
        vocabulary: entries of its tokenizer at most.
        words: how many of Wordle's answers the games are played with.
        nonsense: share of the warm-up's guesses that are no words, for training to unlearn.
        games, lr: games per step and AdamW's learning rate.
        least_steps, most_steps: of the warm-up. It ends, from the least on, when every game that
            the model plays is made of valid tool calls.
        seed: of everything random in it.
    """

    hidden: int
    layers: int
    vocabulary: int
    words: int
    nonsense: float
    games: int
    lr: float
    least_steps: int
    most_steps: int
    seed: int = 0

    @property
    def key(self) -> str:
        """A name that no other model has."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Training:
    """TRL's asynchronous GRPO on it.

    Attributes:
        steps: optimizer steps.
        lr: AdamW's.
        generations: games of the same secret word.
        batch: games per optimizer step.
        max_staleness: versions by which the weights that played a game may be behind.
        inflight: games under way at once, over all servers.
        save_every: steps between checkpoints that a killed trainer goes on from.
    """

    steps: int
    lr: float
    generations: int = 8
    batch: int = 32
    max_staleness: int = 4
    inflight: int = 32
    save_every: int = 4


@dataclass(frozen=True)
class Recipe:
    """A whole run."""

    name: str
    model: Model
    training: Training


_MODEL = Model(
    hidden=128, layers=2, vocabulary=1000, words=64, nonsense=0.4, games=8, lr=3e-3,
    least_steps=200, most_steps=600,
)  # fmt: skip

QUICK = Recipe("quick", _MODEL, Training(steps=10, lr=1e-6, batch=16, inflight=16))
FULL = Recipe("full", _MODEL, Training(steps=150, lr=3e-5))
