"""Made-up games answer as the real environment does, word for word."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

pytest.importorskip("openenv")

from servers.wordle import WordleServer, wordle_python
from wordle.made_up import CLOSING, PROMPT, games
from wordle.player import WordlePlayer
from wordle.words import answers, some_answers

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(wordle_python() is None, reason="THINWIRE_WORDLE_PYTHON is not set"),
]


def seed_of(secret: str) -> int:
    """One whose game has this word."""
    return next(
        seed for seed in itertools.count() if random.Random(seed).choice(answers()) == secret
    )


def test_games_are_answered_as_by_the_environment(tmp_path: Path) -> None:
    words = some_answers(20)  # few enough for wins
    made = list(itertools.islice(games(words, 0.3, random.Random(5)), 60))
    endings = set()
    with WordleServer(tmp_path) as server, WordlePlayer(server.url) as player:
        for game in made:
            first, *turns, last = game
            assert first == {"role": "user", "content": PROMPT}
            assert last == {"role": "assistant", "content": CLOSING}
            said = [turn["tool_calls"][0]["function"]["arguments"]["word"] for turn in turns[::2]]
            told = [turn["content"] for turn in turns[1::2]]
            # the secret word is not in the conversation unless it was guessed
            secrets = [w for w in words if played(player, w, said) == told]
            assert secrets, (said, told)
            endings.add(told[-1].rpartition(". ")[2])
    assert endings == {"You won.", "You lost.", "The game is over."}


def played(player: WordlePlayer, secret: str, guesses: list[str]) -> list[str]:
    player.reset(seed=seed_of(secret))
    return [player.guess(word) for word in guesses]


def test_the_share_of_nonsense_is_kept() -> None:
    words = some_answers(64)
    for nonsense in (0.0, 0.5):
        made = itertools.islice(games(words, nonsense, random.Random(0)), 300)
        said = [
            turn["tool_calls"][0]["function"]["arguments"]["word"]
            for game in made
            for turn in game
            if "tool_calls" in turn
        ]
        share = sum(word not in words for word in said) / len(said)
        assert abs(share - nonsense) < 0.05
