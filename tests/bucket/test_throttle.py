"""Pacing: the average holds in both directions, over threads, and in real time."""

from __future__ import annotations

import itertools
import threading
import time as real_time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thinwire.bucket import Bucket, LocalBucket, MemoryBucket, ThrottledBucket
from thinwire.bucket.throttle import Allowance
from thinwire.errors import InvalidKey, Misuse
from thinwire.testing import FaultyBucket
from thinwire.testing.conformance import BucketConformance


class TestOverMemory(BucketConformance):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return ThrottledBucket(MemoryBucket(), 1e9)


class TestOverLocal(BucketConformance):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return ThrottledBucket(LocalBucket(tmp_path / "bucket"), 1e9)

    @pytest.fixture
    def missing_bucket(self, tmp_path: Path) -> Bucket:
        return ThrottledBucket(LocalBucket(tmp_path / "nowhere"), 1e9)


class Time:
    def __init__(self) -> None:
        self.now = 50.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def inner() -> FaultyBucket:
    return FaultyBucket(MemoryBucket())


@pytest.fixture
def bucket(inner: FaultyBucket, time: Time) -> ThrottledBucket:
    return ThrottledBucket(inner, 1e6, clock=lambda: time.now, sleep=time.sleep)


def test_the_arithmetic() -> None:
    allowance = Allowance(100.0, 50.0)
    assert allowance.take(50, 0.0) == 0.0  # the burst
    assert allowance.take(100, 0.0) == 1.0
    assert allowance.take(100, 0.5) == 1.5  # both debts add up
    assert allowance.take(10, 100.0) == 0.0  # a pause saves no more than the burst
    assert allowance.take(100, 100.0) == pytest.approx(0.6)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(Misuse, match="bytes per second"):
        ThrottledBucket(MemoryBucket(), rate)


@pytest.mark.parametrize("operation", ["put", "create"])
def test_uploads_wait_before_they_begin(
    bucket: ThrottledBucket, inner: FaultyBucket, time: Time, operation: str, tmp_path: Path
) -> None:
    started, began = time.now, []
    inner.run(lambda _: began.append(time.now), operation, times=None)  # type: ignore[arg-type]
    source = tmp_path / "source"
    source.write_bytes(bytes(1_000_000))
    forms = (source, [bytes(600_000), bytes(400_000)], bytearray(1_000_000))
    for number, data in enumerate(forms):
        getattr(bucket, operation)(f"key{number}", data)
    assert [moment - started for moment in began] == pytest.approx([0.9, 1.9, 2.9])


@pytest.mark.parametrize("read", [Bucket.get, lambda b, k: b"".join(b.stream(k))])
def test_downloads_are_paced_while_they_run(
    bucket: ThrottledBucket, inner: FaultyBucket, time: Time, read: Callable[[Bucket, str], bytes]
) -> None:
    inner.inner.put("key", bytes(2_000_000))
    started = time.now
    read = ThrottledBucket.get if read is Bucket.get else read
    assert read(bucket, "key") == bytes(2_000_000)
    assert time.now - started == pytest.approx(1.9)
    moments = []
    for piece in bucket.stream("key"):
        assert len(piece) <= 100_000
        moments.append(time.now)
    steps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert steps == pytest.approx([0.1] * 19)


def test_a_wrong_call_is_refused_without_waiting(bucket: ThrottledBucket, time: Time) -> None:
    started = time.now
    with pytest.raises(InvalidKey):
        bucket.put("../key", bytes(10_000_000))
    assert time.now == started


def test_threads_share_one_allowance_in_real_time() -> None:
    bucket = ThrottledBucket(MemoryBucket(), 2e6)
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        bucket.put(f"key{number}", bytes(100_000))
        assert len(bucket.get(f"key{number}")) == 100_000

    began = real_time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    # 800 kB, of which 200 kB may go at once
    assert 0.29 < real_time.monotonic() - began < 1.5
