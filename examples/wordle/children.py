"""The processes of a run: each with its own interpreter, log and session, and none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wordle.run_reaper import Reaper

__all__ = ["Child", "ChildEnded", "Children", "free_ports"]

HOST = "127.0.0.1"
_GRACE_S = 5.0
_LOG_LINES = 15
_PR_SET_PDEATHSIG = 1


class ChildEnded(Exception):
    """A process ended that should have gone on."""


@dataclass(frozen=True)
class Child:
    """How to start a process.

    Attributes:
        name: also its log's.
        argv, env: the command and its whole environment.
        stdout: file that its output is added to; None: the log.
    """

    name: str
    argv: Sequence[str | Path]
    env: Mapping[str, str]
    stdout: Path | None = None


class Children:
    """Processes by name, on Linux. None of them, nor what they start, outlives this process.

    Call from the main thread: a process ends with the thread that started it.

    Args:
        logs: folder for ``<name>.log``, which a restarted process adds to.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._specs: dict[str, Child] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)
        self._reaper = Reaper()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self, child: Child) -> None:
        """Start it, without waiting until it can be used."""
        self._specs[child.name] = child
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((self._logs / f"{child.name}.log").open("ab"))
            out = log if child.stdout is None else stack.enter_context(child.stdout.open("ab"))
            process = subprocess.Popen(
                [str(part) for part in child.argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=dict(child.env),
                start_new_session=True,
                preexec_fn=_die_with_parent,  # the reaper does not know of it yet
            )
        self._processes[child.name] = process
        self._reaper.watch(process.pid)

    def run(self, child: Child) -> None:
        """Start it and wait until it has ended well.

        Raises:
            ChildEnded: it has not.
        """
        self.start(child)
        os.waitid(os.P_PID, self._processes[child.name].pid, os.WEXITED | os.WNOWAIT)
        if self.ended(child.name):
            self.check(child.name)
        del self._processes[child.name]

    def ended(self, name: str) -> int | None:
        """Its exit status; None while it runs."""
        process = self._processes[name]
        if process.returncode is None and _is_over(process.pid):
            self.kill(name)
        return process.returncode

    def check(self, *names: str) -> None:
        """Raise ChildEnded if one of them, or of all, does not run."""
        for name in names or self._processes:
            code = self.ended(name)
            if code is not None:
                raise ChildEnded(f"{name} ended with status {code}; {self._last(name)}")

    def kill(self, name: str) -> None:
        """SIGKILL it and everything it has started.

        Its number stays its own until it is waited for, which is therefore the last that is done.
        """
        process = self._processes[name]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._reaper.forget(process.pid)
            process.wait()

    def restart(self, name: str) -> None:
        """Start it again as it was started."""
        self.kill(name)
        self.start(self._specs[name])

    def end(self) -> None:
        """SIGTERM to all, then SIGKILL to whatever is left of their sessions."""
        for name, process in self._processes.items():
            if self.ended(name) is None:
                os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while any(self.ended(name) is None for name in self._processes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for name in self._processes:
            self.kill(name)
        self._reaper.end()

    def _last(self, name: str) -> str:
        log = self._logs / f"{name}.log"
        lines = log.read_text(errors="replace").rstrip().splitlines()[-_LOG_LINES:]
        return f"the last lines of {log}:\n  " + "\n  ".join(lines)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_over(pid: int) -> bool:
    """Whether a child has ended; it is not waited for, so its number stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on now, below those that outgoing connections are given."""
    found: list[int] = []
    for port in _candidates():
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind((HOST, port))
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError("there are no free ports")


def _candidates() -> Iterator[int]:
    first, last = 10_240, 30_000
    start = (os.getpid() * 131 + time.monotonic_ns() // 1000) % (last - first)
    for k in range(last - first):
        yield first + (start + 7 * k) % (last - first)
