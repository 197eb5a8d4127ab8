"""What obstore and thinwire make of a store's answers, right and wrong ones."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from servers.liar import Liar, answer, error
from thinwire.bucket import Bucket, _objects_stores, objects
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


class Halfway(BaseHTTPRequestHandler):
    """Sends half of an object, whatever range is asked for, and the rest when told to."""

    go_on = threading.Event()
    waited: ClassVar[list[bool]] = []

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            self.send_response(200)
            self.send_header("Content-Length", str(2 << 20))
            self.send_header("ETag", '"abc"')
            self.send_header("Last-Modified", "Sun, 29 Nov 2026 22:22:31 GMT")
            self.end_headers()
            self.wfile.write(bytes(1 << 20))
            if "Range" not in self.headers:
                self.waited.append(self.go_on.wait(5))
            self.wfile.write(bytes(1 << 20))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_a_store_without_ranges_is_read_as_it_comes(elsewhere: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Halfway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bucket = open_objects(f"s3://name/p?endpoint=http://127.0.0.1:{server.server_port}")
        Halfway.go_on.clear()
        pieces = bucket.stream("key")
        size = len(next(pieces))
        Halfway.go_on.set()
        size += sum(map(len, pieces))
        assert bucket.get("key") == bytes(2 << 20)
        server.shutdown()
    assert size == 2 << 20
    assert Halfway.waited[0], "the first piece came before the last was sent"


class Surplus(Halfway):
    """Says that it sends three bytes, and goes on."""

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(answer(206, bytes(100), 2 << 20, Content_Range="bytes 0-2/3"))
            Halfway.go_on.wait(5)
            self.wfile.write(bytes(2 << 20))


def test_no_more_is_taken_than_was_asked_for(elsewhere: pytest.MonkeyPatch) -> None:
    Halfway.go_on.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Surplus) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bucket = open_objects(f"s3://name/p?endpoint=http://127.0.0.1:{server.server_port}")
        started = time.monotonic()
        with pytest.raises(BucketUnavailable, match="asked for bytes 0 to 3"):
            bucket.get("key")
        assert time.monotonic() - started < 4
        Halfway.go_on.set()
        server.shutdown()


def test_a_panic_is_an_error(elsewhere: pytest.MonkeyPatch) -> None:
    """Of obstore's own, at a setting that is refused before it gets there."""
    elsewhere.setattr(_objects_stores, "_CONTROL", re.compile("never"))
    elsewhere.setenv("AWS_SESSION_TOKEN", "x\r")
    bucket = open_objects("s3://name/p?endpoint=http://127.0.0.1:9")
    with pytest.raises(Misuse, match="panicked") as caught:
        bucket.get("key")
    assert "credentials" in caught.value.hint


def listing(*names: str, following: str = "") -> bytes:
    entries = "".join(
        f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>x</ETag><Size>5</Size></Contents>"
        for name in names
    )
    token = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
    more = f"<IsTruncated>{'true' if following else 'false'}</IsTruncated>"
    return answer(200, f"<ListBucketResult>{more}{token}{entries}</ListBucketResult>".encode())


@pytest.mark.parametrize("name", ["p/a//b", "p/../c"])
def test_an_object_that_cannot_be_listed_is_named(elsewhere: pytest.MonkeyPatch, name: str) -> None:
    with Liar(listing("p/a", name)) as liar:
        bucket = open_objects(f"s3://name/p?endpoint={liar.url}")
        with pytest.raises(Misuse, match=re.escape(name)) as caught:
            list(bucket.list())
    assert "remove that object" in caught.value.hint


def test_a_listing_that_goes_round_in_circles(elsewhere: pytest.MonkeyPatch) -> None:
    with Liar(listing("p/a", "p/b", following="x")) as liar:
        bucket = open_objects(f"s3://name/p?endpoint={liar.url}")
        with pytest.raises(BucketUnavailable, match="again"):
            list(bucket.list())


@pytest.mark.parametrize("prefix", ["a//b", " ", "/"])
def test_no_key_starts_like_this_and_the_bucket_is_missing(
    elsewhere: pytest.MonkeyPatch, prefix: str
) -> None:
    with Liar(answer(404, error("NoSuchBucket"))) as liar, pytest.raises(BucketNotFound):
        list(open_objects(f"s3://name/p?endpoint={liar.url}").list(prefix))
    with Liar(listing()) as liar:
        assert list(open_objects(f"s3://name?endpoint={liar.url}").list(prefix)) == []


def test_a_closed_bucket(elsewhere: pytest.MonkeyPatch) -> None:
    with Liar(answer(206, b"abc", Content_Range="bytes 0-2/3")) as liar:
        bucket = open_objects(f"s3://name/p?endpoint={liar.url}")
        assert bucket.get("key") == b"abc"
        bucket.close()
        bucket.close()
        for operation in [*OPERATIONS, "list"]:
            with pytest.raises(Misuse, match="is closed"):
                run(bucket, operation)
        assert len(liar.requests) == 1


def test_writes_are_not_answered_by_silence(elsewhere: pytest.MonkeyPatch) -> None:
    with Liar(answer(200), b"") as liar:
        bucket = open_objects(f"s3://name/p?endpoint={liar.url}")
        bucket.create("key", b"x")
        assert b"if-none-match: *" in liar.requests[0].lower()
        with pytest.raises(BucketUnavailable):
            bucket.create("key", b"x")
