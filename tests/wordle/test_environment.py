"""TextArena's Wordle behind OpenEnv's server: `make test-wordle`."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv")

from openenv.core.generic_client import GenericEnvClient

from servers.wordle import EXAMPLES, WordleServer, wordle_python
from wordle.rules import mark
from wordle.words import answers, guesses, some_answers, write_nltk_data

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(wordle_python() is None, reason="THINWIRE_WORDLE_PYTHON is not set"),
]

NO_WORD = "zzzzz"
# Notes every connection that the server begins, every name that it looks up, and where it listens.
AUDIT = """
import os, sys

def note(event, given):
    if event in ("socket.bind", "socket.connect", "socket.getaddrinfo"):
        with open(os.environ["AUDIT_TO"], "a") as log:
            log.write(f"{event} {given[1] if event != 'socket.getaddrinfo' else given[0]}\\n")

sys.addaudithook(note)
"""
# Many games at once, whose threads take turns between the seeding and the drawing.
CROWD = """
import json, random, threading, time
from wordle.env_textarena import Game

seed_it = random.seed
random.seed = lambda seed: (seed_it(seed), time.sleep(0.0001))
drawn = {}

def play(k):
    game = Game()
    for seed in range(k, k + 50):
        game.start(seed)
        secret = game._env.state.game_state["secret_word"]
        drawn.setdefault(seed, set()).add(secret)

threads = [threading.Thread(target=play, args=(k,)) for k in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps({seed: sorted(words) for seed, words in drawn.items()}))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WordleServer]:
    with WordleServer(tmp_path_factory.mktemp("server"), "--sessions", "64") as running:
        yield running  # type: ignore[misc]


@contextlib.contextmanager
def session(server: WordleServer) -> Iterator[Any]:
    client = GenericEnvClient(base_url=server.url).sync()
    with client:
        yield client


def secret_of(seed: int) -> str:
    """What TextArena draws: Python's generator, over the sorted answers."""
    return random.Random(seed).choice(answers())


def test_the_lists_are_the_original_ones() -> None:
    assert (len(answers()), len(guesses())) == (2315, 10657)
    assert not set(answers()) & set(guesses())
    every = (*answers(), *guesses())
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in every)
    assert list(answers()) == sorted(answers())


def test_nltk_data_is_words_and_a_tagger(tmp_path: Path) -> None:
    write_nltk_data(tmp_path)
    corpus = tmp_path / "corpora" / "words"
    assert tuple((corpus / "en-basic").read_text().split()) == answers()
    assert set((corpus / "en").read_text().split()) == {*answers(), *guesses()}


def test_a_game_is_won(server: WordleServer) -> None:
    secret = secret_of(7)
    with session(server) as client:
        begun = client.reset(seed=7)
        assert begun.done is False
        assert begun.observation["guesses_left"] == 6
        assert "You are Playing Wordle" in begun.observation["text"]
        other = client.step({"word": "crane"})
        assert other.observation["feedback"] == mark("crane", secret)
        assert (other.done, other.reward, other.observation["guesses_left"]) == (False, 0.0, 5)
        won = client.step({"word": secret.upper()})
    assert (won.done, won.reward) == (True, 1.0)
    told = won.observation
    assert (told["word"], told["feedback"], told["won"]) == (secret, "G G G G G", True)
    assert told["secret"] == secret
    assert "Congratulations" in told["text"]


def test_a_game_is_lost_and_only_then_tells_the_word(server: WordleServer) -> None:
    secret = secret_of(11)
    drawn = random.Random(0)
    words = drawn.sample([word for word in (*answers(), *guesses()) if word != secret], 6)
    with session(server) as client:
        before = [client.reset(seed=11)]
        before += [client.step({"word": word}) for word in words[:5]]
        state = client.state()
        last = client.step({"word": words[5]})
    assert [result.done for result in before] == [False] * 6
    assert secret not in json.dumps([result.observation for result in before]).lower()
    assert secret not in json.dumps(state).lower()
    assert state["guesses"] == words[:5]
    assert state["feedback"] == [mark(word, secret) for word in words[:5]]
    marks = mark(words[5], secret)
    assert last.done is True
    assert last.reward == pytest.approx((marks.count("G") + 0.5 * marks.count("Y")) / 5)
    assert (last.observation["guesses_left"], last.observation["won"]) == (0, False)
    assert last.observation["secret"] == secret
    assert f"**{secret}**" in last.observation["text"]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (NO_WORD, "'zzzzz' is not an English word."),
        ("word", "Your word must be exactly 5 letters."),
        ("", "wrong format"),
        ("two words", "wrong format"),
        ("crane", "You have already guessed 'crane' before."),
    ],
)
def test_a_guess_is_refused(server: WordleServer, word: str, why: str) -> None:
    with session(server) as client:
        client.reset(seed=5)
        client.step({"word": "crane"})
        refused = client.step({"word": word})
        assert why in refused.observation["invalid"]
        assert (refused.observation["feedback"], refused.done) == ("", False)
        assert refused.observation["guesses_left"] == 5
        assert client.step({"word": "slate"}).observation["guesses_left"] == 4
        client.step({"word": word})
        again = client.step({"word": NO_WORD})  # TextArena bears one in a row
        assert (again.done, again.observation["won"]) == (True, False)
        assert again.observation["invalid"] == "'zzzzz' is not an English word."
        assert again.observation["secret"] == secret_of(5)


def test_marks_are_those_of_made_up_games(server: WordleServer) -> None:
    drawn = random.Random(1)
    with session(server) as client:
        for seed in range(60):
            secret = secret_of(seed)
            client.reset(seed=seed)
            # words with a letter twice are where rules differ
            for word in drawn.sample([w for w in answers() if len(set(w)) < 5], 5):
                if word != secret:
                    told = client.step({"word": word}).observation
                    assert told["feedback"] == mark(word, secret)


def test_every_word_of_the_lists_is_taken(server: WordleServer) -> None:
    drawn = random.Random(2)
    words = drawn.sample((*answers(), *guesses()), 300)
    with session(server) as client:
        for seed, first in enumerate(range(0, 300, 5)):
            client.reset(seed=seed)
            for word in words[first : first + 5]:
                assert client.step({"word": word}).observation["invalid"] == ""


def test_a_seed_has_one_word_in_every_session(server: WordleServer) -> None:
    sessions, together = 64, threading.Barrier(64)

    def play(k: int) -> list[tuple[int, str]]:
        drawn = []
        with session(server) as client:
            together.wait(120)  # all sessions are open
            for seed in [*range(3), *range(100 * k, 100 * k + 3)]:
                client.reset(seed=seed)
                client.step({"word": NO_WORD})
                drawn.append((seed, client.step({"word": NO_WORD}).observation["secret"]))
        return drawn

    with ThreadPoolExecutor(sessions) as pool:
        games = [game for played in pool.map(play, range(sessions)) for game in played]
    assert len(games) == 6 * sessions
    assert [secret for _, secret in games] == [secret_of(seed) for seed, _ in games]


def test_threads_do_not_draw_each_others_words() -> None:
    python = wordle_python()
    assert python is not None
    ran = subprocess.run(
        [python, "-c", CROWD],
        env={"PYTHONPATH": str(EXAMPLES)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    drawn = json.loads(ran.stdout)
    assert drawn == {str(seed): [secret_of(seed)] for seed in range(65)}


def test_the_secret_words_can_be_fewer(tmp_path: Path) -> None:
    few = some_answers(12)
    assert few == some_answers(12) == tuple(sorted(set(few)))
    assert set(few) < set(answers())
    with WordleServer(tmp_path, "--answers", "12") as server, session(server) as client:
        drawn = set()
        for seed in range(40):
            client.reset(seed=seed)
            client.step({"word": NO_WORD})
            drawn.add(client.step({"word": NO_WORD}).observation["secret"])
        assert drawn <= set(few)
        assert len(drawn) > 6
        outside = next(word for word in answers() if word not in few)
        client.reset(seed=1)
        assert client.step({"word": outside}).observation["feedback"]  # still a word


def test_games_without_a_seed_differ_and_can_be_played_again(server: WordleServer) -> None:
    with session(server) as client:
        seeds = set()
        for _ in range(5):
            client.reset(seed=1)  # which leaves Python's generator where it left it before
            client.reset()
            seeds.add(client.state()["seed"])
        seed = client.state()["seed"]
        client.step({"word": NO_WORD})
        assert client.step({"word": NO_WORD}).observation["secret"] == secret_of(seed)
    assert len(seeds) == 5


def test_what_is_no_game_is_an_error(server: WordleServer) -> None:
    with session(server) as client:
        with pytest.raises(RuntimeError, match="no game is under way in this session: reset"):
            client.step({"word": "crane"})
        for seed in (-1, 1.5, "7", True):
            with pytest.raises(RuntimeError, match="a seed is a whole number from 0 on"):
                client.reset(seed=seed)
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            client.step({"message": "crane"})
        client.reset(seed=3)
        client.step({"word": secret_of(3)})
        with pytest.raises(RuntimeError, match="no game is under way"):
            client.step({"word": "crane"})


def test_the_server_asks_nobody_and_ends_when_told(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    audit = tmp_path / "audit.log"
    heard = {"PYTHONPATH": str(tmp_path), "AUDIT_TO": str(audit)}
    with WordleServer(tmp_path, environment=heard) as server, session(server) as client:
        client.reset(seed=1)
        client.step({"word": "crane"})
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        assert server.log.read_text() == f"Wordle at {server.url}\n"
    noted = audit.read_text().splitlines()
    assert f"socket.bind ('127.0.0.1', {server.port})" in noted  # the notes are taken
    asked = {line for line in noted if not line.startswith("socket.bind")}
    assert asked <= {"socket.getaddrinfo 127.0.0.1"}
