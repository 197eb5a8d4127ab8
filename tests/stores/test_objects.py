"""Object buckets against a real S3 server."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from servers.liar import Liar, answer
from servers.seaweed import SeaweedServer
from thinwire.bucket import Bucket, ObjectInfo, _objects_stores, objects, open_bucket
from thinwire.bucket.objects import ObjectBucket, open_objects
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    KeyNotFound,
    Misuse,
)
from thinwire.testing.conformance import OPERATIONS, BucketConformance

every_operation = pytest.mark.parametrize("operation", [*OPERATIONS, "list"])
# in parts when written; read in more windows than are asked for ahead
LARGE = max(objects.SINGLE, objects.CONCURRENCY * objects.WINDOW) + objects.PART + 12_345


def run(bucket: Bucket, operation: str, key: str = "key") -> object:
    if operation == "list":
        return list(bucket.list(key))
    return OPERATIONS[operation](bucket, key)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """SeaweedFS lets those who lose a race for a key wait for seconds, longer on a busy machine."""
    monkeypatch.setitem(_objects_stores.TIMEOUTS, "ask", "60s")


@pytest.fixture
def environment(seaweed: SeaweedServer, credentials: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in seaweed.environment().items():
        credentials.setenv(name, value)
    return credentials


@pytest.fixture
def url(seaweed: SeaweedServer, environment: pytest.MonkeyPatch) -> str:
    return seaweed.bucket_url(seaweed.make_bucket(), "runs/one")


@pytest.fixture
def bucket(url: str) -> Iterator[Bucket]:
    with open_objects(url) as bucket:
        yield bucket


class TestConformance(BucketConformance):
    # SeaweedFS 4.48 lets those that lose a race look for its lock once a second, so that rounds
    # one after the other take seconds each; a hundred are run side by side below.
    rounds = 4

    @pytest.fixture
    def bucket(self, url: str) -> Iterator[Bucket]:
        with open_objects(url) as bucket:
            yield bucket

    @pytest.fixture
    def missing_bucket(self, seaweed: SeaweedServer, environment: pytest.MonkeyPatch) -> Bucket:
        return open_objects(seaweed.bucket_url("never-made", "runs"))


class TestWithoutPrefix(BucketConformance):
    rounds = 2

    @pytest.fixture
    def bucket(self, seaweed: SeaweedServer, environment: pytest.MonkeyPatch) -> Bucket:
        return open_objects(seaweed.bucket_url(seaweed.make_bucket()))


def test_a_hundred_races_have_one_winner_each(bucket: Bucket) -> None:
    writers, rounds, at_once = 16, 100, 25
    start = threading.Barrier(writers * at_once)

    def compete(number: int) -> list[bool]:
        lane, writer = divmod(number, writers)
        won = []
        for version in range(lane, rounds, at_once):
            start.wait(100)
            try:
                bucket.create(f"commits/{version:010}", f"writer {writer:03}".encode() * 300)
            except AlreadyExists:
                won.append(False)
            else:
                won.append(True)
        return won

    with ThreadPoolExecutor(writers * at_once) as pool:
        results = list(pool.map(compete, range(writers * at_once)))
    for lane in range(at_once):
        of_lane = results[lane * writers : (lane + 1) * writers]
        for turn, version in enumerate(range(lane, rounds, at_once)):
            winners = [writer for writer, won in enumerate(of_lane) if won[turn]]
            assert len(winners) == 1
            content = f"writer {winners[0]:03}".encode() * 300
            assert bucket.get(f"commits/{version:010}") == content


# --- the bucket's place ----------------------------------------------------------------------


def test_a_prefix_is_a_world_of_its_own(seaweed: SeaweedServer, url: str) -> None:
    name = url.removeprefix("s3://").partition("/")[0]
    whole = open_objects(seaweed.bucket_url(name))
    one, other = open_objects(url), open_objects(seaweed.bucket_url(name, "runs/one-more"))
    one.put("a/b", b"1")
    other.put("a/b", b"22")
    whole.put("runs/two", b"333")
    assert list(one.list()) == [ObjectInfo("a/b", 1)]
    assert list(other.list("a")) == [ObjectInfo("a/b", 2)]
    assert [info.key for info in whole.list()] == ["runs/one-more/a/b", "runs/one/a/b", "runs/two"]
    assert whole.get("runs/one/a/b") == b"1"


def test_the_url_opens_the_same_bucket_again(bucket: Bucket) -> None:
    bucket.put("key", b"x")
    again = open_bucket(bucket.url)
    assert again.url == bucket.url
    assert again.get("key") == b"x"
    assert "thinwire-admin" not in bucket.url + repr(bucket)


def test_the_environment_names_the_endpoint(
    seaweed: SeaweedServer, environment: pytest.MonkeyPatch
) -> None:
    name = seaweed.make_bucket()
    open_objects(f"s3://{name}/p").put("key", b"x")
    environment.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(BucketUnavailable):
        open_objects(f"s3://{name}/p").get("key")
    assert open_objects(seaweed.bucket_url(name, "p")).get("key") == b"x"


# --- listing ---------------------------------------------------------------------------------


def test_a_listing_has_many_pages(bucket: Bucket) -> None:
    names = [f"deltas/{number:010}" for number in range(1203)]
    for name in names:
        bucket.put(name, b"")
    assert [info.key for info in bucket.list("deltas/00000")] == names
    assert [info.key for info in bucket.list("deltas/000000120")] == names[1200:]


def test_a_store_in_key_order_is_read_from_the_prefix_on(bucket: ObjectBucket) -> None:
    # The server walks folders, and within one folder that is key order.
    connection = bucket._connection()
    ordered = dataclasses.replace(connection.settings, sorted_by_key=True)
    bucket._connections.append(dataclasses.replace(connection, settings=ordered))
    names = [f"commits/{number:010}" for number in range(40)]
    for name in (*names, "deltas/1", "anchors/1"):
        bucket.put(name, b"")
    for prefix in ("commits/", "commits/00000", "commits/000000001", "commits/0000000039", "c", ""):
        expected = [name for name in ["anchors/1", *names, "deltas/1"] if name.startswith(prefix)]
        assert [info.key for info in bucket.list(prefix)] == expected


def test_what_is_no_key_is_not_listed(seaweed: SeaweedServer, url: str) -> None:
    import obstore
    from obstore.store import S3Store

    name = url.removeprefix("s3://").partition("/")[0]
    store = S3Store(name, client_options={"allow_http": True})
    for path in ("runs/one/good", "runs/one/.hidden", "runs/one/with space", "runs/one/a/.b/c"):
        obstore.put(store, path, b"x")
    assert list(open_objects(url).list()) == [ObjectInfo("good", 1)]


# --- large objects ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> bytes:
    return os.urandom(1 << 20) * (LARGE >> 20) + os.urandom(LARGE & ((1 << 20) - 1))


@pytest.mark.parametrize("operation", ["put", "create"])
def test_large_objects_come_back(
    bucket: Bucket, large: bytes, tmp_path: Path, operation: str
) -> None:
    source = tmp_path / "source"
    source.write_bytes(large)
    view = memoryview(large)
    forms = {"bytes": large, "file": source, "parts": [view[:13], view[13:], b""]}
    for name, data in forms.items():
        getattr(bucket, operation)(name, data)
        assert bucket.head(name).size == LARGE
        assert bucket.get(name) == large
        pieces = list(bucket.stream(name, chunk=3_000_001))
        assert max(map(len, pieces)) <= 3_000_001
        assert b"".join(pieces) == large
    with pytest.raises(AlreadyExists):
        bucket.create("bytes", large)


@pytest.mark.parametrize("size", [0, 1, objects.WINDOW - 1, objects.WINDOW, objects.WINDOW + 1])
def test_sizes_around_one_window(bucket: Bucket, large: bytes, size: int) -> None:
    bucket.put("key", memoryview(large)[:size])
    assert bucket.get("key") == large[:size]
    assert b"".join(bucket.stream("key")) == large[:size]


def test_a_bucket_closed_while_it_is_read(
    url: str, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "WINDOW", 1000)
    bucket = open_objects(url)
    bucket.put("key", large[:20_000])
    pieces = bucket.stream("key")
    next(pieces)
    bucket.close()
    with pytest.raises(Misuse, match="is closed"):
        list(pieces)


def test_an_object_replaced_while_it_is_read(bucket: Bucket, large: bytes) -> None:
    bucket.put("key", large)
    pieces = bucket.stream("key", chunk=1 << 20)
    next(pieces)
    time.sleep(0.5)  # the windows asked for ahead are of the old object
    bucket.put("key", bytes(len(large)))
    with pytest.raises(BucketUnavailable, match="replaced"):
        list(pieces)
    assert bucket.get("key") == bytes(len(large))


class Failing(Sequence[bytes]):
    """Parts of a large object that cannot be had beyond a point, once uploading has begun."""

    def __init__(self, content: bytes, before: Callable[[], None]) -> None:
        self.parts = [content[at : at + (1 << 20)] for at in range(0, len(content), 1 << 20)]
        self.before = before
        self.passes = 0

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        return self.parts[index]

    def __iter__(self) -> Iterator[bytes]:
        self.passes += 1  # the first pass adds up the size
        for number, part in enumerate(self.parts):
            if self.passes > 1 and number == 30:
                self.before()
                raise InterruptedError("no more")
            yield part


def test_a_failed_large_upload_leaves_nothing(
    seaweed: SeaweedServer, bucket: Bucket, large: bytes
) -> None:
    name = bucket.url.removeprefix("s3://").partition("/")[0]
    begun: list[list[str]] = []
    data = Failing(large, lambda: begun.append(seaweed.unfinished_uploads(name)))
    with pytest.raises(BucketUnavailable, match="no more"):
        bucket.put("key", data)
    assert len(begun[0]) == 1
    assert seaweed.unfinished_uploads(name) == []
    with pytest.raises(KeyNotFound):
        bucket.head("key")
    assert list(bucket.list()) == []


# --- refusals --------------------------------------------------------------------------------


@every_operation
def test_a_missing_bucket(
    seaweed: SeaweedServer, environment: pytest.MonkeyPatch, operation: str
) -> None:
    with pytest.raises(BucketNotFound) as caught:
        run(open_objects(seaweed.bucket_url("never-made")), operation)
    assert caught.value.hint


@pytest.mark.parametrize("size", [1, LARGE])
@pytest.mark.parametrize("operation", ["put", "create"])
def test_writing_to_a_missing_bucket(
    seaweed: SeaweedServer, environment: pytest.MonkeyPatch, operation: str, size: int
) -> None:
    with pytest.raises(BucketNotFound):
        getattr(open_objects(seaweed.bucket_url("never-made")), operation)("key", bytes(size))


@every_operation
def test_a_wrong_secret(
    seaweed: SeaweedServer, url: str, credentials: pytest.MonkeyPatch, operation: str
) -> None:
    open_objects(url).put("key", b"x")
    credentials.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied) as caught:
        run(open_objects(url), operation)
    assert caught.value.hint
    assert "wrong" not in str(caught.value)


@every_operation
@pytest.mark.parametrize("key", ["key", "missing"])
def test_no_signature(url: str, operation: str, key: str) -> None:
    open_objects(url).put("key", b"x")
    with pytest.raises(AccessDenied):
        run(open_objects(url + "&anonymous=true"), operation, key)


@every_operation
def test_no_credentials(url: str, credentials: pytest.MonkeyPatch, operation: str) -> None:
    credentials.delenv("AWS_ACCESS_KEY_ID")
    credentials.delenv("AWS_SECRET_ACCESS_KEY")
    with Liar(answer(404)) as service:
        credentials.setenv("AWS_METADATA_ENDPOINT", service.url)
        with pytest.raises(AccessDenied, match="credentials") as caught:
            run(open_objects(url), operation)
        assert "AWS_ACCESS_KEY_ID" in caught.value.hint


def test_a_profile_is_read_by_boto3(
    seaweed: SeaweedServer, url: str, credentials: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    identity = seaweed.environment()
    key, secret = identity["AWS_ACCESS_KEY_ID"], identity["AWS_SECRET_ACCESS_KEY"]
    credentials.delenv("AWS_ACCESS_KEY_ID")
    credentials.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[team]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    )
    open_objects(url + "&profile=team").put("key", b"x")
    credentials.setenv("AWS_PROFILE", "team")
    assert open_objects(url).get("key") == b"x"
    credentials.setenv("AWS_PROFILE", "other")
    with pytest.raises(Misuse, match="boto3"):
        open_objects(url).get("key")


def test_half_the_credentials(url: str, credentials: pytest.MonkeyPatch) -> None:
    credentials.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDenied, match="credentials"):
        open_objects(url).get("key")


def test_reading_rights_only(
    seaweed: SeaweedServer, url: str, credentials: pytest.MonkeyPatch
) -> None:
    open_objects(url).put("key", b"x")
    for name, value in seaweed.readonly.items():
        credentials.setenv(name, value)
    reader = open_objects(url)
    assert reader.get("key") == b"x"
    with pytest.raises(KeyNotFound):
        reader.head("missing")
    for operation in ("put", "create", "delete"):
        with pytest.raises(AccessDenied):
            run(reader, operation)


# --- processes -------------------------------------------------------------------------------


def in_a_fork(bucket: Bucket, key: str) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=use, args=(bucket, key))
    child.start()
    child.join(30)
    if child.exitcode is None:
        child.kill()
        child.join()
        pytest.fail("the child hangs")
    return child.exitcode


def use(bucket: Bucket, key: str) -> None:
    bucket.create(key, key.encode())
    if bucket.get(key) != key.encode() or key not in [info.key for info in bucket.list()]:
        raise SystemExit(3)
    with contextlib.suppress(KeyNotFound):
        bucket.get("missing")
        raise SystemExit(4)


def test_a_bucket_works_on_both_sides_of_a_fork(bucket: Bucket, large: bytes) -> None:
    bucket.put("large", large)
    assert bucket.get("large") == large
    for turn in range(3):
        assert in_a_fork(bucket, f"child-{turn}") == 0
        use(bucket, f"parent-{turn}")
    assert bucket.get("large") == large
    names = sorted(f"{who}-{turn}" for who in ("child", "parent") for turn in range(3))
    assert [info.key for info in bucket.list()] == [*names[:3], "large", *names[3:]]


def grandchild(bucket: Bucket) -> None:
    use(bucket, "child")
    raise SystemExit(in_a_fork(bucket, "grandchild"))


def test_and_in_a_forks_fork(bucket: Bucket) -> None:
    use(bucket, "parent")
    child = multiprocessing.get_context("fork").Process(target=grandchild, args=(bucket,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [info.key for info in bucket.list()] == ["child", "grandchild", "parent"]


def test_a_server_that_comes_back(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    with SeaweedServer(tmp_path / "own") as server:
        bucket = open_objects(server.bucket_url(server.make_bucket()))
        bucket.put("key", b"x")
        server.stop()
        with pytest.raises(BucketUnavailable):
            bucket.get("key")
        server.start()
        assert bucket.get("key") == b"x"
