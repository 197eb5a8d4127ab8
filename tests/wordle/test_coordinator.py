"""What the coordinator stands on: processes, files that grow, servers' metrics, kills."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from wordle.children import Child, ChildEnded, Children, free_ports
from wordle.kills import Kill, parse_kill
from wordle.proof import prove
from wordle.proven import exact, proven
from wordle.recipe import QUICK
from wordle.rules import mark
from wordle.run_checkpoints import steps_done, whole_checkpoint
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
    assert parse_kill("server-1@3", NAMES, 12) == Kill("server-1", 3)
    assert parse_kill("trainer@12+20", NAMES, 12) == Kill("trainer", 12, 20.0)


@pytest.mark.parametrize("text", ["server-1", "server-1@", "@3", "server-1@3+", "server-1@-3"])
def test_kills_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME@STEP"):
        parse_kill(text, NAMES, 12)


@pytest.mark.parametrize("text", ["server-1@0", "server-1@13"])
def test_kills_after_a_step_that_there_is_not_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="steps 1 to 12"):
        parse_kill(text, NAMES, 12)


def test_a_kill_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="server-0, server-1, trainer"):
        parse_kill("server-2@3", NAMES, 12)


def test_another_model_has_another_key() -> None:
    model = QUICK.model
    assert replace(model, seed=model.seed + 1).key != model.key
    assert replace(model).key == model.key


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


def test_a_tail_skips_what_a_killed_process_has_left(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"n": 1}\n{"n": {"n": 2}\n{"n": 3}\n')
    assert list(Tail(path)) == [{"n": 1}, {"n": 3}]


# --- the trainer's checkpoints -----------------------------------------------------------------


def checkpoint(output: Path, step: int, state: str | None = None, *, model: bool = True) -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    if model:
        (folder / "model.safetensors").write_bytes(b"weights")
    state = json.dumps({"global_step": step}) if state is None else state
    if state:
        (folder / "trainer_state.json").write_text(state)
    return folder


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert whole_checkpoint(tmp_path / "nothing") is None
    assert whole_checkpoint(tmp_path) is None


def test_the_newest_checkpoint_is_by_number(tmp_path: Path) -> None:
    for step in (8, 12, 4):
        checkpoint(tmp_path, step)
    found = whole_checkpoint(tmp_path)
    assert found == tmp_path / "checkpoint-12"
    assert steps_done(found) == 12
    assert len(list(tmp_path.iterdir())) == 3


def test_torn_checkpoints_are_removed_down_to_a_whole_one(tmp_path: Path) -> None:
    older = checkpoint(tmp_path, 4, state="")
    whole = checkpoint(tmp_path, 8)
    for step, state, model in ((12, "", True), (16, '{"global_st', True), (20, None, False)):
        checkpoint(tmp_path, step, state, model=model)
    others = [tmp_path / "checkpoint-99.tmp", tmp_path / "runs"]
    for other in others:
        other.mkdir()
    assert whole_checkpoint(tmp_path) == whole
    assert sorted(tmp_path.iterdir()) == sorted([older, whole, *others])


def test_torn_checkpoints_alone_are_none(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4, state="")
    assert whole_checkpoint(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


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
        children.start(python("one", "import sys; sys.exit('no luck')"))
        wait_for(tmp_path / "one.log", "no luck")
        while children.ended("one") is None:
            time.sleep(0.01)
        with pytest.raises(ChildEnded, match=r"(?s)status 1.*no luck"):
            children.check("one")
        with pytest.raises(ChildEnded, match="status 3"):
            children.run(python("two", "raise SystemExit(3)"))
        children.run(python("three", "pass"))


def test_a_process_that_ends_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    inner = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    code = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {inner!r}]); "
        "print(p.pid)"
    )
    with Children(tmp_path) as children:
        children.run(python("one", code))
        wait_gone(int((tmp_path / "one.log").read_text()))


def test_a_number_that_may_be_anothers_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Children(tmp_path) as children:
        children.start(python("one", "pass"))
        while children.ended("one") is None:
            time.sleep(0.01)
        killed: list[int] = []
        monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
        children.kill("one")
        assert killed == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


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


class Breaks(http.server.BaseHTTPRequestHandler):
    """Ends in the middle of its first answer, as a server does that is killed."""

    asked = 0

    def do_GET(self) -> None:
        Breaks.asked += 1
        body = b'vllm:generation_tokens_total{engine="0"} 7.0\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + (Breaks.asked == 1)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


def test_half_an_answer_does_not_end_the_readings() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Breaks)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found = []
    with Meter({"server-0": f"http://127.0.0.1:{server.server_port}"}, every=0.01) as meter:
        deadline = time.monotonic() + 20
        while not found and time.monotonic() < deadline:
            found += meter.take()
            time.sleep(0.01)
    server.shutdown()
    thread.join()
    server.server_close()
    assert [sample.tokens for sample in found][:1] == [7.0]


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
        ({"tensors": 8}, False),
    ],
)
def test_an_engine_is_exact_only_if_all_of_it_was_compared(
    change: dict[str, object], good: bool
) -> None:
    assert exact({**GOOD, **change}, 3, 9) is good


def test_an_engine_without_tensors_is_never_exact() -> None:
    assert not exact({**GOOD, "tensors": 0}, 3, None)
    assert not exact({"error": "no answer"}, 3, None)


def test_what_does_not_answer_is_not_identical(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    end = {"version": 3, "state_digest": "d", "sha256": "5", "tensors": 9}
    urls, mirrors = {"server-0": f"http://127.0.0.1:{port}"}, {"server-0": tmp_path / "none"}
    said: list[str] = []
    proof = prove(end, str(tmp_path / "bucket"), urls, mirrors, said.append)
    assert proof["bit_identical"] is False
    assert [good for *_, good in proven(proof)] == [None, False, False, False]
    assert len(said) == 2
    assert proven(proof)[-1][1].startswith("no answer")


def test_a_run_that_published_nothing_proves_nothing() -> None:
    proof = {"version": 0, "sha256": "5", "state_digest": "d", "commit": "d", "tensors": 9}
    assert ("versions after the first", "none was published", "NOT PROVED", False) in proven(proof)
