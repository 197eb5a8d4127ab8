"""A bound on how many bytes per second go to and come from a store.

Both directions draw on one allowance, shared by all threads that use the bucket:

* **Downloads** are paced while they run: pieces are small, and each is paid for before the next
  is taken. The store's client fetches ahead of that, at the line's speed, by a bounded amount: an
  object store up to ``WINDOW`` times ``CONCURRENCY`` bytes of ``thinwire.bucket.objects``, the Hub
  a whole object where it comes through the Xet store. So the average holds, and a smaller object
  is a burst.
* **Uploads** are paid for before they begin and then go at the line's speed: a store takes its
  data in one call. The average holds, over a version or a shard; a single upload is a burst.

Requests, listings and what the client sends again on its own are not counted.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

from thinwire.bucket.base import CHUNK, Bucket, Data, check_key, data_size
from thinwire.bucket.wrapper import WrappedBucket
from thinwire.errors import Misuse

__all__ = ["Allowance", "ThrottledBucket"]

_SMALLEST = 1 << 16


class Allowance:
    """A token bucket as arithmetic: it says how long to wait, and never waits itself.

    Args:
        rate: bytes per second.
        burst: bytes that may go at once after a pause.

    Raises:
        Misuse: a rate or burst that is not positive and finite.
    """

    def __init__(self, rate: float, burst: float) -> None:
        if not all(math.isfinite(number) and number > 0 for number in (rate, burst)):
            raise Misuse(f"{rate!r} bytes per second", hint="give a positive number")
        self.rate, self.burst = float(rate), float(burst)
        self._paid_until = -math.inf

    def take(self, size: int, now: float) -> float:
        """Take ``size`` bytes at the time ``now``; return the seconds until they are paid for."""
        earliest = now - self.burst / self.rate
        self._paid_until = max(self._paid_until, earliest) + size / self.rate
        return max(0.0, self._paid_until - now)


class ThrottledBucket(WrappedBucket):
    """``inner`` at no more than ``bytes_per_second`` on average, both directions together.

    A tenth of a second's worth may go at once.

    Args:
        clock, sleep: monotonic seconds, and waiting; for tests.

    Raises:
        Misuse: not a positive number of bytes per second.
    """

    def __init__(
        self,
        inner: Bucket,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._allowance = Allowance(bytes_per_second, bytes_per_second / 10)
        self._piece = max(_SMALLEST, int(bytes_per_second / 10))
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        return b"".join(self.stream(key))

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        for piece in self.inner.stream(key, chunk=min(chunk, self._piece)):
            self._pay(len(piece))
            yield piece

    def put(self, key: str, data: Data) -> None:
        self._pay(data_size(data), key)
        self.inner.put(key, data)

    def create(self, key: str, data: Data) -> None:
        self._pay(data_size(data), key)
        self.inner.create(key, data)

    def _pay(self, size: int, key: str | None = None) -> None:
        if key is not None:
            check_key(key)  # a wrong call is refused at once
        with self._lock:
            wait = self._allowance.take(size, self._clock())
        if wait > 0:
            self._sleep(wait)
