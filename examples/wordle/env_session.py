"""One game at the environment's server, which may be killed and started again meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

from openenv.core.generic_client import GenericEnvClient
from websockets.exceptions import WebSocketException

__all__ = ["EnvironmentLost", "GameChanged", "NotWordle", "Reply", "Session"]

_ANSWER_S = 30.0
_CONNECT_S = 10.0
_FIRST_REST_S, _LONGEST_REST_S = 0.1, 2.0
_MISUNDERSTOOD = "code: VALIDATION_ERROR"
# asyncio's and Python's own time-outs are one class from Python 3.11 on only. What the server
# reports as an error is a RuntimeError in OpenEnv's client: it is full, it is shutting down, or
# the client silently went on in a new session, in which no game is under way.
_LOST = (OSError, WebSocketException, asyncio.TimeoutError, TimeoutError, RuntimeError)

_T = TypeVar("_T")


class EnvironmentLost(ConnectionError):
    """The server did not come back in time."""


class GameChanged(Exception):
    """The server that came back answers the same guesses of the same seed in another way."""


class NotWordle(Exception):
    """The server is another environment's, or one of another release."""


@dataclass(frozen=True)
class Reply:
    """What a guess was told; TextArena's own reward is left out."""

    word: str
    feedback: str
    invalid: str
    guesses_left: int
    done: bool
    won: bool


class Session:
    """A WebSocket session with the server at ``url``.

    Args:
        url: of the server, ``http://`` or ``ws://`` and the like.
        patience: seconds to wait for a server that does not answer.

    A game is decided by its seed and its guesses. So when the connection breaks, the game is
    started again on a new one, and its guesses are played again and have to be told the same.
    """

    def __init__(self, url: str, patience: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"the environment's URL is like http://127.0.0.1:8200, not {url!r}")
        self.url, self.patience = url, patience
        self._client: Any = GenericEnvClient(
            base_url=url,
            connect_timeout_s=max(0.1, min(_CONNECT_S, patience)),
            message_timeout_s=max(0.1, min(_ANSWER_S, patience)),
        ).sync()
        self._seed = 0
        self._played: list[tuple[str, Reply]] = []
        self._live = False

    def reset(self, seed: int) -> None:
        """Start the game of ``seed``.

        Raises:
            EnvironmentLost: no server within the patience.
        """
        self._seed, self._played, self._live = seed, [], False
        self._patiently(self._resume)

    def guess(self, word: str) -> Reply:
        """Play ``word`` in the game that was started last.

        Raises:
            EnvironmentLost: no server within the patience.
            GameChanged: it broke meanwhile, and is another game now.
            NotWordle: the server answers something else.
        """
        reply = self._patiently(lambda: self._guess(word))
        self._played.append((word, reply))
        return reply

    def close(self) -> None:
        """End the session and the thread that serves it."""
        self._client.close()

    # --- one attempt ----------------------------------------------------------------------

    def _guess(self, word: str) -> Reply:
        if not self._live:
            self._resume()
        return self._ask(word)

    def _resume(self) -> None:
        self._client.reset(seed=self._seed)
        for word, before in self._played:
            now = self._ask(word)
            if now != before:
                raise GameChanged(
                    f"seed {self._seed}, guess {word!r}: {self.url} told {before} before and "
                    f"{now} now; its word lists or its TextArena are others"
                )
        self._live = True

    def _ask(self, word: str) -> Reply:
        result = self._client.step({"word": word})
        told = {"done": result.done, **result.observation}
        try:
            return Reply(**{field.name: told[field.name] for field in fields(Reply)})
        except KeyError as error:
            raise NotWordle(f"{self.url} answers a guess without {error}: {told}") from error

    # --- and again ------------------------------------------------------------------------

    def _patiently(self, attempt: Callable[[], _T]) -> _T:
        """Until it succeeds: a broken connection costs time, and nothing else."""
        deadline, rest = time.monotonic() + self.patience, _FIRST_REST_S
        while True:
            try:
                return attempt()
            except _LOST as error:
                self._live = False
                if _MISUNDERSTOOD in str(error):
                    raise NotWordle(f"{self.url} does not understand a guess: {error}") from error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EnvironmentLost(
                        f"no Wordle at {self.url} for {self.patience:g} s (last: {error}); is "
                        "examples/wordle/environment.py running there?"
                    ) from error
            time.sleep(min(rest, left))
            rest = min(2 * rest, _LONGEST_REST_S)
