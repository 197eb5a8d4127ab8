"""Settings from the environment, read where they are used."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from thinwire.errors import Misuse

__all__ = ["one_of", "positive_seconds"]


def positive_seconds(name: str, default: float) -> float:
    """Seconds from an environment variable.

    Raises:
        Misuse: it is set to something else than a positive number.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise Misuse(f"{name}={text!r} is not a positive number of seconds")
    return seconds


def one_of(name: str, words: Sequence[str]) -> str:
    """A word from an environment variable; the first one if it is not set.

    Raises:
        Misuse: it is set to something else.
    """
    text = os.environ.get(name, "").strip() or words[0]
    if text not in words:
        raise Misuse(f"{name}={text!r} is none of {', '.join(words)}")
    return text
