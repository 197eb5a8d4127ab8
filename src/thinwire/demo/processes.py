"""The coordinator's side: starting the demo's processes, hearing from them, ending them.

Children are separate interpreters in sessions of their own, so that Ctrl-C reaches the
coordinator alone and it decides how they end. No process outlives :meth:`Children.end`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from thinwire.demo.events import Event, Failed, decode
from thinwire.errors import Misuse, Stop

__all__ = ["ChildFailed", "ChildRefused", "Children", "Interrupted", "interruptible"]

GRACE_S = 3.0
_LOG_LINES = 12


class ChildFailed(Stop):
    """A process of the demo ended before its work was done, or hangs."""


class ChildRefused(Misuse):
    """A process of the demo was started with something it cannot work with."""


class Interrupted(BaseException):
    """A signal asked the coordinator to stop.

    Attributes:
        signum: which.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Child:
    """One process and what it said last."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.failure: Failed | None = None
        self.finished = False

    def send(self, order: Mapping[str, Any]) -> None:
        """Give an order; a child that is gone is found out about elsewhere."""
        if self.process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()


class Children:
    """All processes of a run, and one queue of what they report.

    Args:
        logs: folder for ``<name>.log``.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, Child] = {}
        self._events: queue.SimpleQueue[tuple[Child, Event | None]] = queue.SimpleQueue()

    def start(
        self, name: str, role: str, config: Mapping[str, Any], env: Mapping[str, str]
    ) -> None:
        """Start a :mod:`thinwire.demo.worker` and give it its configuration.

        Call from the main thread: on Linux a child ends with the thread that started it.
        """
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.demo.worker", role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(env),
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children[name] = child
        child.send(config)
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()

    def _listen(self, child: Child) -> None:
        with contextlib.suppress(ValueError):
            for line in child.process.stdout or ():
                event = decode(line)
                if isinstance(event, Failed):
                    child.failure = event
                else:
                    self._events.put((child, event))
        self._events.put((child, None))

    def send(self, name: str, order: Mapping[str, Any]) -> None:
        """Give one child an order."""
        self._children[name].send(order)

    def expect_end(self, name: str) -> None:
        """From here on this child may exit with 0."""
        self._children[name].finished = True

    def events(self, timeout: float) -> Iterator[tuple[str, Event]]:
        """What the children reported, as it comes; ends when nothing came for ``timeout`` s.

        Raises:
            ChildFailed, ChildRefused: a child ended that should not have.
        """
        while True:
            try:
                child, event = self._events.get(timeout=timeout)
            except queue.Empty:
                return
            if event is not None:
                yield child.name, event
            else:
                self._judge(child)

    def _judge(self, child: Child) -> None:
        """A child closed its pipe: raise unless it was to end and did so without an error."""
        try:
            code = child.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{child.name} closed its pipe and hangs", hint=_see(child)) from None
        if code == 0 and child.finished:
            return
        failure = child.failure
        if failure is not None and failure.misuse:
            raise ChildRefused(f"{child.name}: {failure.message}", hint=failure.hint)
        what = f"{failure.message}\n" if failure else ""
        raise ChildFailed(
            f"{child.name} {_ending(code)}: {what}{_last_lines(child.log)}", hint=_see(child)
        )

    def end(self, *, patience_s: float = 0.0) -> None:
        """End every child: wait for those that were told to stop, then SIGTERM, then SIGKILL.

        Args:
            patience_s: seconds for children that were told to stop.
        """
        _wait_all(self._children.values(), patience_s)
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.terminate()
        _wait_all(self._children.values(), GRACE_S)
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.kill()
                child.process.wait()
            with contextlib.suppress(OSError):
                if child.process.stdin:
                    child.process.stdin.close()


def _wait_all(children: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name} (exit code {code})"
    return f"was ended by signal {-code}"


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").rstrip().splitlines()
    except OSError as error:
        return f"its log cannot be read ({error})"
    if not lines:
        return "its log is empty"
    return "the last lines of its log:\n  " + "\n  ".join(lines[-_LOG_LINES:])


def _see(child: Child) -> str:
    return f"the whole log is in {child.log}"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into :class:`Interrupted`, once; later ones are ignored
    until the block ends, so that cleaning up is not interrupted by a second Ctrl-C.

    SIGHUP stays ignored where it is (under nohup). Does nothing outside the main thread, where
    Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signum)

    before = [(each, signal.signal(each, stop)) for each in signals]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)
