"""A line of JSON for every finished game, from as many processes as write to the file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Episode", "append"]


@dataclass(frozen=True)
class Episode:
    """A game from its start until its reward was asked for.

    Attributes:
        seed: of the secret word.
        guesses: the valid ones.
        feedback: what each was told, ``G X Y X X``.
        won: the last one was the secret word.
        invalid: how many guesses were refused.
        reward: between 0 and 1.
    """

    seed: int
    guesses: list[str]
    feedback: list[str]
    won: bool
    invalid: int
    reward: float


def append(path: Path, episode: Episode) -> None:
    """Add the episode's line to the file, which is made if need be."""
    line = (json.dumps(asdict(episode)) + "\n").encode()
    # One write to a file opened for appending: lines of several processes do not mix.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, line)
    finally:
        os.close(file)
