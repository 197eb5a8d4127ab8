"""The bucket that fails on schedule."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from thinwire.bucket import Bucket, MemoryBucket
from thinwire.errors import AccessDenied, AlreadyExists, BucketUnavailable, KeyNotFound
from thinwire.testing import FaultyBucket
from thinwire.testing.conformance import OPERATIONS, BucketConformance


class TestWithoutFaults(BucketConformance):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return FaultyBucket(MemoryBucket())


@pytest.fixture
def inner() -> MemoryBucket:
    inner = MemoryBucket()
    inner.put("commits/1", b"one")
    inner.put("deltas/1", b"0123456789")
    return inner


@pytest.fixture
def bucket(inner: MemoryBucket) -> FaultyBucket:
    return FaultyBucket(inner)


def test_a_write_refused(bucket: FaultyBucket, inner: Bucket) -> None:
    bucket.fail("create", "commits/*", times=2)
    for _ in range(2):
        with pytest.raises(BucketUnavailable, match="before create 'commits/2'"):
            bucket.create("commits/2", b"two")
    with pytest.raises(KeyNotFound):
        inner.get("commits/2")
    bucket.create("commits/2", b"two")
    assert inner.get("commits/2") == b"two"


def test_a_response_lost(bucket: FaultyBucket, inner: Bucket) -> None:
    bucket.fail("create", "commits/*", after=True)
    with pytest.raises(BucketUnavailable, match="after create"):
        bucket.create("commits/2", b"two")
    assert inner.get("commits/2") == b"two"
    with pytest.raises(AlreadyExists):
        bucket.create("commits/2", b"two")


def test_a_client_that_retried_by_itself(bucket: FaultyBucket, inner: Bucket) -> None:
    bucket.fail("create", after=True, error=AlreadyExists)
    with pytest.raises(AlreadyExists):
        bucket.create("commits/2", b"two")
    assert inner.get("commits/2") == b"two"


def test_no_response_is_lost_when_the_operation_itself_fails(bucket: FaultyBucket) -> None:
    bucket.fail("create", after=True)
    with pytest.raises(AlreadyExists):
        bucket.create("commits/1", b"other")
    assert bucket.unfired == ("create *",)


def test_faults_strike_one_after_another(bucket: FaultyBucket, inner: Bucket) -> None:
    bucket.fail("put").fail("put", error=AccessDenied).fail("put", after=True)
    for error in (BucketUnavailable, AccessDenied):
        with pytest.raises(error):
            bucket.put("new", b"x")
    assert bucket.unfired == ("put *",)
    with pytest.raises(BucketUnavailable):
        bucket.put("new", b"x")
    assert inner.get("new") == b"x"
    bucket.put("new", b"y")


def test_skip(bucket: FaultyBucket) -> None:
    bucket.fail("get", "commits/*", skip=2)
    for _ in range(2):
        bucket.get("commits/1")
        bucket.get("deltas/1")
    with pytest.raises(BucketUnavailable):
        bucket.get("commits/1")
    bucket.get("commits/1")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("operation", [*OPERATIONS, "list"])
def test_every_operation_can_fail(inner: Bucket, operation: str, after: bool) -> None:
    calls: dict[str, Callable[[Bucket, str], object]] = {
        **OPERATIONS,
        "list": lambda bucket, _: list(bucket.list()),
    }
    inner.delete("commits/2")
    bucket = FaultyBucket(inner).fail(operation, after=after, times=None)  # type: ignore[arg-type]
    key = "commits/2" if operation == "create" else "commits/1"
    for _ in range(2):
        inner.delete("commits/2")
        with pytest.raises(BucketUnavailable):
            calls[operation](bucket, key)
        inner.put("commits/1", b"one")


def test_a_stream_breaks_off(bucket: FaultyBucket) -> None:
    bucket.fail("stream", after=True)
    pieces = bucket.stream("deltas/1", chunk=4)
    assert next(pieces) == b"0123"
    with pytest.raises(BucketUnavailable):
        next(pieces)
    assert list(bucket.stream("deltas/1", chunk=4)) == [b"0123", b"4567", b"89"]


def test_delay(bucket: FaultyBucket) -> None:
    bucket.delay(0.05, "get", times=1).delay(0.05, "stream", after=True, times=1)
    for read in (bucket.get, lambda key: b"".join(bucket.stream(key, chunk=3))):
        start = time.monotonic()
        assert read("deltas/1") == b"0123456789"
        assert time.monotonic() - start >= 0.05


def test_run_lets_another_writer_in(bucket: FaultyBucket, inner: Bucket) -> None:
    bucket.run(lambda key: inner.create(key, b"theirs"), "create", "commits/*")
    with pytest.raises(AlreadyExists):
        bucket.create("commits/2", b"ours")
    assert inner.get("commits/2") == b"theirs"


def test_hide(bucket: FaultyBucket, inner: Bucket) -> None:
    bucket.hide("commits/*")
    for operation in ("get", "stream", "head"):
        with pytest.raises(KeyNotFound):
            OPERATIONS[operation](bucket, "commits/1")
    assert [info.key for info in bucket.list()] == ["deltas/1"]
    with pytest.raises(AlreadyExists):
        bucket.create("commits/1", b"x")
    bucket.delete("commits/1")
    assert [info.key for info in inner.list()] == ["deltas/1"]


def test_hide_for_a_while(bucket: FaultyBucket) -> None:
    bucket.hide("commits/*", times=1)
    with pytest.raises(KeyNotFound):
        bucket.head("commits/1")
    assert bucket.head("commits/1").size == 3


def test_corrupt(bucket: FaultyBucket, inner: Bucket) -> None:
    bucket.corrupt("deltas/*", at=-1, times=2).corrupt("deltas/*", times=1)
    assert bucket.get("deltas/1") == b"1123456788"
    assert list(bucket.stream("deltas/1", chunk=6)) == [b"012345", b"6788"]
    assert bucket.get("deltas/1") == inner.get("deltas/1") == b"0123456789"
    bucket.corrupt("deltas/*", at=10)
    with pytest.raises(IndexError):
        bucket.get("deltas/1")


def test_truncate(bucket: FaultyBucket) -> None:
    bucket.truncate("deltas/*", at=4).truncate("commits/*")
    assert bucket.get("deltas/1") == b"0123"
    assert list(bucket.stream("deltas/1", chunk=3)) == [b"012", b"3"]
    assert bucket.head("deltas/1").size == 10
    assert bucket.get("commits/1") == b""
    assert list(bucket.stream("commits/1")) == []


def test_calls_are_recorded(bucket: FaultyBucket) -> None:
    bucket.fail("get")
    with pytest.raises(BucketUnavailable):
        bucket.get("commits/1")
    bucket.put("x", b"")
    list(bucket.list("commits/"))
    assert bucket.calls == [("get", "commits/1"), ("put", "x"), ("list", "commits/")]


def test_heal(bucket: FaultyBucket) -> None:
    bucket.fail("get", times=None).hide().corrupt().heal()
    assert bucket.get("commits/1") == b"one"
    assert bucket.unfired == ()


def test_it_looks_like_the_bucket_inside(bucket: FaultyBucket, inner: Bucket) -> None:
    assert bucket.capabilities is inner.capabilities
    assert bucket.url == inner.url


def test_faults_do_not_need_pytest() -> None:
    code = "import thinwire.testing.faults, sys; sys.exit('pytest' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
