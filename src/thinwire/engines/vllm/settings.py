"""Settings from the environment, read where they are used."""

from __future__ import annotations

import math
import os

from thinwire.errors import Misuse

__all__ = ["positive_seconds"]


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
