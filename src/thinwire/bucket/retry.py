"""Waiting out a store that does not answer: tries again, with growing random pauses.

Only :class:`~thinwire.errors.BucketUnavailable` is tried again; every other error is an answer. A
write whose response was lost may have happened: ``create`` can then find its own object and raise
``AlreadyExists``, which callers expect of any store.

A stream or a listing goes on where it broke off. The interface has no reading from an offset, so
the bytes handed out before are read again, compared by their hash, and left out.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from thinwire.bucket.base import CHUNK, Bucket, Data, ObjectInfo
from thinwire.bucket.wrapper import WrappedBucket
from thinwire.errors import BucketUnavailable, Misuse

__all__ = ["RetryPolicy", "RetryingBucket"]

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How long an outage is waited out, and how the tries are spread over it. All in seconds.

    Attributes:
        deadline: no new try begins later than this after a call's first failure. What came before
            does not count: an upload that breaks off after ten minutes is tried again, too.
        first: the first pause is drawn between 0 and this; the bound doubles with every failure.
        longest: the largest bound.

    Raises:
        Misuse: a negative or infinite number of seconds.
    """

    deadline: float = 60.0
    first: float = 0.1
    longest: float = 10.0

    def __post_init__(self) -> None:
        for name in ("deadline", "first", "longest"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise Misuse(f"{name}={seconds!r}", hint="give a number of seconds, 0 or more")

    def pause(
        self, failures: int, elapsed: float, draw: float, retry_after: float | None = None
    ) -> float | None:
        """Seconds to wait before the next try; None to give up. ("Full jitter".)

        Args:
            failures: in a row, at least 1.
            elapsed: seconds since the first of them.
            draw: a random number from [0, 1).
            retry_after: what the store asked for. It comes on top of the random pause, so that
                those who were turned away together do not come back together.
        """
        bound = min(self.longest, self.first * 2.0 ** min(failures - 1, 64))
        asked = retry_after if retry_after is not None and retry_after > 0 else 0.0
        wait = asked + draw * bound
        return wait if elapsed + wait <= self.deadline else None


class RetryingBucket(WrappedBucket):
    """``inner``, with patience.

    Args:
        policy: how much of it.
        clock, sleep, draw: monotonic seconds, waiting, and random numbers from [0, 1); for tests.

    Raises:
        BucketUnavailable: from any operation, once the deadline leaves no time for another try:
            the last error, which then says how many tries there were. Also when an object was
            replaced while it was streamed: the pieces already handed out are of the old one.
    """

    def __init__(
        self,
        inner: Bucket,
        policy: RetryPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()
        self._clock, self._sleep, self._draw = clock, sleep, draw

    def get(self, key: str) -> bytes:
        return self._call(lambda: self.inner.get(key))

    def head(self, key: str) -> ObjectInfo:
        return self._call(lambda: self.inner.head(key))

    def put(self, key: str, data: Data) -> None:
        self._call(lambda: self.inner.put(key, data))

    def create(self, key: str, data: Data) -> None:
        self._call(lambda: self.inner.create(key, data))

    def delete(self, key: str) -> None:
        self._call(lambda: self.inner.delete(key))

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        given = _Given(f"{key!r} in {self.url}")
        return self._resumed(lambda: given.rest(self.inner.stream(key, chunk=chunk)), given.note)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        last = ""

        def note(info: ObjectInfo) -> None:
            nonlocal last
            last = info.key

        def rest() -> Iterator[ObjectInfo]:
            return (info for info in self.inner.list(prefix) if not last or info.key > last)

        return self._resumed(rest, note)

    # --- inside ----------------------------------------------------------------------------

    def _call(self, work: Callable[[], T]) -> T:
        outage = _Outage(self)
        while True:
            try:
                return work()
            except BucketUnavailable as error:
                outage.wait(error)

    def _resumed(self, rest: Callable[[], Iterator[T]], note: Callable[[T], None]) -> Iterator[T]:
        """Items of ``rest()``, called again after a failure: it leaves out what was noted."""
        outage = _Outage(self)
        items: Iterator[T] | None = None
        while True:
            try:
                if items is None:
                    items = rest()
                item = next(items)
            except StopIteration:
                return
            except _Replaced:
                raise
            except BucketUnavailable as error:
                items = None
                outage.wait(error)
                continue
            outage = _Outage(self)  # progress: what was before is over
            note(item)
            yield item


class _Outage:
    """The failures in a row of one call."""

    def __init__(self, bucket: RetryingBucket) -> None:
        self._bucket = bucket
        self._failures = 0
        self._since = 0.0

    def wait(self, error: BucketUnavailable) -> None:
        """Sleep until the next try, or raise that there is none."""
        bucket = self._bucket
        now = bucket._clock()
        if not self._failures:
            self._since = now
        self._failures += 1
        elapsed = now - self._since
        wait = bucket.policy.pause(self._failures, elapsed, bucket._draw(), error.retry_after)
        if wait is None:
            if self._failures == 1:
                raise error
            raise BucketUnavailable(
                f"{error} (gave up after {self._failures} tries in {elapsed:.1f} s)",
                hint=error.hint,
                retry_after=error.retry_after,
            ) from error
        bucket._sleep(wait)


class _Replaced(BucketUnavailable):
    """Bytes read again are not those that were handed out."""

    default_hint = "the object was replaced while it was read: read it again from its start"


class _Given:
    """The bytes of a stream that were handed out, as their number and hash."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._size = 0
        self._hash = hashlib.sha256()

    def note(self, piece: bytes) -> None:
        self._size += len(piece)
        self._hash.update(piece)

    def rest(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """``pieces`` without the bytes handed out, once these have proved the same."""
        again, left = hashlib.sha256(), self._size
        for piece in pieces:
            if left:
                again.update(piece[:left])
                piece, left = piece[left:], max(0, left - len(piece))
                if left:
                    continue
                self._require(again.digest())
            if piece:
                yield piece
        if left:
            raise _Replaced(f"{self._what} became shorter while it was read")

    def _require(self, digest: bytes) -> None:
        if digest != self._hash.digest():
            raise _Replaced(f"{self._what} changed while it was read")
