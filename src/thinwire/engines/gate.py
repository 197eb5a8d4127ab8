"""Generation and updates take turns: many generate at once, an update has the weights to itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

__all__ = ["Gate"]


class Gate:
    """A readers-writer lock that lets a waiting writer go first, and keeps its time.

    Attributes:
        closed_s: seconds that the gate has been held exclusively: nothing could be generated.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writing = False
        self._waiting = 0
        self.closed_s = 0.0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the gate together with other readers."""
        with self._condition:
            self._condition.wait_for(lambda: not self._writing and not self._waiting)
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the gate alone: waits for readers to leave, and keeps new ones out meanwhile."""
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._writing and not self._readers)
            finally:
                self._waiting -= 1
            self._writing = True
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._condition:
                self.closed_s += time.perf_counter() - started
                self._writing = False
                self._condition.notify_all()
