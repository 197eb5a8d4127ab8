"""A demo process's side of its connection to the coordinator.

Standard input carries orders, one JSON object per line, the first of which configures the
process; it is also the lifeline: when it ends, the coordinator is gone and the process exits at
once. That is safe at any moment: neither a publish nor a mirror is harmed by a kill. Standard
output carries events; whatever else writes to it lands in the log together with standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO, Any

from thinwire.demo.events import Event, Failed, encode
from thinwire.errors import Misuse, ThinwireError

__all__ = ["Channel", "run_child"]

EXIT_ORPHANED = 3
_PR_SET_PDEATHSIG = 1


class Channel:
    """Orders in, events out. Sending is thread-safe.

    Attributes:
        config: the first order.
    """

    def __init__(self, orders: IO[bytes], events: IO[str]) -> None:
        self._events = events
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        first = orders.readline()
        if not first:
            os._exit(EXIT_ORPHANED)
        self.config: dict[str, Any] = json.loads(first)
        threading.Thread(target=self._listen, args=(orders,), name="orders", daemon=True).start()

    def _listen(self, orders: IO[bytes]) -> None:
        for line in orders:
            self._orders.put(json.loads(line))
        os._exit(EXIT_ORPHANED)

    def send(self, event: Event) -> None:
        """Report an event."""
        with self._sending:
            self._events.write(encode(event) + "\n")
            self._events.flush()

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next order; None when there is none within ``timeout`` seconds."""
        try:
            return self._orders.get(timeout=timeout)
        except queue.Empty:
            return None


def run_child(work: Callable[[Channel], None]) -> None:
    """Run a demo process: connect, work, report what went wrong, exit.

    Exits with 0, or with 1 after an error: its traceback is in the log, and its message, if it is
    one of thinwire's own, is sent to the coordinator.
    """
    _die_with_parent()
    channel = Channel(sys.stdin.buffer, _claim_stdout())
    code = 1
    try:
        work(channel)
        code = 0
    except BrokenPipeError:
        code = EXIT_ORPHANED
    except Exception as error:  # noqa: BLE001 - the last place that can say what happened
        traceback.print_exc()
        if isinstance(error, ThinwireError):
            channel.send(Failed(str(error), error.hint, isinstance(error, Misuse)))
    sys.stderr.flush()
    # not sys.exit: a thread that still waits for a response would keep the process alive
    os._exit(code)


def _claim_stdout() -> IO[str]:
    """The pipe for events; from here on file descriptor 1 is the log."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _die_with_parent() -> None:
    """Have Linux end this process with the coordinator, also while Python is inside a kernel."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)
