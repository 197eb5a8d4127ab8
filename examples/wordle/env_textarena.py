"""TextArena's Wordle: loaded once for all sessions, offline; the same game for the same seed."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nltk
import textarena

from wordle.words import write_nltk_data

__all__ = ["Game", "Turn", "load"]

_ENV = "Wordle-v0-raw"
_INVALID = ("You attempted an invalid move. Reason: ", " Please resubmit")
_OVER = "Invalid Move: "

_loading = threading.Lock()
_drawing = threading.Lock()
_loaded: list[Any] = []


@dataclass(frozen=True)
class Turn:
    """What a guess led to.

    Attributes:
        word: the guess, as the game took it.
        feedback: ``G``, ``Y`` or ``X`` per letter with spaces between; empty if it was invalid.
        invalid: the game's reason to refuse the guess; empty if it did not.
        guesses_left: how many valid guesses are left.
        done: the game has ended.
        won: and with the secret word.
        reward: TextArena's own, between 0 and 1, once the game has ended; before, 0.
        secret: the word to guess, once the game has ended; before, empty.
        text: all that TextArena says.
    """

    word: str
    feedback: str
    invalid: str
    guesses_left: int
    done: bool
    won: bool
    reward: float
    secret: str
    text: str


def load(secrets: Sequence[str] | None = None) -> Any:
    """TextArena's environment, made at the first call. No session plays in it.

    It holds more than 100,000 words. Sessions play in shallow copies, which share them.

    Args:
        secrets: words to draw the secret one from; None: all of Wordle's answers. Counts at the
            first call only.
    """
    with _loading:
        if not _loaded:
            with _offline(secrets):
                _loaded.append(textarena.make(_ENV))
        return _loaded[0]


class Game:
    """One player's game; ``start`` begins another one."""

    def __init__(self) -> None:
        self._env: Any = copy.copy(load())

    def start(self, seed: int) -> str:
        """Draw the secret word that belongs to ``seed``; returns the rules in TextArena's words."""
        # TextArena seeds Python's own generator, then draws from it: no session may come between.
        with _drawing:
            self._env.reset(num_players=1, seed=seed)
        return self._told()

    @property
    def guesses_left(self) -> int:
        state = self._env.state.game_state
        return int(state["num_guesses"]) - len(state["guess_history"])

    def guess(self, word: str) -> Turn:
        """Play ``word``. The game must be under way."""
        history = self._env.state.game_state["guess_history"]
        valid = len(history)
        done, _ = self._env.step(f"[{word}]")
        text, reward, won, secret = self._told(), 0.0, False, ""
        if done:
            rewards, infos = self._env.close()
            reward, reason = float(rewards[0]), str(infos[0]["reason"])
            text = f"{text}\n{reason}".strip()
            secret = str(self._env.state.game_state["secret_word"])
        feedback, invalid = "", ""
        if len(history) > valid:
            word, marks = history[-1]
            feedback, won = " ".join(marks), set(marks) == {"G"}
        else:
            invalid = _reason(text)
        return Turn(
            word, feedback, invalid, self.guesses_left, bool(done), won, reward, secret, text
        )

    def _told(self) -> str:
        """What the game said since it was last asked."""
        _, messages = self._env.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(text).strip() for _, text, kind in messages if kind != own)


def _reason(text: str) -> str:
    """TextArena's reason for an invalid move, without what it says around it."""
    before, after = _INVALID
    _, found, rest = text.partition(before)
    if found:
        return rest.partition(after)[0]
    return text.removeprefix(_OVER)


@contextlib.contextmanager
def _offline(secrets: Sequence[str] | None) -> Iterator[None]:
    """NLTK reads this example's data, and does not ask the network for more."""
    paths, download = list(nltk.data.path), nltk.download

    def have(*args: object, **options: object) -> bool:
        logging.getLogger(__name__).debug("not downloaded, since it is here: %s", args)
        return True

    with tempfile.TemporaryDirectory(prefix="wordle-nltk-") as folder:
        write_nltk_data(Path(folder), secrets)
        nltk.data.path[:] = [folder]
        nltk.download = have
        try:
            yield
        finally:
            nltk.data.path[:], nltk.download = paths, download
