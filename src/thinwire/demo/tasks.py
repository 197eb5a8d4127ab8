"""Tasks with a computed reward that depends on the prompt, so that no fixed phrase earns much.

Each task says what its best constant completion would earn (:func:`best_constant`), which is the
number a rising reward has to be held against.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from string import ascii_lowercase
from typing import Any, Protocol

import reasoning_gym
from reasoning_gym.algorithmic.word_sorting import TextTransformation


@dataclass(frozen=True)
class Problem:
    """One prompt, the answer that earns 1, and whatever the task's scorer needs besides."""

    prompt: str
    answer: str
    entry: dict[str, Any] = field(default_factory=dict, repr=False)


class Task(Protocol):
    """A stream of problems and their reward."""

    @property
    def max_tokens(self) -> int:
        """Tokens enough for any answer and the end-of-sequence token."""

    def problems(self, count: int, seed: int) -> list[Problem]:
        """Return ``count`` problems; the same arguments give the same problems."""

    def reward(self, problem: Problem, completion: str) -> float:
        """Score a completion in [0, 1]; 1 for the answer, partial credit per item in its place."""

    def split(self, answer: str) -> list[str]:
        """Cut an answer into the items that earn credit by position."""

    def join(self, items: Sequence[str]) -> str:
        """The inverse of :meth:`split`."""


def best_constant(task: Task, problems: Sequence[Problem]) -> tuple[str, float]:
    """Return the single completion that earns most over ``problems``, and its mean reward.

    Credit is per position, so the best constant takes at each position the item that earns most
    there. The candidates are that one at every length, and, since a full answer or a permutation
    of it can earn a bonus, every problem's own answer.
    """
    if not problems:
        raise ValueError("need at least one problem")
    weights: list[dict[str, float]] = []
    for problem in problems:
        items = task.split(problem.answer)
        weights.extend(defaultdict(float) for _ in range(len(items) - len(weights)))
        for position, item in enumerate(items):
            weights[position][item] += 1 / len(items)
    modal = [max(sorted(at), key=at.__getitem__) for at in weights]
    candidates = [task.join(modal[:length]) for length in range(1, len(modal) + 1)]
    candidates += sorted({problem.answer for problem in problems})

    def mean(candidate: str) -> float:
        return sum(task.reward(problem, candidate) for problem in problems) / len(problems)

    best = max(candidates, key=mean)
    return best, mean(best)


class WordSorting:
    """Sort three words alphabetically: reasoning-gym's ``word_sorting``, scored by reasoning-gym.

    A word in its right place earns a third, the right words in any order at least 0.2, the sorted
    list 1. A prompt is one worked example and the question, in ChatML without a system message to
    keep sequences short.

    Args:
        count_tokens: length of a string in tokens. Problems whose prompt is longer than
            ``max_prompt_tokens``, or whose answer leaves no room in ``max_tokens`` for the
            end-of-sequence token, are left out.
    """

    max_prompt_tokens = 50
    max_tokens = 14

    def __init__(self, count_tokens: Callable[[str], int]) -> None:
        self._count_tokens = count_tokens
        self._scorer = _word_sorting(0)

    def problems(self, count: int, seed: int) -> list[Problem]:
        """Return ``count`` problems of three lower-case words; see :class:`Task`."""
        # The dataset seeds entry i with seed + i: only far-apart seeds give separate streams.
        entries: Iterable[dict[str, Any]] = _word_sorting(seed * 1_000_003)
        usable = (problem for problem in map(_word_problem, entries) if self._usable(problem))
        return list(islice(usable, count))

    def reward(self, problem: Problem, completion: str) -> float:
        """Score the completion with reasoning-gym's own scorer; see :class:`Task`."""
        return float(self._scorer.score_answer(completion.strip(), problem.entry))

    def split(self, answer: str) -> list[str]:
        """The words of an answer."""
        return answer.split(", ")

    def join(self, items: Sequence[str]) -> str:
        """Words, separated the way reasoning-gym expects them."""
        return ", ".join(items)

    def _usable(self, problem: Problem) -> bool:
        return (
            problem.entry["metadata"]["direction"] == "ascending"
            and all(word.isalpha() for word in self.split(problem.answer))
            and self._count_tokens(problem.prompt) <= self.max_prompt_tokens
            and self._count_tokens(problem.answer) < self.max_tokens
        )


def _word_sorting(seed: int) -> Any:
    return reasoning_gym.create_dataset(
        "word_sorting",
        size=1_000_000,
        seed=seed,
        min_words=3,
        max_words=3,
        min_word_length=3,
        max_word_length=6,
        transformation=TextTransformation.LOWERCASE,
    )


def _word_problem(entry: dict[str, Any]) -> Problem:
    words = ", ".join(entry["metadata"]["transformed_words"])
    example = _turn("Sort A to Z: pear, fig, apple") + "apple, fig, pear<|im_end|>\n"
    return Problem(example + _turn(f"Sort A to Z: {words}"), entry["answer"], entry)


def _turn(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


class LetterReversal:
    """Reverse four letters, ``abcd>`` to ``dcba``: within reach of a tiny byte-level model.

    The reward is the number of letters in their right place over the length of the answer or of the
    completion, whichever is longer.
    """

    max_tokens = 6
    _letters = 4

    def problems(self, count: int, seed: int) -> list[Problem]:
        """Return ``count`` problems of distinct letters; see :class:`Task`."""
        rng = random.Random(seed)
        words = ("".join(rng.sample(ascii_lowercase, self._letters)) for _ in range(count))
        return [Problem(f"{word}>", word[::-1]) for word in words]

    def reward(self, problem: Problem, completion: str) -> float:
        """Score a completion in [0, 1]; see :class:`Task`."""
        right = sum(a == b for a, b in zip(problem.answer, completion))
        return right / max(len(problem.answer), len(completion))

    def split(self, answer: str) -> list[str]:
        """The letters of an answer."""
        return list(answer)

    def join(self, items: Sequence[str]) -> str:
        """Letters, one after the other."""
        return "".join(items)
