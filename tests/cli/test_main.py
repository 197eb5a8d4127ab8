"""The command line itself: speed, help, statuses, streams."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pty
import subprocess
import sys

import click
import click.testing
import numpy as np
import pytest

from thinwire import errors
from thinwire.cli import _COMMANDS, main
from thinwire.cli.exits import exit_code
from thinwire.log.commit import Commit


def test_help_lists_everything_and_the_exit_statuses(cli) -> None:
    out = cli("--help").stdout
    for command in ("publish", "pull", "log", "inspect", "diff", "verify", "bench", "demo"):
        assert f"\n  {command} " in out
    for status in ("0", "1", "2", "3", "4", "5", "130", "141"):
        assert f"\n  {status:>5}  " in out
    assert cli("--version").stdout.startswith("thinwire, version ")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from thinwire.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'numba', 'numpy', 'torch', 'rich'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", [name for name in _COMMANDS if name != "demo"])
def test_every_command_explains_itself(cli, name) -> None:
    out = cli(name, "--help").stdout
    if name == "bench":
        out = cli(name, "diff", "--help").stdout
    assert "--json" in out
    assert "JSON: " in out
    module, _, attribute = _COMMANDS[name].target.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)


PROGRAM = [sys.executable, "-c", "from thinwire.cli import main; main()"]

TREE = {
    errors.Retryable: 3,
    errors.Resync: 4,
    errors.Stop: 5,
    errors.Misuse: 2,
}


def test_every_error_has_the_status_of_its_branch() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        expected = next((code for branch, code in TREE.items() if issubclass(kind, branch)), 1)
        assert exit_code(kind("x")) == expected, name
    assert exit_code(errors.ThinwireError("x")) == 1
    assert exit_code(RuntimeError("x")) == 1
    assert exit_code(PermissionError(13, "denied")) == 2
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(BrokenPipeError()) == 141


def test_wrong_usage(cli) -> None:
    for args in (["frobnicate"], ["pull"], ["pull", "a", "b", "--version", "x"], ["log", "--no"]):
        result = cli(*args, status=2)
        assert result.stdout == ""
        assert "Usage: " in result.stderr


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch):
    """``thinwire log`` raises what the test wants."""

    def fail_with(error: BaseException) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("thinwire.bucket.open_bucket", fail)

    return fail_with


def test_a_bug_is_reported_without_a_traceback(cli, broken) -> None:
    broken(ZeroDivisionError("oops"))
    said = cli.fails("log", "x", status=1)
    assert "error: ZeroDivisionError: oops" in said
    assert "THINWIRE_TRACEBACK=1" in said


def test_the_systems_errors_are_reported_too(cli, broken) -> None:
    broken(OSError(28, "No space left on device", "/data/mirror"))
    said = cli.fails("log", "x", status=2)
    assert "No space left on device" in said


@pytest.mark.parametrize("how", ["--traceback", "environment"])
def test_a_traceback_on_request(broken, how, monkeypatch) -> None:
    broken(errors.RunNotFound("no run"))
    if how == "environment":
        monkeypatch.setenv("THINWIRE_TRACEBACK", "1")
    args = ["--traceback"] * (how == "--traceback") + ["log", "x"]
    result = click.testing.CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "error: no run" in result.stderr


def test_ctrl_c(cli, broken) -> None:
    broken(KeyboardInterrupt())
    result = cli("log", "x", status=130)
    assert (result.stdout, result.stderr) == ("", "interrupted\n")


def test_the_demo_without_its_extras_says_what_to_install(cli, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "thinwire.demo.command", None)
    said = cli.fails("demo", status=2)
    assert 'pip install "thinwire[demo]"' in said


def test_a_reader_that_goes_away_is_no_error(bucket, process) -> None:
    run = process("log", bucket)
    run.stdout.close()
    assert run.wait(timeout=30) == 141
    assert run.stderr.read() == ""
    run.stderr.close()


def test_a_real_process_separates_the_streams(bucket, process, tmp_path) -> None:
    run = process("log", tmp_path / "nowhere")
    out, err = run.communicate(timeout=30)
    assert (run.returncode, out) == (2, "")
    assert err.startswith("error: no bucket at ")
    assert "Traceback" not in err
    run = process("log", bucket)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (0, "")
    assert out.startswith("run ")


@pytest.mark.parametrize("command", ["verify", "log", "publish", "pull"])
def test_progress_is_shown_on_a_terminal_and_only_on_stderr(bucket, tmp_path, command) -> None:
    more = {
        "publish": [tmp_path / "published-0", bucket],
        "pull": [bucket, tmp_path / "mirror"],
    }.get(command, [bucket])
    terminal, end = pty.openpty()
    run = subprocess.Popen(
        [*PROGRAM, command, *map(str, more), "--json"],
        stdout=subprocess.PIPE,
        stderr=end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(end)
    out, _ = run.communicate(timeout=30)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert run.returncode == 0
    assert json.loads(out)
    assert "━" in shown
    assert "\x1b[2K" in shown, "it is taken away in the end"


def test_what_the_terminals_encoding_lacks_is_escaped(checkpoint, process, tmp_path) -> None:
    folder = checkpoint("a", tensors={"größe.重み": np.zeros((2, 3), "f2")})
    for encoding in ("ascii", "ascii:surrogateescape"):
        started = process(
            "inspect", folder / "model.safetensors", env={"PYTHONIOENCODING": encoding}
        )
        stdout, stderr = started.communicate(timeout=60)
        assert (started.returncode, stderr) == (0, ""), encoding
        assert "\\u91cd" in stdout


def test_json_is_json_whatever_a_folder_is_called(bucket, tmp_path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    command = [sys.executable, "-c", "from thinwire.cli import main; main()"]
    done = subprocess.run(
        [*command, "pull", bucket, folder, "--json"], capture_output=True, check=True
    )
    assert os.fsencode(json.loads(done.stdout.decode("utf-8"))["folder"]) == folder


def test_a_bucket_cannot_speak_to_the_terminal(cli, bucket) -> None:
    path = bucket / "commits" / "0000000002.json"
    commit = dataclasses.replace(Commit.decode(path.read_bytes()), codec="\x1b]0;owned\x07\x9b1m")
    path.write_bytes(commit.encode())
    for arguments in (["log", bucket], ["inspect", bucket], ["inspect", path], ["verify", bucket]):
        shown = cli(*arguments).stdout
        assert not any(c in shown for c in "\x1b\x07\x9b"), arguments
    assert "\\x1b]0;owned" in cli("log", bucket).stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams_are_no_bug(bucket, closed) -> None:
    call = f'"{sys.executable}" -c "from thinwire.cli import main; main()" log "$0" {closed}'
    done = subprocess.run(["sh", "-c", call, bucket], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("value", "coloured"), [("", True), ("1", False)])
def test_no_color(cli, bucket, monkeypatch, value, coloured) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    runner = click.testing.CliRunner()
    result = runner.invoke(main, ["log", str(bucket / "nope")], color=True)
    assert ("\x1b[" in result.stderr) == coloured
