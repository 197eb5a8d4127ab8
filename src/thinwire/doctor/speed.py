"""How fast a bucket answers and moves bytes, as seen from here now."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from thinwire.doctor.estimate import Speed
from thinwire.doctor.probe import Probe
from thinwire.errors import CorruptPayload

__all__ = ["latency", "throughput"]


def latency(probe: Probe, rounds: int) -> dict[str, float]:
    """Median seconds of put, create, get, head and list, for 1 kB."""
    bucket, content = probe.bucket, os.urandom(1000)
    seconds: dict[str, list[float]] = {}

    def timed(operation: str, call: Callable[..., object], *arguments: object) -> None:
        started = time.perf_counter()
        call(*arguments)
        seconds.setdefault(operation, []).append(time.perf_counter() - started)

    for number in range(rounds):
        key = probe.key(f"put-{number}")
        timed("put", bucket.put, key, content)
        timed("create", bucket.create, probe.key(f"create-{number}"), content)
        timed("get", bucket.get, key)
        timed("head", bucket.head, key)
        timed("list", lambda: list(bucket.list(probe.prefix)))
    return {operation: statistics.median(times) for operation, times in seconds.items()}


def throughput(probe: Probe, size: int, latencies: dict[str, float]) -> Speed:
    """Bytes per second of one random object of ``size`` bytes, up and then down.

    Raises:
        CorruptPayload: other bytes come back.
    """
    content, key = memoryview(os.urandom(size)), probe.key("large")
    started = time.perf_counter()
    probe.bucket.put(key, [content])
    put = time.perf_counter()
    seen = 0
    for piece in probe.bucket.stream(key):
        if piece != content[seen : seen + len(piece)]:
            break
        seen += len(piece)
    got = time.perf_counter()
    if seen != size:
        raise CorruptPayload(f"of {size} bytes written, those from {seen} on come back changed")
    return Speed(latencies, up=size / (put - started), down=size / (got - put))
