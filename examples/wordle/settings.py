"""What the coordinator tells a trainer, which is another interpreter: a file of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from wordle.recipe import Training

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What a trainer is told.

    Attributes:
        checkpoint: folder of the warmed-up model.
        bucket: URL of the run.
        servers: URLs of the vLLM servers that games are played on.
        output: folder for the trainer's checkpoints; it goes on from the last whole one.
        events: file that a line of JSON is added to after every step, and at the end.
        training: how it learns.
        threads: for torch.
        seed: of the trainer and, with the recipe, of the games' secret words.
    """

    checkpoint: str
    bucket: str
    servers: tuple[str, ...]
    output: str
    events: str
    training: Training
    threads: int = 1
    seed: int = 0

    @classmethod
    def load(cls, path: Path) -> Settings:
        """What :meth:`save` wrote."""
        found = json.loads(path.read_text())
        training = Training(**found["training"])
        return cls(**{**found, "training": training, "servers": tuple(found["servers"])})

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
