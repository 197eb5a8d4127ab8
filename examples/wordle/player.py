"""The player that TRL's trainers take as ``environment_factory``: one tool, one reward per game.

    trainer = AsyncGRPOTrainer(..., environment_factory=WordlePlayer)

TRL makes players in a process of its own. It calls ``reset`` with a row of the dataset, then
``guess`` for every tool call of the model, then ``get_reward``; every further public method would
become a tool.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wordle.env_record import Episode, append
from wordle.env_session import Reply, Session
from wordle.rules import mark

__all__ = ["WordlePlayer", "answer_text", "mark", "refusal_text", "reward_of"]

_URL = "http://127.0.0.1:8200"
_LONGEST = 40
_PER_GUESS = 0.05
_WITHOUT_A_WIN = 0.5
_OVER = "The game is over."


def answer_text(word: str, marks: str, *, won: bool, left: int) -> str:
    """What the tool answers to a valid guess.

    Every mark stands behind its letter, as in ``crane: c G r X a Y n X e X. 5 left.``: a small
    model need neither spell the word nor count.
    """
    told = " ".join(f"{letter} {its}" for letter, its in zip(word, marks.split()))
    end = "You won." if won else f"{left} left." if left else "You lost."
    return f"{word}: {told}. {end}"


def refusal_text(reason: str, *, over: bool, left: int) -> str:
    """What the tool answers to a guess that the game refuses."""
    return f"{reason} {_OVER if over else f'{left} left.'}"


def reward_of(feedback: Sequence[str], *, won: bool) -> float:
    """A game's reward, between 0 and 1.

    A win is worth 1.0 with the first guess and 0.05 less with each further one, so 0.75 with the
    sixth. Any other game is worth half of its best guess's share of the word, where a green letter
    counts as one fifth and a yellow letter as one tenth: 0.4 at most. Without a valid guess it is
    worth 0. An invalid guess costs nothing by itself.
    """
    if won:
        return 1.0 - _PER_GUESS * (len(feedback) - 1)
    shares = ((marks.count("G") + 0.5 * marks.count("Y")) / 5 for marks in feedback)
    return _WITHOUT_A_WIN * max(shares, default=0.0)


class WordlePlayer:
    """Plays at the environment's server, one game after another.

    Args:
        url: of the server; by default the environment variable ``WORDLE_URL``, or port 8200 here.
        patience: seconds to wait for a server that does not answer. A game goes on where it was
            when the server comes back.

    Every game appends a line to the file that the environment variable ``WORDLE_LOG`` names, if it
    does: see ``wordle.env_record``.

    Raises:
        ValueError: the URL is none.
    """

    def __init__(self, url: str | None = None, patience: float = 120.0) -> None:
        self._session = Session(url or os.environ.get("WORDLE_URL") or _URL, patience)
        self._log = os.environ.get("WORDLE_LOG")
        self._seed: int | None = None
        self._replies: list[Reply] = []
        self._failure: Exception | None = None
        self._recorded = True

    def reset(self, seed: int, **kwargs: Any) -> str:
        """Start the game of ``seed``. TRL passes the row's other columns too; they are not used.

        Returns:
            what TRL appends to the prompt: nothing.

        Raises:
            EnvironmentLost: no server within the patience.
            TypeError, ValueError: the seed is no whole number from 0 on.
        """
        seed = operator.index(seed)
        if seed < 0:
            raise ValueError(f"the column seed holds whole numbers from 0 on, not {seed}")
        self._record()
        self._seed, self._replies, self._failure, self._recorded = None, [], None, True
        self._session.reset(seed)
        self._seed, self._recorded = seed, False
        return ""

    def guess(self, word: str) -> str:
        """Guess the secret word.

        Args:
            word: A word of five letters.

        Returns:
            Each letter with its mark: G is right, Y is elsewhere in the word, X is not in it.
        """
        self._require_game()
        if self._replies and self._replies[-1].done:
            return _OVER
        try:
            reply = self._session.guess(_plain(word))
        except Exception as error:
            self._failure = error
            raise
        self._replies.append(reply)
        if reply.feedback:
            return answer_text(reply.word, reply.feedback, won=reply.won, left=reply.guesses_left)
        return refusal_text(reply.invalid, over=reply.done, left=reply.guesses_left)

    def get_reward(self) -> float:
        """The game's reward, see ``reward_of``.

        Raises:
            EnvironmentLost, GameChanged, NotWordle: what ``guess`` raised. TRL only counts a tool
                that fails; here it stops, for nobody could play that game to its end.
        """
        self._require_game()
        self._record()
        return self._episode().reward

    def _require_game(self) -> int:
        if self._failure is not None:
            raise self._failure
        if self._seed is None:
            raise RuntimeError("no game is under way: reset first")
        return self._seed

    def _episode(self) -> Episode:
        valid = [reply for reply in self._replies if reply.feedback]
        feedback = [reply.feedback for reply in valid]
        won = bool(valid) and valid[-1].won
        return Episode(
            seed=self._require_game(),
            guesses=[reply.word for reply in valid],
            feedback=feedback,
            won=won,
            invalid=len(self._replies) - len(valid),
            reward=reward_of(feedback, won=won),
        )

    def _record(self) -> None:
        """Write the game down, once. One that failed has no reward and no line."""
        if self._recorded or self._failure is not None:
            return
        self._recorded = True
        if self._log:
            append(Path(self._log), self._episode())

    def __enter__(self) -> WordlePlayer:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()


def _plain(word: object) -> str:
    """What a model gave as a word, without TextArena's brackets and without end."""
    return str(word).strip().strip("[]").lower()[:_LONGEST]
