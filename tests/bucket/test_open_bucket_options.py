"""open_bucket's options: which wrappers, in which order, around what."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from thinwire import Publisher
from thinwire.bucket import (
    Bucket,
    CachedBucket,
    LocalBucket,
    MemoryBucket,
    MeteredBucket,
    Metrics,
    RetryingBucket,
    ThrottledBucket,
    WrappedBucket,
    innermost,
    open_bucket,
)
from thinwire.errors import Misuse
from thinwire.mirror import MemoryMirror
from thinwire.replica import Replica
from thinwire.testing import FaultyBucket
from thinwire.testing.conformance import BucketConformance


def layers(bucket: Bucket) -> list[type[Bucket]]:
    """From the outside in."""
    found = [type(bucket)]
    while isinstance(bucket, WrappedBucket):
        bucket = bucket.inner
        found.append(type(bucket))
    return found


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    """What s3:// opens."""
    store = MemoryBucket()
    monkeypatch.setattr("thinwire.bucket._OPENERS", {"s3": lambda url: store})
    return store


class TestEverythingAround(BucketConformance):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return open_bucket(
            tmp_path / "bucket",
            deadline=5.0,
            bandwidth=1e9,
            cache=tmp_path / "cache",
            metrics=Metrics(),
        )

    @pytest.fixture
    def missing_bucket(self, tmp_path: Path) -> Bucket:
        return open_bucket(tmp_path / "nowhere", cache=tmp_path / "cache", deadline=5.0)


def test_stores_over_a_network_are_retried(remote: MemoryBucket) -> None:
    bucket = open_bucket("s3://name/prefix")
    assert layers(bucket) == [RetryingBucket, MemoryBucket]
    assert isinstance(bucket, RetryingBucket)
    assert bucket.policy.deadline == 60.0
    assert innermost(bucket) is remote
    assert layers(open_bucket("s3://name/prefix", deadline=0)) == [MemoryBucket]


def test_others_only_on_request(tmp_path: Path) -> None:
    assert layers(open_bucket(tmp_path)) == [LocalBucket]
    assert layers(open_bucket("memory://")) == [MemoryBucket]
    assert layers(open_bucket(tmp_path, deadline=3.0)) == [RetryingBucket, LocalBucket]
    assert layers(open_bucket(tmp_path, bandwidth=1e6)) == [ThrottledBucket, LocalBucket]
    store = MemoryBucket()
    assert open_bucket(store) is store
    assert layers(open_bucket(store, metrics=Metrics())) == [MeteredBucket, MemoryBucket]


def test_the_order(remote: MemoryBucket, tmp_path: Path) -> None:
    bucket = open_bucket(
        "s3://name/prefix", bandwidth=1e6, cache=tmp_path / "cache", metrics=Metrics()
    )
    assert layers(bucket) == [
        CachedBucket,
        RetryingBucket,
        ThrottledBucket,
        MeteredBucket,
        MemoryBucket,
    ]
    assert bucket.url == remote.url
    assert bucket.capabilities == remote.capabilities


def test_every_try_is_counted_and_hits_are_not(tmp_path: Path) -> None:
    metrics = Metrics()
    faulty = FaultyBucket(MemoryBucket())
    faulty.put("deltas/1", b"x")
    faulty.fail("stream", times=2)
    bucket = open_bucket(faulty, deadline=5.0, cache=tmp_path / "cache", metrics=metrics)
    for _ in range(3):
        assert bucket.get("deltas/1") == b"x"
    row = metrics.snapshot()["stream"]
    assert (row["calls"], row["errors"], row["bytes_in"]) == (3, {"BucketUnavailable": 2}, 1)


@pytest.mark.parametrize(
    "option", [{"deadline": -1.0}, {"bandwidth": 0}, {"cache_limit": -1}, {"cache": __file__}]
)
def test_options_that_make_no_sense(tmp_path: Path, option: dict[str, object]) -> None:
    with pytest.raises(Misuse):
        open_bucket("memory://", **{"cache": tmp_path, **option})  # type: ignore[arg-type]


def test_watching_and_closing_reach_the_store() -> None:
    class Closing(MemoryBucket):
        closed = False

        def close(self) -> None:
            self.closed = True

    store = Closing()
    with open_bucket(store, deadline=1.0, bandwidth=1e9, metrics=Metrics()) as bucket:
        woken = []
        end = bucket.watch("commits/", lambda: woken.append(1))
        bucket.put("commits/1", b"x")
        end()
        bucket.put("commits/2", b"x")
        assert woken == [1]
    assert store.closed


def test_a_run_goes_through_all_of_it(tmp_path: Path) -> None:
    """Sixteen replicas of one host, one payload each time, over a store that often fails."""
    import numpy as np

    from thinwire.dtypes import dtype
    from thinwire.weights import FlatTensor

    faulty = FaultyBucket(MemoryBucket())
    metrics = Metrics()
    bits = np.arange(10_000, dtype="<u2")
    source = [("w", FlatTensor(bits, dtype("BF16"), (10_000,)))]
    with Publisher(open_bucket(faulty, deadline=10.0), source) as publisher:
        for version in range(1, 4):
            bits[version * 100 : version * 100 + 50] += 1
            faulty.fail("create", skip=1).fail("head").fail("stream")
            publisher.publish(source).result()
    for operation in ("stream", "head"):
        for number in range(6):
            faulty.fail(operation, skip=5 * number)  # type: ignore[arg-type]
    started = time.monotonic()
    for _ in range(16):
        store = open_bucket(faulty, deadline=10.0, cache=tmp_path / "cache", metrics=metrics)
        mirror = MemoryMirror()
        Replica(store, mirror).sync()
        assert np.array_equal(mirror.tensors[0], bits)
    assert time.monotonic() - started < 30
    fetched = [
        call for call in faulty.calls if call.operation == "stream" and "deltas/" in call.key
    ]
    assert len({call.key for call in fetched}) == 3
    assert len(fetched) <= 3 + 6
