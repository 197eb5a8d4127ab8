"""What the coordinator stands on: processes, files that grow, servers' metrics, kills."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from wordle.children import Child, ChildEnded, Children, answers, free_ports
from wordle.kills import Kill, parse_kill
from wordle.proof import exact
from wordle.recipe import FULL, QUICK
from wordle.rules import mark
from wordle.settings import Settings
from wordle.watch import Meter, Tail

NAMES = ("server-0", "server-1", "trainer")
ENV = {"PATH": "/usr/bin:/bin"}


def python(name: str, code: str, **more: object) -> Child:
    return Child(name, [sys.executable, "-c", code], ENV, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "G G G G G"),
        ("crane", "nacre", "Y Y Y Y G"),
        ("allay", "banal", "Y Y X G X"),  # the third l would be one too many
        ("geese", "eerie", "X G Y X G"),
        ("might", "could", "X X X X X"),
    ],
)
def test_marks(guess: str, secret: str, marks: str) -> None:
    assert mark(guess, secret) == marks


def test_kills_are_read() -> None:
    assert parse_kill("server-1@3", NAMES) == Kill("server-1", 3)
    assert parse_kill("trainer@12+20", NAMES) == Kill("trainer", 12, 20.0)


@pytest.mark.parametrize("text", ["server-1", "server-1@", "@3", "server-1@3+", "server-1@-3"])
def test_kills_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME@STEP"):
        parse_kill(text, NAMES)


def test_a_kill_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="server-0, server-1, trainer"):
        parse_kill("server-2@3", NAMES)


def test_recipes_have_models_of_their_own() -> None:
    assert QUICK.model.key != FULL.model.key
    assert QUICK.model.key == QUICK.model.key


def test_settings_survive_json(tmp_path: Path) -> None:
    settings = Settings("c", "b", ("http://a:1", "http://b:2"), "o", "e", QUICK.training, 2, 3)
    settings.save(tmp_path / "settings.json")
    assert Settings.load(tmp_path / "settings.json") == settings


def test_a_tail_reads_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail) == []
    path.write_text('{"n": 1}\n{"n": ')
    assert list(tail) == [{"n": 1}]
    assert list(tail) == []
    with path.open("a") as file:
        file.write("2}\n")
    assert list(tail) == [{"n": 2}]


# --- processes ---------------------------------------------------------------------------------


def test_a_process_is_killed_and_started_again(tmp_path: Path) -> None:
    code = "import time; print('here', flush=True); time.sleep(60)"
    with Children(tmp_path) as children:
        children.start(python("one", code))
        wait_for(tmp_path / "one.log", "here\n")
        children.check("one")
        children.kill("one")
        with pytest.raises(ChildEnded, match="status -9"):
            children.check("one")
        children.restart("one")
        wait_for(tmp_path / "one.log", "here\nhere\n")
        children.check()
    assert children.ended("one") is not None


def test_a_process_takes_its_own_processes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    inner = f"import time\nwhile True: open({str(path)!r}, 'a').write('x'); time.sleep(0.02)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}])"
    with Children(tmp_path) as children:
        children.start(python("outer", f"{code}; time.sleep(60)"))
        wait_for(path, "x")
        children.kill("outer")
        size = path.stat().st_size
        time.sleep(0.2)
        assert path.stat().st_size <= size + 1


def test_the_end_of_a_process_is_told_with_its_last_words(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start(python("one", "import sys; sys.exit('no luck')", ready=lambda: False))
        with pytest.raises(ChildEnded, match=r"(?s)status 1.*no luck"):
            children.wait_ready("one")
        with pytest.raises(ChildEnded, match="status 3"):
            children.run(python("two", "raise SystemExit(3)"))
        children.run(python("three", "pass"))


def test_a_process_that_does_not_get_ready_is_not_waited_for_without_end(tmp_path: Path) -> None:
    slow = python("one", "import time; time.sleep(60)", ready=lambda: False, patience=0.5)
    with Children(tmp_path) as children:
        children.start(slow)
        with pytest.raises(ChildEnded, match="not ready after"):
            children.wait_ready("one")


def test_output_goes_to_the_file_that_is_named(tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    with Children(tmp_path) as children:
        children.run(python("one", code, stdout=tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "out\n"
    assert (tmp_path / "one.log").read_text() == "err\n"


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while not (path.exists() and text in path.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.02)


# --- metrics -----------------------------------------------------------------------------------


class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'# HELP x\nvllm:generation_tokens_total{engine="0"} 12.0\nvllm:other 5\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_tokens_are_read_from_the_servers_that_are_there(url: str) -> None:
    (nobody,) = free_ports(1)
    found = []
    with Meter({"server-0": url, "server-1": f"http://127.0.0.1:{nobody}"}, every=0.01) as meter:
        deadline = time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            found += meter.take()
            time.sleep(0.01)
    assert {(sample.server, sample.tokens) for sample in found} == {("server-0", 12.0)}


def test_whether_a_server_answers(url: str) -> None:
    assert answers(f"{url}/health")
    (nobody,) = free_ports(1)
    assert not answers(f"http://127.0.0.1:{nobody}/health")


# --- the verdict -------------------------------------------------------------------------------

GOOD = {"version": 3, "exact": True, "tensors": 9, "differs": [], "not_compared": []}


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"version": 2}, False),
        ({"exact": False}, False),
        ({"differs": ["w"]}, False),
        ({"not_compared": ["w"]}, False),
        ({"tensors": 0}, False),
    ],
)
def test_an_engine_is_exact_only_if_all_of_it_was_compared(
    change: dict[str, object], good: bool
) -> None:
    assert exact({**json.loads(json.dumps(GOOD)), **change}, 3) is good
