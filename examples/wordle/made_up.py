"""Made-up games that a model learns the tool call from, and as little as possible of playing.

A guess is any five letters, or any word, or a word that agrees with what the game has answered.
The game answers as TextArena does: letters that are no word are refused, and end it if they come
twice in a row.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

from wordle.player import answer_text, refusal_text
from wordle.rules import mark
from wordle.words import answers, guesses

__all__ = ["CLOSING", "PROMPT", "games"]

PROMPT = "Guess the 5-letter word."
CLOSING = "done"
_GUESSES = 6
_ANY_WORD = 0.5  # of the guesses that are words


def games(
    words: Sequence[str], nonsense: float, drawn: random.Random
) -> Iterator[list[dict[str, Any]]]:
    """Conversations of whole games, without end.

    Args:
        words: that are guessed; one of them is the secret one.
        nonsense: share of guesses that are just letters, 0 to 1.
        drawn: decides everything.
    """
    known = frozenset((*answers(), *guesses()))  # letters may be one of them by chance
    while True:
        secret = drawn.choice(words)
        told: list[tuple[str, str]] = []
        refused = 0
        messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
        while len(told) < _GUESSES and refused < 2 and not (told and told[-1][0] == secret):
            word = _guess(words, told, nonsense, drawn)
            left = _GUESSES - len(told)
            if word in known:
                refused = 0
                told.append((word, mark(word, secret)))
                answer = answer_text(word, told[-1][1], won=word == secret, left=left - 1)
            else:
                refused += 1
                reason = f"'{word}' is not an English word."
                answer = refusal_text(reason, over=refused == 2, left=left)
            messages += _turn(word, answer)
        messages.append({"role": "assistant", "content": CLOSING})
        yield messages


def _guess(
    words: Sequence[str], told: Sequence[tuple[str, str]], nonsense: float, drawn: random.Random
) -> str:
    if drawn.random() < nonsense:
        return "".join(drawn.choices(string.ascii_lowercase, k=5))
    guessed = {word for word, _ in told}
    left = [word for word in words if word not in guessed]
    if drawn.random() < _ANY_WORD:
        return drawn.choice(left)
    agreeing = [w for w in left if all(mark(word, w) == marks for word, marks in told)]
    return drawn.choice(agreeing or left)


def _turn(word: str, answer: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "guess", "arguments": {"word": word}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "guess", "content": answer},
    ]
