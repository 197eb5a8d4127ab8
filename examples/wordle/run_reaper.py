"""Ends what a coordinator leaves behind when it is killed itself.

A process of its own listens at a pipe, which the system closes when the coordinator is gone, and
then kills the process groups that the coordinator has not ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

__all__ = ["Reaper"]


class Reaper:
    """The coordinator's side."""

    def __init__(self) -> None:
        reading, self._pipe = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reading)

    def watch(self, group: int) -> None:
        """A process group is there."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """It is not; its number may become another's."""
        self._tell(f"-{group}\n")

    def end(self) -> None:
        """End the listener, and whatever is still watched."""
        os.close(self._pipe)
        self._process.wait()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # without it the run goes on
            os.write(self._pipe, line.encode())


def _listen() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _listen()
