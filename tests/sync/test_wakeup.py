"""A bucket that tells of changes wakes its followers; none of them depends on it."""

from __future__ import annotations

import threading
import time

import numpy as np

from thinwire import Publisher, Replica
from thinwire.bucket import Bucket, LocalBucket, MemoryBucket
from thinwire.mirror import MemoryMirror
from thinwire.wakeup import Wakeup, watching

LONG_S = 60.0


def weights(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(100, value, np.float32)}


def followed(bucket: Bucket, poll: float) -> tuple[list[float], threading.Thread]:
    """Moments at which versions 0 to 3 arrive, filled in by a thread that follows ``bucket``."""
    moments: list[float] = []

    def follow() -> None:
        updates = Replica(bucket, MemoryMirror()).follow(poll=poll, until=3)
        moments.extend(time.monotonic() for _ in updates)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return moments, thread


def test_a_follower_is_woken_long_before_its_next_look() -> None:
    bucket = MemoryBucket()
    moments, thread = followed(bucket, poll=LONG_S)
    with Publisher(bucket, weights(0)) as publisher:
        for value in (1, 2, 3):
            publisher.publish(weights(value)).result()
    thread.join(LONG_S / 2)
    assert len(moments) == 4


def test_a_lost_hint_costs_one_poll_and_nothing_else() -> None:
    class Silent(MemoryBucket):
        def watch(self, prefix, wake):  # type: ignore[no-untyped-def]
            return super().watch(prefix, lambda: None)

    bucket = Silent()
    moments, thread = followed(bucket, poll=0.05)
    with Publisher(bucket, weights(0)) as publisher:
        for value in (1, 2, 3):
            publisher.publish(weights(value)).result()
    thread.join(LONG_S / 2)
    assert len(moments) == 4


def test_a_bucket_without_notifications_is_polled(tmp_path) -> None:  # type: ignore[no-untyped-def]
    bucket = LocalBucket(tmp_path)
    assert not bucket.capabilities.notifications
    bucket.watch("commits/", lambda: None)()
    moments, thread = followed(bucket, poll=0.02)
    with Publisher(bucket, weights(0)) as publisher:
        for value in (1, 2, 3):
            publisher.publish(weights(value)).result()
    thread.join(LONG_S / 2)
    assert len(moments) == 4


def test_stop_ends_a_long_pause() -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    started = time.monotonic()
    Wakeup().pause(LONG_S, stop)
    assert time.monotonic() - started < LONG_S / 2


def test_a_hint_before_the_pause_counts() -> None:
    wakeup = Wakeup()
    wakeup.hint()
    started = time.monotonic()
    wakeup.pause(LONG_S, threading.Event())
    assert time.monotonic() - started < LONG_S / 2


def test_watching_ends_with_the_block() -> None:
    bucket, hints = MemoryBucket(), []
    with watching(bucket, "commits/") as wakeup:
        wakeup.hint = lambda: hints.append(1)  # type: ignore[method-assign]
    bucket.put("commits/x", b"")
    assert not hints
    ended = bucket.watch("a/", lambda: hints.append(2))
    bucket.put("b/x", b"")
    bucket.put("a/x", b"")
    ended()
    ended()
    bucket.put("a/y", b"")
    assert hints == [2]
