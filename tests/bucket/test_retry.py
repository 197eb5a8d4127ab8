"""Retries: which errors, how long, and streams and listings that go on where they broke off."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from thinwire.bucket import Bucket, LocalBucket, MemoryBucket, RetryingBucket, RetryPolicy
from thinwire.chain import Outcome, create_record
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    KeyNotFound,
    Misuse,
    ThinwireError,
)
from thinwire.testing import FaultyBucket
from thinwire.testing.conformance import OPERATIONS, BucketConformance
from thinwire.testing.faults import Operation


class Time:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def inner() -> MemoryBucket:
    bucket = MemoryBucket()
    for number in range(6):
        bucket.put(f"commits/{number}", bytes([65 + number]) * 10)
    bucket.put("deltas/1", bytes(range(100)))
    return bucket


@pytest.fixture
def faulty(inner: MemoryBucket) -> FaultyBucket:
    return FaultyBucket(inner)


@pytest.fixture
def bucket(faulty: FaultyBucket, time: Time) -> RetryingBucket:
    return RetryingBucket(faulty, clock=lambda: time.now, sleep=time.sleep, draw=lambda: 0.5)


class TestOverMemory(BucketConformance):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return RetryingBucket(MemoryBucket())


class TestOverLocal(BucketConformance):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return RetryingBucket(LocalBucket(tmp_path / "bucket"))

    @pytest.fixture
    def missing_bucket(self, tmp_path: Path) -> Bucket:
        return RetryingBucket(LocalBucket(tmp_path / "nowhere"))


class TestOverABadConnection(BucketConformance):
    """A third of all calls fail, before or after they took effect: nobody notices.

    ``create`` fails only before: after it, a retry finds its own object, as it may. So does
    ``stream``, whose object the suite replaces while it is read.
    """

    @pytest.fixture
    def bucket(self) -> Bucket:
        calls = itertools.count()

        def sometimes(key: str) -> None:
            if next(calls) % 3 == 0:
                raise BucketUnavailable("injected")

        faulty = FaultyBucket(MemoryBucket())
        for operation in get_args(Operation):
            faulty.run(sometimes, operation, times=None)
            if operation not in ("create", "stream"):
                faulty.run(sometimes, operation, times=None, after=True)
        return RetryingBucket(faulty, RetryPolicy(first=0.0))


# --- the decision --------------------------------------------------------------------------


def test_the_bound_doubles_up_to_the_longest() -> None:
    policy = RetryPolicy(deadline=1000, first=0.1, longest=1.0)
    pauses = [policy.pause(failures, 0.0, 1.0) for failures in (1, 2, 3, 4, 5, 6, 5000)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert policy.pause(3, 0.0, 0.0) == 0.0


def test_what_the_store_asks_for_comes_on_top() -> None:
    policy = RetryPolicy(deadline=60, first=0.1)
    assert policy.pause(1, 0.0, 0.5, 7.0) == pytest.approx(7.05)
    assert policy.pause(1, 0.0, 0.5, -7.0) == pytest.approx(0.05)
    assert policy.pause(1, 0.0, 0.5, float("nan")) == pytest.approx(0.05)
    assert policy.pause(1, 0.0, 0.0, 61.0) is None


def test_no_try_begins_after_the_deadline() -> None:
    policy = RetryPolicy(deadline=10.0, first=4.0)
    assert policy.pause(1, 8.0, 0.5) == 2.0
    assert policy.pause(1, 8.01, 0.5) is None
    assert RetryPolicy(deadline=0.0).pause(1, 0.0, 0.5) is None


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_impossible_policies(seconds: float) -> None:
    with pytest.raises(Misuse, match="deadline"):
        RetryPolicy(deadline=seconds)


# --- single calls --------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["get", "head", "put", "delete", "stream"])
@pytest.mark.parametrize("after", [False, True])
def test_an_outage_is_waited_out(
    bucket: RetryingBucket, faulty: FaultyBucket, time: Time, operation: str, after: bool
) -> None:
    faulty.fail(operation, times=3, after=after)  # type: ignore[arg-type]
    OPERATIONS[operation](bucket, "commits/1")
    assert [call.operation for call in faulty.calls] == [operation] * 4
    assert time.slept == pytest.approx([0.05, 0.1, 0.2])


@pytest.mark.parametrize("error", [AccessDenied, BucketNotFound, KeyNotFound])
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_answers_are_not_asked_for_again(
    bucket: RetryingBucket, faulty: FaultyBucket, operation: str, error: type[ThinwireError]
) -> None:
    faulty.fail(operation, error=error, times=None)  # type: ignore[arg-type]
    with pytest.raises(error):
        OPERATIONS[operation](bucket, "new")
    assert len(faulty.calls) == 1


def test_the_last_error_says_how_long_it_was_tried(
    bucket: RetryingBucket, faulty: FaultyBucket, time: Time
) -> None:
    started = time.now
    faulty.fail("get", times=None)
    with pytest.raises(BucketUnavailable) as caught:
        bucket.get("commits/1")
    said = str(caught.value)
    tries = len(faulty.calls)
    assert "injected before get 'commits/1'" in said
    assert f"gave up after {tries} tries in {time.now - started:.1f} s" in said
    assert 50 < time.now - started <= 60
    assert 10 < tries < 20
    assert caught.value.hint == BucketUnavailable.default_hint


def test_a_store_may_ask_to_be_left_alone(
    bucket: RetryingBucket, faulty: FaultyBucket, time: Time
) -> None:
    def refuse(key: str) -> None:
        raise BucketUnavailable("slow down", retry_after=20.0)

    faulty.run(refuse, "get", times=None)
    with pytest.raises(BucketUnavailable, match="3 tries") as caught:
        bucket.get("commits/1")
    assert time.slept == pytest.approx([20.05, 20.1])
    assert caught.value.retry_after == 20.0


def test_a_long_transfer_that_breaks_off_is_tried_again(
    bucket: RetryingBucket, faulty: FaultyBucket, time: Time
) -> None:
    def hang(key: str) -> None:
        time.now += 600.0
        raise BucketUnavailable("connection lost")

    faulty.run(hang, "put")
    bucket.put("anchors/1", b"x")
    assert len(faulty.calls) == 2


def test_without_time_the_error_is_the_stores_own(faulty: FaultyBucket) -> None:
    faulty.fail("get")
    with pytest.raises(BucketUnavailable, match=r"^injected before get 'commits/1'$"):
        RetryingBucket(faulty, RetryPolicy(deadline=0.0)).get("commits/1")


def test_a_lost_response_to_create_finds_its_own_object(
    bucket: RetryingBucket, faulty: FaultyBucket
) -> None:
    faulty.fail("create", after=True)
    with pytest.raises(AlreadyExists):
        bucket.create("commits/7", b"mine")
    assert bucket.get("commits/7") == b"mine"
    faulty.fail("create", after=True)
    assert create_record(bucket, "commits/8", b"mine") is Outcome.COMMITTED
    assert create_record(bucket, "commits/8", b"yours") is Outcome.LOST


# --- streams -------------------------------------------------------------------------------


class Broken(MemoryBucket):
    """Streams break off after so many bytes, once for each number."""

    def __init__(self, *breaks: int, chunks: tuple[int, ...] = (7,)) -> None:
        super().__init__()
        self.breaks = list(breaks)
        self.chunks = list(chunks)
        self.on_break: Callable[[], None] = lambda: None

    def stream(self, key: str, *, chunk: int = 7) -> Iterator[bytes]:
        data, sent = self.get(key), 0
        # every connection cuts the object differently
        chunk = self.chunks.pop(0) if len(self.chunks) > 1 else self.chunks[0]
        stop = self.breaks.pop(0) if self.breaks else 10**9
        for start in range(0, len(data), chunk):
            if sent + chunk > stop:
                if stop > sent:
                    yield data[sent:stop]
                self.on_break()
                raise BucketUnavailable("connection lost")
            yield data[start : start + chunk]
            sent += chunk
        if sent >= stop:
            raise BucketUnavailable("connection lost at the end")


CONTENT = bytes(range(256)) * 2


@pytest.mark.parametrize("breaks", [(0,), (1,), (7,), (10, 10, 10), (300, 20, 0, 509), (511, 512)])
@pytest.mark.parametrize("chunks", [(7,), (7, 5, 64, 1), (64, 7, 500)])
def test_a_stream_goes_on_where_it_broke_off(
    time: Time, breaks: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    inner = Broken(*breaks, chunks=chunks)
    inner.put("key", CONTENT)
    bucket = RetryingBucket(inner, clock=lambda: time.now, sleep=time.sleep)
    pieces = list(bucket.stream("key"))
    assert b"".join(pieces) == CONTENT
    assert min(map(len, pieces)) > 0
    assert len(time.slept) == len(breaks)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (b"\0" * 512, "changed while it was read"),
        (CONTENT[:9], "became shorter"),
        (b"", "became shorter"),
        (CONTENT[:9] + b"\xff" + CONTENT[10:], "changed while it was read"),
    ],
)
def test_an_object_replaced_meanwhile_is_not_mixed(time: Time, later: bytes, said: str) -> None:
    inner = Broken(10)
    inner.put("key", CONTENT)
    inner.on_break = lambda: inner.put("key", later)
    bucket = RetryingBucket(inner, clock=lambda: time.now, sleep=time.sleep)
    pieces = []
    with pytest.raises(BucketUnavailable, match=said) as caught:
        pieces.extend(bucket.stream("key"))
    assert "read it again from its start" in caught.value.hint
    assert len(time.slept) == 1, "the same would come out again"


def test_an_object_deleted_meanwhile_is_missing(time: Time) -> None:
    inner = Broken(10)
    inner.put("key", CONTENT)
    inner.on_break = lambda: inner.delete("key")
    with pytest.raises(KeyNotFound):
        list(RetryingBucket(inner, sleep=time.sleep).stream("key"))


def test_progress_ends_an_outage(time: Time) -> None:
    """Forty breaks with a minute of transfer between them, and always only the first pause."""
    inner = Broken(*range(7, 287, 7))
    inner.put("key", CONTENT)

    def minute() -> None:
        time.now += 60.0

    inner.on_break = minute
    bucket = RetryingBucket(inner, clock=lambda: time.now, sleep=time.sleep, draw=lambda: 1.0)
    assert b"".join(bucket.stream("key")) == CONTENT
    assert time.slept == pytest.approx([0.1] * 40)


def test_a_stream_without_progress_gives_up(time: Time) -> None:
    inner = Broken(*[10] * 1000)
    inner.put("key", CONTENT)
    bucket = RetryingBucket(inner, clock=lambda: time.now, sleep=time.sleep, draw=lambda: 0.5)
    started, pieces = time.now, []
    with pytest.raises(BucketUnavailable, match="gave up"):
        pieces.extend(bucket.stream("key"))
    assert 50 < time.now - started <= 60


# --- listings ------------------------------------------------------------------------------


class BrokenListing(MemoryBucket):
    def __init__(self, *breaks: int) -> None:
        super().__init__()
        self.breaks = list(breaks)

    def list(self, prefix: str = "") -> Iterator[object]:  # type: ignore[override]
        stop = self.breaks.pop(0) if self.breaks else 10**9
        for number, info in enumerate(super().list(prefix)):
            if number == stop:
                raise BucketUnavailable("connection lost")
            yield info


@pytest.mark.parametrize("breaks", [(0,), (1,), (3, 2, 5), (5, 5, 0, 5)])
def test_a_listing_goes_on_after_its_last_key(time: Time, breaks: tuple[int, ...]) -> None:
    inner = BrokenListing(*breaks)
    names = ["a-b", "a/0", "a/1", "a/2", "a0", "b"]
    for name in names:
        inner.put(name, b"x")
    bucket = RetryingBucket(inner, clock=lambda: time.now, sleep=time.sleep)
    assert [info.key for info in bucket.list()] == names
    assert len(time.slept) == len(breaks)
