"""A run as it is asked for, stopped, and carried out, with processes that stand in for the real
ones: they need no model. The real ones: `make wordle-faults`."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire import Publisher, open_bucket
from thinwire.demo.shared import empty_bucket
from thinwire.engines.client import UpdateClient
from thinwire.errors import Misuse, RunExists
from wordle.children import Child, Children, free_ports
from wordle.kills import Kill
from wordle.launch import SERVERS
from wordle.ledger import Ledger
from wordle.recipe import QUICK
from wordle.run import troubles
from wordle.run_folder import drop, fresh, locked, replace_text
from wordle.run_loop import Run, seconds
from wordle.settings import Settings
from wordle.view import Display

EXAMPLES = Path(__file__).parents[2] / "examples"


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- folders -----------------------------------------------------------------------------------


def test_a_folder_is_emptied_only_if_it_was_made_here(tmp_path: Path) -> None:
    work, old = tmp_path / "work", tmp_path / "run.json"
    fresh(work)
    (work / "inner").mkdir()
    (work / "inner" / "file").touch()
    old.touch()
    fresh(work, [old, tmp_path / "nothing"])
    assert not (work / "inner").exists()
    assert not old.exists()
    drop(work)
    assert not work.exists()


def test_a_folder_of_somebody_else_stays_as_it_is(tmp_path: Path) -> None:
    work, old = tmp_path / "work", tmp_path / "run.json"
    work.mkdir()
    (work / "thesis").touch()
    old.touch()
    with pytest.raises(Misuse, match="not made by a run"):
        fresh(work, [old])
    assert (work / "thesis").exists()
    assert old.exists()


def test_links_in_a_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    fresh(tmp_path / "work")
    (tmp_path / "work" / "link").symlink_to(tmp_path / "mine")
    fresh(tmp_path / "work")
    assert (tmp_path / "mine" / "file").exists()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "report"),
        pytest.raises(Misuse, match="in use"),
        locked(tmp_path / "report"),
    ):
        pass
    with locked(tmp_path / "report"):
        pass


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    replace_text(tmp_path / "run.json", "old")
    replace_text(tmp_path / "run.json", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_a_bucket_has_to_be_empty_and_shared(tmp_path: Path) -> None:
    url = empty_bucket(str(tmp_path / "bucket"))
    assert (tmp_path / "bucket").is_dir()
    with open_bucket(url) as bucket, Publisher(bucket, {"w": np.zeros(4, np.float32)}):
        pass
    with pytest.raises(RunExists):
        empty_bucket(url)
    with pytest.raises(Misuse, match="share"):
        empty_bucket("memory://x")


# --- the command -------------------------------------------------------------------------------

STAND_IN = f"""\
#!{sys.executable}
import os, signal, subprocess, sys, time
if sys.argv[1] == "-c":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", inner])
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{{os.getpid()}} {{process.pid}}\\n")
time.sleep(600)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Interpreters that only tell that they are there, and will not end by themselves."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    names = ("TRAINER", "VLLM", "WORDLE")
    return {
        **os.environ,
        **{f"THINWIRE_{name}_PYTHON": str(stand_in) for name in names},
        "PYTHONPATH": str(EXAMPLES),
        "PIDS": str(tmp_path / "pids"),
    }


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    folder = tmp_path / "models" / QUICK.model.key
    folder.mkdir(parents=True)
    (folder / "warmup.json").write_text('{"parameters": 9, "serving_bytes": 18}')
    options = ["--models", str(folder.parent), "--report", str(tmp_path / "report")]
    return [sys.executable, "-m", "wordle.run", "--quick", *options]


@pytest.mark.parametrize(
    "more", [["--steps", "0"], ["--kill", "trainer@11"], ["--bucket", "memory://x"]]
)
def test_wrong_usage_is_found_first(
    more: list[str], command: list[str], environ: dict[str, str], tmp_path: Path
) -> None:
    ended = subprocess.run([*command, *more], env=environ, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "pids").exists()


def test_a_report_that_cannot_be_a_folder_of_its_own(
    command: list[str], environ: dict[str, str], tmp_path: Path
) -> None:
    report = tmp_path / "report"

    def refused() -> str:
        ended = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert ended.returncode == 2
        (line,) = ended.stderr.splitlines()
        return line

    report.touch()
    assert "exists" in refused()
    report.unlink()
    (report / "work").mkdir(parents=True)
    (report / "work" / "thesis").touch()
    assert "not made by a run" in refused()
    assert (report / "work" / "thesis").exists()
    with (report / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "in use" in refused()
    assert not (tmp_path / "pids").exists()


def test_a_run_that_fails_leaves_a_report_that_says_so(
    command: list[str], environ: dict[str, str], tmp_path: Path
) -> None:
    report = tmp_path / "report"
    report.mkdir()
    for name in ("run.json", "index.html"):
        (report / name).write_text("bit-identical, long ago")
    (tmp_path / "python").write_text(STAND_IN.replace("signal.signal(", "sys.exit(3);(", 1))
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ended with status 3" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert json.loads((report / "run.json").read_text())["proof"] is None
    assert "not proved" in (report / "index.html").read_text()
    assert "Traceback" in (report / "logs" / "run.log").read_text()


@pytest.fixture
def running(
    command: list[str], environ: dict[str, str], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A run of which all processes are there, and their numbers."""
    pids = tmp_path / "pids"
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: pids.exists() and len(pids.read_text().split()) == 8)
        yield process, [int(pid) for pid in pids.read_text().split()]
    finally:
        process.kill()
        process.wait()
        for pid in map(int, pids.read_text().split()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_nothing_is_left_when_a_run_is_stopped_twice(
    running: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    process, pids = running
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in pids)


def test_nothing_is_left_when_a_run_is_killed(
    running: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    process, pids = running
    process.kill()
    process.wait()
    eventually(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- the loop ----------------------------------------------------------------------------------

SERVER = """
import http.server, json, sys, time
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"version": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): ...
time.sleep(0.5)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
TELL = """
import json, sys, time
def tell(path, **event):
    with open(path, "a") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\\n")
"""


class Stage:
    """What a launch has, with stand-ins: servers are at version 1, where training ends."""

    def __init__(self, folder: Path, trainer: str) -> None:
        self._folder, self._trainer = folder, trainer
        ports = free_ports(len(SERVERS))
        self.urls = {n: f"http://127.0.0.1:{p}" for n, p in zip(SERVERS, ports, strict=True)}
        names = ("steps_file", "arrivals_file", "games_file")
        self.steps_file, self.arrivals_file, self.games_file = (folder / name for name in names)

    def environment(self) -> Child:
        return self._child("environment", "import time; time.sleep(600)")

    def server(self, name: str) -> Child:
        return self._child(name, SERVER, self.urls[name].rpartition(":")[2])

    def follower(self) -> Child:
        path, more = str(self.arrivals_file), "version=1, paused_s=None, stage_s=None"
        lines = [f"tell({path!r}, url={url!r}, {more})" for url in self.urls.values()]
        return self._child("follower", "\n".join([TELL, *lines, "time.sleep(600)"]))

    def trainer(self) -> Child:
        return self._child("trainer", TELL + textwrap.dedent(self._trainer), str(self.steps_file))

    def _child(self, name: str, code: str, *arguments: str) -> Child:
        return Child(name, [sys.executable, "-c", code, *arguments], dict(os.environ))


def carried_out(folder: Path, trainer: str, *kills: Kill) -> tuple[Stage, Ledger, Children]:
    stage = Stage(folder, trainer)
    ledger = Ledger({url: name for name, url in stage.urls.items()}, full_bytes=18)
    children = Children(folder)
    with Display(ledger) as display:
        launch: Any = stage
        Run(1, launch, children, ledger, display, kills).go()
    return stage, ledger, children


STEP = 'tell(sys.argv[1], event="step", step=1, logs={"thinwire/version": 1})'
END = 'tell(sys.argv[1], event="end", version=1)'


def test_a_server_that_is_killed_at_the_end_is_waited_for(tmp_path: Path) -> None:
    kill = Kill("server-1", 1, 1.0)
    stage, ledger, children = carried_out(tmp_path, f"{STEP}\n{END}", kill)
    with children:
        assert [UpdateClient(url).version() for url in stage.urls.values()] == [1, 1]
    told = [happening.what for happening in ledger.happenings]
    assert told == ["server-1 killed", "server-1 started again"]
    assert seconds(ledger, 0.0)["run"] < 1.0  # the last version arrived before that


def test_a_trainer_that_has_ended_is_not_killed(tmp_path: Path) -> None:
    lines = f"""
        path, sys.argv[1] = sys.argv[1], sys.argv[1] + ".new"
        {STEP}
        {END}
        import os
        os.replace(sys.argv[1], path)  # both at once
        time.sleep(600)
    """
    kills = Kill("trainer", 1), Kill("follower", 2)
    _, ledger, children = carried_out(tmp_path, lines, *kills)
    with children:
        assert children.ended("trainer") is None
    told = [happening.what for happening in ledger.happenings]
    assert told == ["trainer@1 not done: training has ended", "follower@2 was never due"]


def test_a_trainer_that_ended_as_it_was_killed_is_not_started_again(tmp_path: Path) -> None:
    late = f"time.sleep(0.5); {END}".replace("sys.argv[1]", "path")
    code = f"{TELL}; path = sys.argv[1]; {late}".replace("\n; ", "\n")
    lines = f"""
        import subprocess
        {STEP}
        code = {code!r}
        subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True)
        time.sleep(600)
    """
    _, ledger, children = carried_out(tmp_path, lines, Kill("trainer", 1, 1.5))
    children.end()
    told = [happening.what for happening in ledger.happenings]
    assert told == ["trainer killed", "trainer not started again: training has ended"]


def test_a_trainer_that_is_killed_before_its_end_is_started_again(tmp_path: Path) -> None:
    lines = f"""
        import os
        if os.path.exists(sys.argv[1]):
            {END}
        else:
            {STEP}
            time.sleep(600)
    """
    _, ledger, children = carried_out(tmp_path, lines, Kill("trainer", 1, 0.2))
    children.end()
    told = [happening.what for happening in ledger.happenings]
    assert told == ["trainer killed", "trainer started again"]


def test_a_limit_for_what_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wordle.run_loop._SET_UP_S", 1.0)
    stage = Stage(tmp_path, "time.sleep(600)")
    ledger = Ledger({url: name for name, url in stage.urls.items()}, full_bytes=18)
    launch: Any = stage
    with Children(tmp_path) as children, Display(ledger) as display:
        run = Run(1, launch, children, ledger, display, [])
        with pytest.raises(TimeoutError, match="nothing from trainer after 1 s"):
            run.go()


# --- the trainer -------------------------------------------------------------------------------


@pytest.mark.trl
def test_a_training_that_was_over_is_published_and_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("openenv")
    from thinwire.chain import Chain
    from trainers._async_grpo import tiny_checkpoint
    from wordle import train

    folder = tmp_path / "output" / "checkpoint-10"
    tiny_checkpoint(folder)
    (folder / "trainer_state.json").write_text('{"global_step": 10}')
    bucket, told = str(tmp_path / "bucket"), tmp_path / "events"
    settings = Settings(
        "", bucket, ("http://127.0.0.1:1",), str(folder.parent), str(told), QUICK.training
    )
    settings.save(tmp_path / "settings.json")
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path / "settings.json")])
    for version in (0, 2):  # 1 is the commit that whoever goes on with a run makes first
        train.main()
        begin, end = map(json.loads, told.read_text().splitlines()[-2:])
        assert (begin["event"], begin["step"]) == ("begin", 10)
        assert (end["event"], end["version"]) == ("end", version)
        with open_bucket(bucket) as store:
            assert Chain(store).read(version).digest == end["state_digest"]


@pytest.mark.parametrize(
    ("failures", "behind", "told"),
    [(0.0, 4.0, 0), (5.0, 4.0, 0), (6.0, 4.0, 1), (0.0, 5.0, 1), (90.0, 9.0, 2)],
)
def test_failed_tools_and_stale_games_are_told(failures: float, behind: float, told: int) -> None:
    document = {
        "totals": {"tool_failures": failures, "guesses": 500, "max_staleness": behind},
        "recipe": {"training": {"max_staleness": 4}},
    }
    assert len(troubles(document)) == told
