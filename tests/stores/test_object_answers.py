"""What obstore and thinwire make of a store's answers, right and wrong ones."""

from __future__ import annotations

import time

import pytest

from servers.liar import Liar, answer, error
from thinwire.bucket import Bucket, objects
from thinwire.bucket.objects import open_objects
from thinwire.errors import AccessDenied, BucketNotFound, BucketUnavailable, KeyNotFound, Misuse
from thinwire.testing.conformance import OPERATIONS

every_operation = pytest.mark.parametrize("operation", [*OPERATIONS, "list"])


def run(bucket: Bucket, operation: str) -> object:
    return list(bucket.list()) if operation == "list" else OPERATIONS[operation](bucket, "key")


MISBEHAVIOUR: dict[str, tuple[bytes, type[Exception]]] = {
    "500": (answer(500, error("InternalError")), BucketUnavailable),
    "503": (answer(503, error("SlowDown"), Retry_After="1"), BucketUnavailable),
    "429": (answer(429), BucketUnavailable),
    "408": (answer(408), BucketUnavailable),
    "garbage": (b"hello\r\n", BucketUnavailable),
    "silence": (b"", BucketUnavailable),
    "401": (answer(401), AccessDenied),
    "403": (answer(403), AccessDenied),
    "expired": (answer(400, error("ExpiredToken")), AccessDenied),
    "wrong region": (answer(301, error("PermanentRedirect")), Misuse),
    "malformed": (answer(400, error("AuthorizationHeaderMalformed")), Misuse),
    "corrupted on the way": (answer(400, error("BadDigest")), BucketUnavailable),
    "busy": (answer(409, error("OperationAborted")), BucketUnavailable),
    "no bucket": (answer(404, error("NoSuchBucket")), BucketNotFound),
}


@pytest.fixture
def elsewhere(credentials: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    credentials.setenv("AWS_ACCESS_KEY_ID", "x")
    credentials.setenv("AWS_SECRET_ACCESS_KEY", "y")
    return credentials


@every_operation
@pytest.mark.parametrize("what", list(MISBEHAVIOUR))
def test_what_a_store_may_say(elsewhere: pytest.MonkeyPatch, what: str, operation: str) -> None:
    said, kind = MISBEHAVIOUR[what]
    with Liar(said) as liar, pytest.raises(kind) as caught:
        run(open_objects(f"s3://name/p?endpoint={liar.url}"), operation)
    assert type(caught.value) is kind
    assert "Debug source" not in str(caught.value)
    assert len(str(caught.value)) < 400


@every_operation
def test_nobody_there(elsewhere: pytest.MonkeyPatch, operation: str) -> None:
    started = time.monotonic()
    with pytest.raises(BucketUnavailable, match="refused"):
        run(open_objects("s3://name/p?endpoint=http://127.0.0.1:9"), operation)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("operation", ["get", "stream"])
@pytest.mark.parametrize(
    "said",
    [
        answer(206, b"x" * 50, length=100, Content_Range="bytes 0-99/100"),
        answer(206, b"x" * 50, Content_Range="bytes 0-99/100"),
        answer(206, b"x" * 50, Content_Range="bytes 0-49/100"),
        answer(206, b"x" * 50, Content_Range="bytes 50-99/100"),
    ],
    ids=["broken off", "short", "short range", "other range"],
)
def test_a_short_answer_is_an_error(
    elsewhere: pytest.MonkeyPatch, said: bytes, operation: str
) -> None:
    with Liar(said) as liar, pytest.raises(BucketUnavailable):
        run(open_objects(f"s3://name/p?endpoint={liar.url}"), operation)


@pytest.mark.parametrize("operation", ["get", "stream"])
def test_a_later_range_that_is_short_is_an_error(
    elsewhere: pytest.MonkeyPatch, operation: str
) -> None:
    window = objects.WINDOW
    first = answer(206, bytes(window), Content_Range=f"bytes 0-{window - 1}/{window + 100}")
    short = answer(206, bytes(50), Content_Range=f"bytes {window}-{window + 99}/{window + 100}")
    with Liar(first, short) as liar:
        bucket = open_objects(f"s3://name/p?endpoint={liar.url}")
        with pytest.raises(BucketUnavailable):
            run(bucket, operation)
        assert b'if-match: "abc"' in liar.requests[1].lower()


def test_an_unnamed_404_is_settled_by_listing(elsewhere: pytest.MonkeyPatch) -> None:
    none = b"<ListBucketResult><Name>name</Name><KeyCount>0</KeyCount></ListBucketResult>"
    for listing, kind in ((answer(200, none), KeyNotFound), (answer(404), BucketNotFound)):
        with Liar(answer(404), answer(404), listing) as liar:
            bucket = open_objects(f"s3://name/p?endpoint={liar.url}")
            with pytest.raises(kind):
                bucket.head("key")
            assert [line.split(b" ")[0] for line in liar.requests] == [b"HEAD", b"GET", b"GET"]


def test_small_objects_take_one_request(elsewhere: pytest.MonkeyPatch) -> None:
    said = answer(206, b"abc", Content_Range="bytes 0-2/3")
    with Liar(said) as liar:
        bucket = open_objects(f"s3://name/p?endpoint={liar.url}")
        assert bucket.get("key") == b"abc"
        assert list(bucket.stream("key")) == [b"abc"]
        assert len(liar.requests) == 2


def test_writes_are_not_answered_by_silence(elsewhere: pytest.MonkeyPatch) -> None:
    with Liar(answer(200), b"") as liar:
        bucket = open_objects(f"s3://name/p?endpoint={liar.url}")
        bucket.create("key", b"x")
        assert b"if-none-match: *" in liar.requests[0].lower()
        with pytest.raises(BucketUnavailable):
            bucket.create("key", b"x")
