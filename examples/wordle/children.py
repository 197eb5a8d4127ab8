"""The processes of a run: each with its own interpreter, log and session, and none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Child", "ChildEnded", "Children", "answers", "free_ports"]

HOST = "127.0.0.1"
_GRACE_S = 5.0
_LOG_LINES = 15
_PR_SET_PDEATHSIG = 1


class ChildEnded(Exception):
    """A process ended that should have gone on, or did not get ready."""


@dataclass(frozen=True)
class Child:
    """How to start a process, and how to tell that it can be used.

    Attributes:
        name: also its log's.
        argv, env: the command and its whole environment.
        ready: asked again and again until it is true.
        patience: seconds until then.
        stdout: file that its output is added to; None: the log.
    """

    name: str
    argv: Sequence[str | Path]
    env: Mapping[str, str]
    ready: Callable[[], bool] = lambda: True
    patience: float = 300.0
    stdout: Path | None = None


class Children:
    """Processes by name. Call from the main thread: on Linux they end with the one that started
    them.

    Args:
        logs: folder for ``<name>.log``, which a restarted process adds to.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._specs: dict[str, Child] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self, child: Child) -> None:
        """Start it, without waiting until it is ready."""
        self._specs[child.name] = child
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((self._logs / f"{child.name}.log").open("ab"))
            out = log if child.stdout is None else stack.enter_context(child.stdout.open("ab"))
            self._processes[child.name] = subprocess.Popen(
                [str(part) for part in child.argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=dict(child.env),
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    def wait_ready(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until it is ready.

        Raises:
            ChildEnded: it ended, or its patience did.
        """
        child = self._specs[name]
        deadline = time.monotonic() + child.patience
        while not child.ready():
            self.check(name)
            if time.monotonic() > deadline:
                raise ChildEnded(
                    f"{name} is not ready after {child.patience:.0f} s; {self._last(name)}"
                )
            meanwhile()
            time.sleep(0.2)

    def run(self, child: Child) -> None:
        """Start it and wait until it has ended well.

        Raises:
            ChildEnded: it has not.
        """
        self.start(child)
        if self._processes[child.name].wait():
            self.check(child.name)
        del self._processes[child.name]

    def ended(self, name: str) -> int | None:
        """Its exit status; None while it runs."""
        return self._processes[name].poll()

    def check(self, *names: str) -> None:
        """Raise ChildEnded if one of them, or of all, does not run."""
        for name in names or self._processes:
            code = self._processes[name].poll()
            if code is not None:
                raise ChildEnded(f"{name} ended with status {code}; {self._last(name)}")

    def kill(self, name: str) -> None:
        """SIGKILL it and everything it has started."""
        process = self._processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def restart(self, name: str) -> None:
        """Start it again as it was started."""
        self.kill(name)
        self.start(self._specs[name])

    def end(self) -> None:
        """SIGTERM to all, then SIGKILL to whatever is left of their sessions."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for name in self._processes:
            self.kill(name)

    def _last(self, name: str) -> str:
        log = self._logs / f"{name}.log"
        lines = log.read_text(errors="replace").rstrip().splitlines()[-_LOG_LINES:]
        return f"the last lines of {log}:\n  " + "\n  ".join(lines)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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


def answers(url: str) -> bool:
    """Something there speaks HTTP and does not answer with a server error."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False
