"""What is counted, and that counting changes nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thinwire.bucket import Bucket, LocalBucket, MemoryBucket, MeteredBucket, Metrics
from thinwire.errors import AlreadyExists, BucketUnavailable, KeyNotFound, Misuse
from thinwire.testing import FaultyBucket
from thinwire.testing.conformance import BucketConformance


class TestOverMemory(BucketConformance):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return MeteredBucket(MemoryBucket(), Metrics())


class TestOverLocal(BucketConformance):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return MeteredBucket(LocalBucket(tmp_path / "bucket"), Metrics())

    @pytest.fixture
    def missing_bucket(self, tmp_path: Path) -> Bucket:
        return MeteredBucket(LocalBucket(tmp_path / "nowhere"), Metrics())


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def bucket(metrics: Metrics) -> MeteredBucket:
    return MeteredBucket(FaultyBucket(MemoryBucket()), metrics)


def counted(metrics: Metrics, operation: str) -> tuple[int, int, int, dict[str, int]]:
    row = metrics.snapshot()[operation]
    return row["calls"], row["bytes_in"], row["bytes_out"], row["errors"]


def test_bytes_and_calls(bucket: MeteredBucket, metrics: Metrics, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 1000)
    bucket.put("a", [b"12", b"345"])
    bucket.put("a", source)
    bucket.create("b", b"xyz")
    bucket.get("a")
    assert len(list(bucket.stream("a", chunk=100))) == 10
    bucket.head("a")
    assert len(list(bucket.list())) == 2
    bucket.delete("a")
    assert counted(metrics, "put") == (2, 0, 1005, {})
    assert counted(metrics, "create") == (1, 0, 3, {})
    assert counted(metrics, "get") == (1, 1000, 0, {})
    assert counted(metrics, "stream") == (1, 1000, 0, {})
    for operation in ("head", "list", "delete"):
        assert counted(metrics, operation) == (1, 0, 0, {})
    total = metrics.summary()
    assert (total["calls"], total["bytes_in"], total["bytes_out"]) == (8, 2000, 1008)
    assert total["seconds"] == pytest.approx(
        sum(row["seconds"] for row in metrics.snapshot().values())
    )


def test_errors_are_counted_by_class(bucket: MeteredBucket, metrics: Metrics) -> None:
    bucket.create("a", b"x")
    with pytest.raises(AlreadyExists):
        bucket.create("a", b"yy")
    for _ in range(2):
        with pytest.raises(KeyNotFound):
            list(bucket.stream("nope"))
    with pytest.raises(Misuse):
        bucket.put("b", Path("/nowhere/at/all"))
    assert isinstance(bucket.inner, FaultyBucket)
    bucket.inner.fail("list", after=True)
    with pytest.raises(BucketUnavailable):
        list(bucket.list())
    assert counted(metrics, "create") == (2, 0, 1, {"AlreadyExists": 1})
    assert counted(metrics, "stream") == (2, 0, 0, {"KeyNotFound": 2})
    assert counted(metrics, "list") == (1, 0, 0, {"BucketUnavailable": 1})
    assert metrics.summary()["errors"] == {
        "AlreadyExists": 1,
        "BucketUnavailable": 1,
        "KeyNotFound": 2,
        "Misuse": 1,
    }


def test_a_stream_left_early_is_no_error(bucket: MeteredBucket, metrics: Metrics) -> None:
    bucket.put("a", b"x" * 100)
    pieces = bucket.stream("a", chunk=10)
    next(pieces)
    assert "stream" not in metrics.snapshot()
    del pieces
    assert counted(metrics, "stream") == (1, 10, 0, {})


def test_only_the_stores_time_counts(bucket: MeteredBucket, metrics: Metrics) -> None:
    bucket.put("a", b"x" * 30)
    assert isinstance(bucket.inner, FaultyBucket)
    bucket.inner.delay(0.05, "stream")
    for _ in bucket.stream("a", chunk=10):
        time.sleep(0.05)
    assert 0.05 <= metrics.snapshot()["stream"]["seconds"] < 0.15


def test_threads_lose_no_count(bucket: MeteredBucket, metrics: Metrics) -> None:
    bucket.put("a", b"xy")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: bucket.get("a"), range(400)))
    assert counted(metrics, "get") == (400, 800, 0, {})
    metrics.reset()
    assert metrics.snapshot() == {}
    assert metrics.summary() == {
        "calls": 0,
        "bytes_in": 0,
        "bytes_out": 0,
        "seconds": 0,
        "errors": {},
    }
