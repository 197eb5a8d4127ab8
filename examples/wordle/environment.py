"""TextArena's Wordle behind an OpenEnv server.

    python examples/wordle/environment.py --port 8200

Each WebSocket session plays a game of its own. The same seed gives the same secret word, in any
session and after any restart. Nothing is loaded from the network.
"""

from __future__ import annotations

import argparse
import secrets as random_numbers
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by its path: modules are found from the folder above
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

from wordle.env_textarena import Game, Turn, load
from wordle.words import some_answers

__all__ = ["WordleAction", "WordleEnvironment", "WordleObservation", "WordleState", "make_app"]


class WordleAction(Action):
    """A guess."""

    word: str = Field(..., description="the word to guess, without brackets")


class WordleObservation(Observation):
    """What a guess led to, beside ``done`` and ``reward``.

    The reward is TextArena's own: 1 for a win, else the share of the last valid guess that
    matched; 0 until the game has ended.
    """

    word: str = Field(default="", description="the guess, as the game took it")
    feedback: str = Field(default="", description="'G X Y X X'; empty if the guess was invalid")
    invalid: str = Field(default="", description="why the guess was refused; empty if it was not")
    guesses_left: int = Field(default=0, description="valid guesses that are left")
    won: bool = Field(default=False, description="the guess was the secret word")
    secret: str = Field(default="", description="the secret word; empty until the game has ended")
    text: str = Field(default="", description="all that TextArena says")


class WordleState(State):
    """The session's game."""

    seed: int | None = Field(default=None, description="of the secret word")
    guesses: list[str] = Field(default_factory=list, description="the valid guesses")
    feedback: list[str] = Field(default_factory=list, description="and what each was told")
    done: bool = Field(default=False, description="the game has ended")


class WordleEnvironment(Environment[WordleAction, WordleObservation, WordleState]):
    """One session of the server."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._game = Game()
        self._state = WordleState()
        self._under_way = False

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> WordleObservation:
        """Start a game.

        Args:
            seed: decides the secret word, from 0 on; None draws a seed, which the state tells.
            episode_id: name of the game in the state.

        Raises:
            ValueError: the seed is no such number.
        """
        if seed is None:
            seed = random_numbers.randbelow(2**31)
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ValueError(f"a seed is a whole number from 0 on, not {seed!r}")
        text = self._game.start(seed)
        self._state = WordleState(episode_id=episode_id, step_count=0, seed=seed)
        self._under_way = True
        return WordleObservation(
            guesses_left=self._game.guesses_left, text=text, done=False, reward=0.0
        )

    def step(
        self, action: WordleAction, timeout_s: float | None = None, **kwargs: Any
    ) -> WordleObservation:
        """Play a guess. The second invalid guess in a row ends the game: TextArena's rule.

        Raises:
            ValueError: no game is under way.
        """
        if not self._under_way:
            raise ValueError("no game is under way in this session: reset first")
        turn = self._game.guess(action.word)
        self._note(turn)
        return WordleObservation(
            word=turn.word,
            feedback=turn.feedback,
            invalid=turn.invalid,
            guesses_left=turn.guesses_left,
            won=turn.won,
            secret=turn.secret,
            text=turn.text,
            done=turn.done,
            reward=turn.reward,
        )

    def _note(self, turn: Turn) -> None:
        self._state.step_count += 1
        if turn.feedback:
            self._state.guesses.append(turn.word)
            self._state.feedback.append(turn.feedback)
        self._state.done = turn.done
        self._under_way = not turn.done

    @property
    def state(self) -> WordleState:
        return self._state


def make_app(sessions: int, secrets: Sequence[str] | None = None) -> FastAPI:
    """The server, for so many sessions at once. TextArena is loaded here.

    Args:
        sessions: at most.
        secrets: words to draw the secret one from; None: all of Wordle's answers.
    """
    load(secrets)
    app: FastAPI = create_app(
        WordleEnvironment,
        WordleAction,
        WordleObservation,
        env_name="wordle",
        max_concurrent_envs=sessions,
        state_cls=WordleState,
    )
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="TextArena's Wordle behind an OpenEnv server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--sessions", type=int, default=256, help="games at once (256)")
    parser.add_argument("--answers", type=int, help="draw the secret words from so many (all)")
    given = parser.parse_args()
    secrets = None if given.answers is None else some_answers(given.answers)
    app = make_app(given.sessions, secrets)
    print(f"Wordle at http://{given.host}:{given.port}", flush=True)
    uvicorn.run(
        app,
        host=given.host,
        port=given.port,
        log_level="warning",
        timeout_graceful_shutdown=2,
    )


if __name__ == "__main__":
    main()
