"""Free ports, and servers that run in a process of their own for as long as a test needs them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

__all__ = ["ServerProcess", "answers", "free_port", "listens"]

HOST = "127.0.0.1"


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on now, below the range clients are given."""
    # From the ephemeral range it could be taken again, by an outgoing connection, before it is
    # used; and some servers derive a second port by adding 10000, which must stay below 65536.
    first, last = 10_240, 30_000
    for attempt in range(200):
        port = first + (os.getpid() * 131 + time.monotonic_ns() // 1000 + attempt) % (last - first)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind((HOST, port))
            return port
    raise RuntimeError("no free port found")


def listens(port: int) -> bool:
    """Something accepts connections on this port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def answers(url: str) -> bool:
    """Something at ``url`` speaks HTTP and does not answer with a server error."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


class ServerProcess:
    """A command that runs between ``start`` and ``stop``, or inside ``with``.

    Args:
        command: program and arguments.
        ready: asked again and again until it is true; the server can then be used.
        log: file that receives what the command prints.
        environment: the command's whole environment; None means this process's.
        folder: the command's working directory.
        patience: seconds to wait for readiness.

    ``stop`` kills the command's process group, and nothing else.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        ready: Callable[[], bool],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        patience: float = 60,
    ) -> None:
        self.command = command
        self.ready = ready
        self.log = log
        self.environment = environment
        self.folder = folder
        self.patience = patience
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command and wait until it is ready.

        Raises:
            RuntimeError: it ended early or did not become ready; the message ends with its log.
        """
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + self.patience
        try:
            while not self.ready():
                if self.process.poll() is not None:
                    raise self._failed(f"ended with status {self.process.returncode}")
                if time.monotonic() > deadline:
                    raise self._failed(f"was not ready after {self.patience:.0f} s")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the process group at once. Does nothing if it is not running."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _failed(self, what: str) -> RuntimeError:
        tail = self.log.read_text(errors="replace")[-3000:]
        return RuntimeError(f"{self.command[0]} {what}; its log ends with:\n{tail}")

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
