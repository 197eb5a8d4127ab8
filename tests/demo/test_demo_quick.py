"""``thinwire demo --quick``: the whole thing, and how it ends when it is cut short."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.demo.settings import Settings, split_threads

COMMAND = [sys.executable, "-c", "from thinwire.cli import main; main()", "demo", "--quick"]
ROW = re.compile(r"^ +(\d+) +\1 +0\.\d{3} ", re.MULTILINE)


def start(tiny_dir: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *options],
        cwd=folder,
        env={**os.environ, "THINWIRE_CACHE": str(tiny_dir.parent), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not finished after {seconds} s:\n{out}\n{err}")


def test_a_whole_run(tiny_dir: Path, tmp_path: Path) -> None:
    process = start(tiny_dir, tmp_path, "--json", "figures.json", "--keep", "kept")
    out, err = finish(process, 120)
    assert process.returncode == 0, err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"bit_identical", "versions", "totals"}
    assert figures["bit_identical"] is True
    versions = figures["versions"]
    assert len(versions) >= 5
    for number, version in enumerate(versions, 1):
        assert version["version"] == version["step"] == number
        assert version["payload_bytes"] <= 6 * version["changed"] + 256 * version["tensors"]
        assert version["staleness"] <= 2
        assert set(version["servers"]) == {"server-0", "server-1"}
        assert all(applied["pause_ms"] > 0 for applied in version["servers"].values())
    assert len({used for version in versions for used in version["used"]}) >= 3
    assert figures["totals"]["versions_used"] >= 3
    assert [int(row) for row in ROW.findall(err)] == list(range(1, len(versions) + 1))
    assert "bit-identical" in out
    assert out.count(": identical") == 4
    check_report(tmp_path / "demo-report", figures)
    mirrors = [tmp_path / "kept" / name / "model.safetensors" for name in ("server-0", "server-1")]
    assert mirrors[0].read_bytes() == mirrors[1].read_bytes()
    assert (tmp_path / "kept" / "bucket" / "commits").is_dir()


def check_report(report: Path, figures: dict[str, Any]) -> None:
    run = json.loads((report / "run.json").read_text())
    assert {key: run[key] for key in figures} == figures
    page = (report / "index.html").read_text()
    assert page.count("<svg") == 8
    for name in ("server-0", "server-1"):
        side = json.loads((report / f"{name}.json").read_text())
        assert side["weights"]["sha256"] == run["proof"]["sha256"]
        assert len(side["applied"]) == len(figures["versions"])
        assert (report / "logs" / f"{name}.log").is_file()
    assert (report / "logs" / "trainer.log").is_file()


# --- cut short -----------------------------------------------------------------------------


def parents() -> dict[int, int]:
    """Parent of every process that still runs (zombies do not)."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(entry)] = int(parent)
    return found


def children_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """The demo's processes by role; servers in the order of their start."""
    found: dict[str, int] = {}
    for pid, parent in sorted(parents().items()):
        if parent == process.pid:
            line = Path("/proc", str(pid), "cmdline").read_bytes().decode()
            role = line.rstrip("\0").rpartition("\0")[2]
            found[role if role not in found else f"{role}-1"] = pid
    return found


def all_children(process: subprocess.Popen[str]) -> dict[str, int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = children_of(process)
        if set(found) == {"trainer", "server", "server-1"}:
            return found
        time.sleep(0.05)
    pytest.fail("the demo did not start its processes")


def first_version(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    said = []
    for line in process.stderr:
        if ROW.match(line):
            watchdog.cancel()
            return
        said.append(line)
    watchdog.cancel()
    pytest.fail(f"no version was ever applied:\n{''.join(said)}")


def gone(pids: dict[str, int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not set(pids.values()) & set(parents()):
            return True
        time.sleep(0.05)
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux
@pytest.mark.parametrize(
    ("victim", "how", "code", "said"),
    [
        ("demo", signal.SIGINT, 130, "stopped by SIGINT"),
        ("server", signal.SIGKILL, 5, "server-0 was ended by SIGKILL (exit code -9)"),
        ("trainer", signal.SIGTERM, 5, "trainer was ended by SIGTERM (exit code -15)"),
    ],
)
def test_an_end_in_the_middle_of_training(
    tiny_dir: Path, tmp_path: Path, victim: str, how: signal.Signals, code: int, said: str
) -> None:
    process = start(tiny_dir, tmp_path, "--steps", "500")
    try:
        first_version(process)
        pids = all_children(process)
        began = time.monotonic()
        os.kill({"demo": process.pid, **pids}[victim], how)
        _, err = finish(process, 30)
    finally:
        process.kill()
    assert time.monotonic() - began < 15
    assert process.returncode == code, err
    assert said in err
    assert "Traceback" not in err
    assert gone(pids, 0.5)
    assert not list(tmp_path.glob("thinwire-demo-*")), "the temporary folder is left behind"


@linux
@pytest.mark.parametrize(
    "end", [lambda p: p.send_signal(signal.SIGTERM), lambda p: p.kill()], ids=["SIGTERM", "SIGKILL"]
)
def test_an_end_while_starting(
    tiny_dir: Path, tmp_path: Path, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    process = start(tiny_dir, tmp_path)
    try:
        pids = all_children(process)
        end(process)
        finish(process, 30)
    finally:
        process.kill()
    assert process.returncode in (143, -signal.SIGKILL)
    assert gone(pids, 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--bucket", "memory://x"), "cannot share"),
        (("--bucket", "nope://x"), "unknown bucket scheme"),
        (("--steps", "0"), "--steps"),
    ],
)
def test_options_that_cannot_work(
    tiny_dir: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    process = start(tiny_dir, tmp_path, *options)
    _, err = finish(process, 60)
    assert process.returncode == 2
    assert said in err


def test_a_bucket_that_holds_a_run_already(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "run.json").write_text("{}")
    process = start(tiny_dir, tmp_path, "--bucket", "bucket")
    _, err = finish(process, 60)
    assert process.returncode not in (0, 1)
    assert "error: " in err
    assert "Traceback" not in err


# --- settings ------------------------------------------------------------------------------


def test_settings_survive_json() -> None:
    settings = Settings.of(bucket="b", quick=False, steps=3, seed=7, cores=2)
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert settings.recipe.steps == 3


@pytest.mark.parametrize("cores", [1, 2, 4, 16, 128])
def test_every_process_gets_a_thread(cores: int) -> None:
    trainer, server = split_threads(cores, tiny=False)
    assert 1 <= server <= trainer <= max(1, cores)
    assert split_threads(cores, tiny=True) == (1, 1)
