"""The player that TRL takes, at the environment's server, which is killed: `make test-wordle`."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl")
pytest.importorskip("openenv")

from transformers.utils import get_json_schema

from servers.ports import free_port
from servers.wordle import EXAMPLES, WordleServer, wordle_python
from wordle.env_session import EnvironmentLost, GameChanged, NotWordle
from wordle.player import WordlePlayer, answer_text, mark, reward_of
from wordle.words import answers

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(wordle_python() is None, reason="THINWIRE_WORDLE_PYTHON is not set"),
]

SEED, SECRET = 5, "issue"
# The server with the answers in another order: seeds have other words.
OTHER_LISTS = """
import wordle.words
found = wordle.words.answers()
wordle.words.answers = lambda: found[::-1]
from wordle.environment import main
main()
"""
# OpenEnv's server with another game.
OTHER_GAME = """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Deed(Action):
    word: str

class Other(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0)
    def step(self, action, timeout_s=None, **kwargs):
        return Observation(done=True, reward=1.0)
    state = State()

app = create_app(Other, Deed, Observation)
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WordleServer]:
    with WordleServer(tmp_path_factory.mktemp("server")) as running:
        yield running  # type: ignore[misc]


def played(player: WordlePlayer, words: list[str], seed: int = SEED) -> list[str]:
    player.reset(seed=seed)
    return [player.guess(word) for word in words]


# --- without a server ----------------------------------------------------------------------


def test_an_answer_is_short() -> None:
    assert answer_text("crane", "G X Y X X", won=False, left=5) == (
        "crane: c G r X a Y n X e X. 5 left."
    )
    assert answer_text("issue", "G G G G G", won=True, left=0).endswith("e G. You won.")
    assert answer_text("crane", "X X X X X", won=False, left=0).endswith("e X. You lost.")


def test_a_reward() -> None:
    no, all_yellow, four, won = "X X X X X", "Y Y Y Y Y", "G G G G X", "G G G G G"
    assert reward_of([], won=False) == 0.0
    assert reward_of([no] * 6, won=False) == 0.0
    assert reward_of([no, all_yellow, no], won=False) == pytest.approx(0.25)
    assert reward_of([no, four, all_yellow], won=False) == pytest.approx(0.4)
    wins = [reward_of([no] * before + [won], won=True) for before in range(6)]
    assert wins == pytest.approx([1.0, 0.95, 0.9, 0.85, 0.8, 0.75])


def test_trl_sees_one_tool_and_can_send_the_class() -> None:
    public = [name for name, _ in inspect.getmembers(WordlePlayer) if not name.startswith("_")]
    assert public == ["get_reward", "guess", "reset"]
    assert pickle.loads(pickle.dumps(WordlePlayer)) is WordlePlayer  # noqa: S301
    parameters = get_json_schema(WordlePlayer().guess)["function"]["parameters"]
    assert parameters["required"] == ["word"]
    assert parameters["properties"]["word"]["type"] == "string"


@pytest.mark.parametrize("url", ["127.0.0.1:8200", "ftp://127.0.0.1", "http://"])
def test_an_url_is_checked(url: str) -> None:
    with pytest.raises(ValueError, match=r"is like http://127\.0\.0\.1:8200"):
        WordlePlayer(url)


def test_a_seed_is_checked() -> None:
    player = WordlePlayer()
    with pytest.raises(ValueError, match="from 0 on, not -1"):
        player.reset(seed=-1)
    with pytest.raises(TypeError):
        player.reset(seed="7")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="reset first"):
        player.guess("crane")
    with pytest.raises(RuntimeError, match="reset first"):
        player.get_reward()


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("WORDLE_URL", url)
    began = time.monotonic()
    with pytest.raises(EnvironmentLost, match=rf"no Wordle at {url} for 1 s .*environment\.py"):
        WordlePlayer(patience=1.0).reset(seed=SEED)
    assert 1.0 <= time.monotonic() - began < 20


# --- games ---------------------------------------------------------------------------------


def test_a_game_is_won(server: WordleServer) -> None:
    with WordlePlayer(server.url) as player:
        assert player.reset(seed=np.int64(SEED), prompt=[], more=1) == ""  # type: ignore[arg-type]
        assert player.guess("crane") == "crane: c X r X a X n X e G. 5 left."
        assert player.guess("zzzzz") == "'zzzzz' is not an English word. 5 left."
        assert player.guess(" [Slate]\n") == "slate: s Y l X a X t X e G. 4 left."
        assert player.guess(SECRET) == "issue: i G s G s G u G e G. You won."
        assert player.guess("crane") == "The game is over."
        assert player.get_reward() == pytest.approx(0.9)


def test_a_game_is_lost(server: WordleServer) -> None:
    words = ["crane", "slate", "about", "house", "arise", "guess"]
    with WordlePlayer(server.url) as player:
        told = played(player, words)
        assert told[-1] == answer_text("guess", mark("guess", SECRET), won=False, left=0)
        assert SECRET not in " ".join(told)
        shares = [mark(w, SECRET).count("G") + 0.5 * mark(w, SECRET).count("Y") for w in words]
        assert player.get_reward() == pytest.approx(0.5 * max(shares) / 5)
        assert player.guess("crane") == "The game is over."


def test_a_game_of_invalid_guesses(server: WordleServer) -> None:
    with WordlePlayer(server.url) as player:
        told = played(player, ["zzzzz", "x" * 1000])
        assert told[1] == "Your word must be exactly 5 letters. The game is over."
        assert player.get_reward() == 0.0
        player.reset(seed=SEED)
        assert "wrong format" in player.guess("")
        assert player.guess("crane").endswith("5 left.")
        assert player.get_reward() > 0


def test_games_are_recorded_once(
    server: WordleServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "games.jsonl"
    monkeypatch.setenv("WORDLE_LOG", str(log))
    with WordlePlayer(server.url) as player:
        played(player, ["zzzzz", "crane", SECRET])
        player.get_reward()
        player.get_reward()
        played(player, ["crane"], seed=6)  # nobody asks for its reward
        played(player, [], seed=7)
        player.get_reward()
    first, second, third = map(json.loads, log.read_text().splitlines())
    assert first == {
        "seed": SEED,
        "guesses": ["crane", SECRET],
        "feedback": ["X X X X G", "G G G G G"],
        "won": True,
        "invalid": 1,
        "reward": 0.95,
    }
    assert (second["seed"], second["guesses"], second["won"]) == (6, ["crane"], False)
    assert (third["guesses"], third["reward"]) == ([], 0.0)


def test_a_process_with_players_ends(server: WordleServer, tmp_path: Path) -> None:
    code = "\n".join(
        [
            "from wordle.player import WordlePlayer",
            "players = [WordlePlayer() for _ in range(4)]",
            f"[player.reset(seed={SEED}) for player in players]",
            "print([player.guess('crane') for player in players])",
        ]
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES), "WORDLE_URL": server.url},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert ran.stdout.count("crane: c X r X a X n X e G. 5 left.") == 4
    assert ran.stderr == ""


# --- the server is killed ------------------------------------------------------------------


def test_a_game_goes_on_after_a_kill(tmp_path: Path) -> None:
    words = ["crane", "zzzzz", "slate"]
    with WordleServer(tmp_path) as server, WordlePlayer(server.url, patience=120) as player:
        played(player, words)
        server.stop()
        server.start()  # before the player notices: it finds a session without a game
        assert player.guess("crane").startswith("You have already guessed 'crane'")
        server.stop()
        back = threading.Timer(1.5, server.start)
        back.start()  # while the player waits
        began = time.monotonic()
        assert player.guess(SECRET) == "issue: i G s G s G u G e G. You won."
        assert time.monotonic() - began > 1.5
        back.join()
        assert player.get_reward() == pytest.approx(0.9)


def test_many_games_go_on_after_a_kill(tmp_path: Path) -> None:
    games, words = 24, ["crane", "slate", "moldy"]
    secrets = [random.Random(seed).choice(answers()) for seed in range(games)]
    killed = threading.Barrier(games + 1)

    def play(server: WordleServer, seed: int) -> tuple[list[str], float]:
        with WordlePlayer(server.url, patience=120) as player:
            told = played(player, words[:1], seed)
            killed.wait(120)
            told += [player.guess(word) for word in (*words[1:], secrets[seed])]
            return told, player.get_reward()

    with WordleServer(tmp_path) as server, ThreadPoolExecutor(games) as pool:
        under_way = [pool.submit(play, server, seed) for seed in range(games)]
        while killed.n_waiting < games:
            time.sleep(0.01)
        server.stop()
        killed.wait(120)
        time.sleep(0.5)
        server.start()
        results = [game.result(120) for game in under_way]
    for secret, (told, reward) in zip(secrets, results):
        marks = [mark(word, secret) for word in words]
        expected = [
            answer_text(word, marks[k], won=False, left=5 - k) for k, word in enumerate(words)
        ]
        assert told[:3] == expected
        assert told[3].endswith("You won.")
        assert reward == pytest.approx(0.85)


def test_a_server_that_stays_away(tmp_path: Path) -> None:
    with WordleServer(tmp_path) as server, WordlePlayer(server.url, patience=1.0) as player:
        played(player, ["crane"])
        server.stop()
        with pytest.raises(EnvironmentLost, match="no Wordle at"):
            player.guess("slate")
        began = time.monotonic()
        with pytest.raises(EnvironmentLost):  # and no patience for the same game again
            player.guess("slate")
        with pytest.raises(EnvironmentLost):
            player.get_reward()
        assert time.monotonic() - began < 1.0
        server.start()
        assert played(player, ["crane"])[0].startswith("crane: ")
        assert player.get_reward() == pytest.approx(0.1)


def test_a_server_that_came_back_with_other_words(tmp_path: Path) -> None:
    server = WordleServer(tmp_path)
    other = WordleServer(tmp_path, script=OTHER_LISTS)
    other.command = [
        str(server.port) if part == str(other.port) else part for part in other.command
    ]
    other.url = server.url
    with WordlePlayer(server.url, patience=120) as player:
        with server:
            played(player, ["crane"])
        with other, pytest.raises(GameChanged, match=r"guess 'crane'.*word lists"):
            player.guess("slate")
        with pytest.raises(GameChanged):
            player.get_reward()


def test_a_server_with_another_game(tmp_path: Path) -> None:
    with (
        WordleServer(tmp_path, script=OTHER_GAME) as server,
        WordlePlayer(server.url, patience=120) as player,
    ):
        player.reset(seed=SEED)
        with pytest.raises(NotWordle, match="without 'word'"):
            player.guess("crane")


def test_a_server_that_is_full_is_waited_for(tmp_path: Path) -> None:
    with WordleServer(tmp_path, "--sessions", "1") as server:
        first, second = (WordlePlayer(server.url, patience=120) for _ in range(2))
        first.reset(seed=SEED)
        with (
            WordlePlayer(server.url, patience=3.0) as third,
            pytest.raises(EnvironmentLost, match="CAPACITY_REACHED"),
        ):
            third.reset(seed=SEED)
        leaving = threading.Timer(1.0, first.__exit__)
        leaving.start()
        with second:
            assert played(second, ["crane"]) == ["crane: c X r X a X n X e G. 5 left."]
        leaving.join()
