"""Waiting for the next look into a bucket, cut short when the bucket tells of a change."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from thinwire.bucket import Bucket

__all__ = ["Wakeup", "watching"]

_SLICE_S = 0.1


class Wakeup:
    """A pause between looks that a hint may end early."""

    def __init__(self) -> None:
        self._hinted = threading.Event()

    def hint(self) -> None:
        """Look now. Never blocks; may be called from any thread, for nothing, and twice."""
        self._hinted.set()

    def pause(self, seconds: float, stop: threading.Event, *, hints: bool = True) -> None:
        """Wait for ``seconds``, a hint since the last pause, or ``stop``.

        Args:
            hints: without, none will come, and the wait costs no wake-ups of its own.
        """
        if not hints:
            stop.wait(seconds)
            return
        end = time.monotonic() + seconds
        # two events and no way to wait for both: stop is looked at ten times a second
        while not stop.is_set() and (left := end - time.monotonic()) > 0:
            if self._hinted.wait(min(left, _SLICE_S)):
                break
        self._hinted.clear()


@contextlib.contextmanager
def watching(bucket: Bucket, prefix: str) -> Iterator[Wakeup]:
    """A :class:`Wakeup` that the bucket's own notifications, where it has them, hint at."""
    wakeup = Wakeup()
    end = bucket.watch(prefix, wakeup.hint)
    try:
        yield wakeup
    finally:
        end()
