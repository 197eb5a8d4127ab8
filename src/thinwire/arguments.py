"""What callers of a publisher may pass, checked before it can spoil a record."""

from __future__ import annotations

import operator
import os

from thinwire.errors import Misuse

__all__ = ["checked_base", "checked_step", "one_of"]


def one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise Misuse unless ``value`` is allowed."""
    if value not in allowed:
        raise Misuse(f"{what}={value!r}", hint=f"one of {', '.join(map(repr, allowed))}")


def checked_base(base: str | os.PathLike[str]) -> str:
    """The name of a base as a record can hold it, else Misuse."""
    name = os.fspath(base)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Misuse(f"base={name!r} is not valid Unicode", hint="give it a plain name") from None
    return name


def checked_step(step: object) -> int | None:
    """The step as the integer a commit can hold, else Misuse: no reader would take another."""
    if step is None:
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(step, bool) or abs(number) >= 1 << 63:
        raise Misuse(f"step={step!r} is not a 64-bit integer", hint="count optimizer steps")
    return number
