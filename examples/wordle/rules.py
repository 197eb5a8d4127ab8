"""How a guess is marked: what the environment does, for games that are made up without it."""

from __future__ import annotations

__all__ = ["mark"]


def mark(guess: str, secret: str) -> str:
    """``G``, ``Y`` or ``X`` per letter, with spaces between.

    A letter that the secret word has once is yellow once at most, and green goes before yellow.
    """
    left = [s for g, s in zip(guess, secret) if g != s]
    marks = []
    for g, s in zip(guess, secret):
        if g == s:
            marks.append("G")
        elif g in left:
            left.remove(g)
            marks.append("Y")
        else:
            marks.append("X")
    return " ".join(marks)
