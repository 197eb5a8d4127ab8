"""A bucket that fails on schedule.

    bucket = FaultyBucket(inner).fail("create", "commits/*", times=1, after=True)

Every method that adds a fault takes a pattern for keys (as in :mod:`fnmatch`; ``*`` also matches
slashes), ``times`` (how often; None: always) and ``skip`` (how many matching calls go well first),
and returns the bucket, so that a schedule reads as a chain. Faults strike in the order in which
they were added, and one that raises leaves the later ones for the next call:
``.fail("put").fail("put", after=True)`` refuses the first write and loses the second's response.
"""

from __future__ import annotations

import fnmatch
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thinwire.bucket import Bucket, Capabilities, Data, ObjectInfo
from thinwire.bucket.base import CHUNK
from thinwire.errors import BucketUnavailable, KeyNotFound, ThinwireError

__all__ = ["Call", "FaultyBucket", "Operation"]

Operation = Literal["get", "stream", "head", "put", "create", "list", "delete"]
When = Literal["before", "after", "hide", "change"]
READS: tuple[Operation, ...] = ("get", "stream", "head")


class Call(NamedTuple):
    """One call that reached the bucket; for ``list``, ``key`` is the prefix."""

    operation: Operation
    key: str


@dataclass
class _Fault:
    operations: tuple[Operation, ...]
    pattern: str
    times: int | None
    skip: int
    when: When
    act: Callable[[str], None] = lambda _: None
    change: Callable[[bytes], bytes] = lambda data: data
    fired: int = 0

    def matches(self, operation: Operation, key: str) -> bool:
        return operation in self.operations and fnmatch.fnmatchcase(key, self.pattern)

    def take(self) -> bool:
        """Whether the fault strikes this matching call."""
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None and self.fired >= self.times:
            return False
        self.fired += 1
        return True


class FaultyBucket(Bucket):
    """``inner``, seen through a bad connection. Thread-safe, as every bucket is.

    Attributes:
        calls: every call in order, whether it failed or not; ``stream`` and ``list`` count when
            their first item is asked for.
    """

    def __init__(self, inner: Bucket) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: list[Call] = []
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    # --- the schedule ----------------------------------------------------------------------

    def fail(
        self,
        operation: Operation,
        pattern: str = "*",
        *,
        times: int | None = 1,
        skip: int = 0,
        after: bool = False,
        error: type[ThinwireError] = BucketUnavailable,
    ) -> FaultyBucket:
        """Raise ``error`` before the operation, or after it took effect (a lost response).

        ``fail("create", after=True, error=AlreadyExists)`` is a client that retried by itself and
        found its own object. For ``stream``, after is behind the first piece.
        """

        def act(key: str) -> None:
            moment = "after" if after else "before"
            raise error(f"injected {moment} {operation} {key!r}")

        return self.run(act, operation, pattern, times=times, skip=skip, after=after)

    def delay(
        self,
        seconds: float,
        operation: Operation,
        pattern: str = "*",
        *,
        times: int | None = None,
        skip: int = 0,
        after: bool = False,
    ) -> FaultyBucket:
        """Sleep before the operation, or between its effect and its response."""
        return self.run(
            lambda _: time.sleep(seconds), operation, pattern, times=times, skip=skip, after=after
        )

    def run(
        self,
        action: Callable[[str], None],
        operation: Operation,
        pattern: str = "*",
        *,
        times: int | None = 1,
        skip: int = 0,
        after: bool = False,
    ) -> FaultyBucket:
        """Call ``action(key)`` at this point: let another writer in, stop the clock, raise."""
        when: When = "after" if after else "before"
        return self._add(_Fault((operation,), pattern, times, skip, when, act=action))

    def hide(self, pattern: str = "*", *, times: int | None = None, skip: int = 0) -> FaultyBucket:
        """Reads find no such object and listings leave it out; writes go through.

        Each object that a listing leaves out counts as one time.
        """
        return self._add(_Fault((*READS, "list"), pattern, times, skip, "hide"))

    def corrupt(
        self, pattern: str = "*", *, at: int = 0, times: int | None = None, skip: int = 0
    ) -> FaultyBucket:
        """Reads see the byte at index ``at`` (negative: from the end) with its lowest bit flipped.

        Reading an object without that byte raises :class:`IndexError`: the test is wrong.
        """

        def change(data: bytes) -> bytes:
            damaged = bytearray(data)
            damaged[at] ^= 1
            return bytes(damaged)

        fault = _Fault(("get", "stream"), pattern, times, skip, "change", change=change)
        return self._add(fault)

    def truncate(
        self, pattern: str = "*", *, at: int = 0, times: int | None = None, skip: int = 0
    ) -> FaultyBucket:
        """Reads end, without an error, before the byte at index ``at``; ``head`` knows better."""
        fault = _Fault(
            ("get", "stream"), pattern, times, skip, "change", change=lambda data: data[:at]
        )
        return self._add(fault)

    def heal(self) -> FaultyBucket:
        """Forget every fault; ``calls`` stays."""
        with self._lock:
            self._faults.clear()
        return self

    @property
    def unfired(self) -> tuple[str, ...]:
        """Faults that have not struck yet. A test whose faults never strike tests nothing."""
        with self._lock:
            return tuple(
                f"{'/'.join(fault.operations)} {fault.pattern}"
                for fault in self._faults
                if not fault.fired
            )

    # --- the bucket ------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        self._before("get", key)
        data = self.inner.get(key)
        for fault in self._due("change", "get", key):
            data = fault.change(data)
        self._after("get", key)
        return data

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        self._before("stream", key)
        pieces = self._pieces(key, chunk)
        first = next(pieces, b"")
        if first:
            yield first
        self._after("stream", key)
        yield from pieces

    def head(self, key: str) -> ObjectInfo:
        self._before("head", key)
        info = self.inner.head(key)
        self._after("head", key)
        return info

    def put(self, key: str, data: Data) -> None:
        self._before("put", key)
        self.inner.put(key, data)
        self._after("put", key)

    def create(self, key: str, data: Data) -> None:
        self._before("create", key)
        self.inner.create(key, data)
        self._after("create", key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._before("list", prefix)
        for info in self.inner.list(prefix):
            if not any(self._due("hide", "list", info.key)):
                yield info
        self._after("list", prefix)

    def delete(self, key: str) -> None:
        self._before("delete", key)
        self.inner.delete(key)
        self._after("delete", key)

    def forget(self, key: str) -> None:
        self.inner.forget(key)

    def watch(self, prefix: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self.inner.watch(prefix, wake)

    def close(self) -> None:
        self.inner.close()

    # --- inside ----------------------------------------------------------------------------

    def _add(self, fault: _Fault) -> FaultyBucket:
        with self._lock:
            self._faults.append(fault)
        return self

    def _due(self, when: When, operation: Operation, key: str) -> Iterator[_Fault]:
        """The faults that strike now. One that raises leaves the later ones for the next call."""
        for fault in tuple(self._faults):
            if fault.when == when and fault.matches(operation, key):
                with self._lock:
                    strikes = fault.take()
                if strikes:
                    yield fault

    def _before(self, operation: Operation, key: str) -> None:
        with self._lock:
            self.calls.append(Call(operation, key))
        for fault in self._due("before", operation, key):
            fault.act(key)
        if operation in READS and any(self._due("hide", operation, key)):
            raise KeyNotFound(f"no object {key!r} in {self.url}")

    def _after(self, operation: Operation, key: str) -> None:
        for fault in self._due("after", operation, key):
            fault.act(key)

    def _pieces(self, key: str, chunk: int) -> Iterator[bytes]:
        changes = tuple(self._due("change", "stream", key))
        if not changes:
            yield from self.inner.stream(key, chunk=chunk)
            return
        data = b"".join(self.inner.stream(key, chunk=chunk))
        for fault in changes:
            data = fault.change(data)
        for start in range(0, len(data), chunk):
            yield data[start : start + chunk]
