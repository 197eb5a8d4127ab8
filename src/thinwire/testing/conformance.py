"""The suite that every bucket must pass. Needs pytest; what it needs else, your fixture provides.

    class TestMyBucket(BucketConformance):
        @pytest.fixture
        def bucket(self):
            return MyBucket("https://example.com/scratch")

Each test wants a bucket in which nothing else reads or writes; keys are not reused between tests,
so one scratch bucket may serve all of them only if it is emptied in between.
"""

from __future__ import annotations

import array
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from thinwire.bucket import Bucket, Data, ObjectInfo
from thinwire.errors import AlreadyExists, BucketNotFound, InvalidKey, KeyNotFound, Misuse

__all__ = ["BucketConformance"]

T = TypeVar("T")
R = TypeVar("R")

DATA_FORMS: dict[str, tuple[Data, bytes]] = {
    "bytes": (b"\x00\xff weights", b"\x00\xff weights"),
    "bytearray": (bytearray(b"weights"), b"weights"),
    "memoryview": (memoryview(b"weights")[2:], b"ights"),
    "wide memoryview": (memoryview(array.array("Q", [1, 2])), array.array("Q", [1, 2]).tobytes()),
    "empty": (b"", b""),
    "no parts": ([], b""),
    "empty parts": ([b"", bytearray()], b""),
    "parts": ([b"head", bytearray(b"er"), b"", memoryview(b"payload")], b"headerpayload"),
    "tuple": ((b"a", b"b"), b"ab"),
}

BAD_KEYS = {
    "empty": "",
    "leading slash": "/a",
    "trailing slash": "a/",
    "double slash": "a//b",
    "parent": "../a",
    "inner parent": "a/../../b",
    "dot": "./a",
    "hidden": "a/.b",
    "space": "a b",
    "backslash": "a\\b",
    "newline": "a\n",
    "null": "a\0b",
    "not ASCII": "gewicht/\N{LATIN SMALL LETTER A WITH DIAERESIS}",
    "long segment": "a" * 256,
    "long key": "/".join(["a" * 100] * 9),
}

OPERATIONS: dict[str, Callable[[Bucket, str], object]] = {
    "get": lambda bucket, key: bucket.get(key),
    "stream": lambda bucket, key: list(bucket.stream(key)),
    "head": lambda bucket, key: bucket.head(key),
    "put": lambda bucket, key: bucket.put(key, b"x"),
    "create": lambda bucket, key: bucket.create(key, b"x"),
    "delete": lambda bucket, key: bucket.delete(key),
}
READS = ("get", "stream", "head")
WRITES = ("put", "create")

every_operation = pytest.mark.parametrize("operation", list(OPERATIONS))
every_read = pytest.mark.parametrize("operation", READS)
every_write = pytest.mark.parametrize("operation", WRITES)


class BucketConformance:
    """Subclass it under a name that pytest collects, and override :meth:`bucket`.

    Attributes:
        threads: how many compete in the tests that race.
        rounds: how often they do.
        large: bytes of the large object.
    """

    threads = 16
    rounds = 8
    large = (8 << 20) + 3

    @pytest.fixture
    def bucket(self) -> Bucket:
        """A fresh bucket, empty or not yet existing; writing creates it if need be."""
        raise NotImplementedError("override the fixture `bucket`")

    @pytest.fixture
    def missing_bucket(self) -> Bucket:
        """A bucket that does not exist; the default skips the tests that need one."""
        pytest.skip("no missing bucket provided")

    # --- an object ---------------------------------------------------------------------------

    @pytest.mark.parametrize("form", list(DATA_FORMS))
    @every_write
    def test_every_form_of_data_comes_back(self, bucket: Bucket, operation: str, form: str) -> None:
        data, expected = DATA_FORMS[form]
        getattr(bucket, operation)("deltas/0000000001", data)
        assert_holds(bucket, "deltas/0000000001", expected)

    @every_write
    def test_a_file_comes_back(self, bucket: Bucket, operation: str, tmp_path: Path) -> None:
        for name, content in (("full", bytes(range(256)) * 300), ("empty", b"")):
            source = tmp_path / f"source-{name}"
            source.write_bytes(content)
            getattr(bucket, operation)(name, source)
            assert_holds(bucket, name, content)
            assert source.read_bytes() == content

    @every_write
    def test_a_missing_source_file_writes_nothing(
        self, bucket: Bucket, operation: str, tmp_path: Path
    ) -> None:
        bucket.put("other", b"x")
        with pytest.raises(Misuse):
            getattr(bucket, operation)("key", tmp_path / "nowhere")
        assert keys(bucket) == ["other"]

    @every_write
    def test_the_callers_buffer_is_not_kept(self, bucket: Bucket, operation: str) -> None:
        buffer = bytearray(b"before")
        getattr(bucket, operation)("key", [buffer])
        buffer[:] = b"later!"
        assert bucket.get("key") == b"before"

    def test_get_returns_bytes(self, bucket: Bucket) -> None:
        bucket.put("key", [bytearray(b"a"), memoryview(b"b")])
        assert type(bucket.get("key")) is bytes

    def test_a_large_object_streams_in_pieces(self, bucket: Bucket, tmp_path: Path) -> None:
        pattern = bytes(range(251))
        content = (pattern * (self.large // len(pattern) + 1))[: self.large]
        source = tmp_path / "source"
        source.write_bytes(content)
        view = memoryview(content)
        for data in (source, [view[:7], view[7 : self.large // 2], view[self.large // 2 :]]):
            bucket.put("anchors/model", data)
            pieces = list(bucket.stream("anchors/model", chunk=1 << 20))
            assert max(map(len, pieces)) <= 1 << 20
            assert min(map(len, pieces)) > 0
            assert b"".join(pieces) == content
            assert bucket.head("anchors/model").size == self.large

    def test_a_stream_may_be_left_early(self, bucket: Bucket) -> None:
        bucket.put("key", b"x" * 100)
        pieces = bucket.stream("key", chunk=10)
        assert next(pieces) == b"x" * 10
        del pieces
        bucket.delete("key")
        assert keys(bucket) == []

    # --- replacing and creating --------------------------------------------------------------

    def test_put_replaces(self, bucket: Bucket) -> None:
        for content in (b"first", b"the second is longer", b"3rd", b""):
            bucket.put("key", content)
            assert_holds(bucket, "key", content)
        assert keys(bucket) == ["key"]

    @pytest.mark.parametrize("content", [b"", b"x", b"mine"])
    def test_create_does_not_replace(self, bucket: Bucket, content: bytes) -> None:
        bucket.create("commits/0000000001.json", content)
        for other in (content, b"theirs", b""):
            with pytest.raises(AlreadyExists):
                bucket.create("commits/0000000001.json", other)
        assert_holds(bucket, "commits/0000000001.json", content)
        assert keys(bucket) == ["commits/0000000001.json"]

    def test_create_after_put_and_after_delete(self, bucket: Bucket) -> None:
        bucket.put("key", b"1")
        with pytest.raises(AlreadyExists):
            bucket.create("key", b"2")
        bucket.delete("key")
        bucket.create("key", b"3")
        assert bucket.get("key") == b"3"

    def test_one_of_many_creators_wins(self, bucket: Bucket) -> None:
        if not bucket.capabilities.create_only:
            pytest.skip("the store does not promise it")
        for version in range(self.rounds):
            key = f"commits/{version:010}.json"
            contents = [f"writer {writer:3}".encode() * 500 for writer in range(self.threads)]

            won = together(functools.partial(created, bucket, key), contents)
            assert won.count(True) == 1
            assert_holds(bucket, key, contents[won.index(True)])

    def test_readers_see_old_or_new_while_it_is_replaced(self, bucket: Bucket) -> None:
        if not bucket.capabilities.atomic_replace:
            pytest.skip("the store does not promise it")
        contents = [b"a" * 400_000, b"b" * 300_001, b"c" * 7]
        bucket.put("key", contents[0])
        done = threading.Event()

        def read(number: int) -> int:
            reads = 0
            while not done.is_set() or not reads:
                if number % 2:
                    assert bucket.get("key") in contents
                else:
                    assert b"".join(bucket.stream("key", chunk=50_000)) in contents
                assert bucket.head("key").size in map(len, contents)
                assert [info.key for info in bucket.list()] == ["key"]
                reads += 1
            return reads

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(read, number) for number in range(4)]
            try:
                for turn in range(3 * self.rounds):
                    bucket.put("key", contents[turn % 3])
            finally:
                done.set()
            assert all(reader.result() for reader in readers)

    def test_many_writers_of_different_keys(self, bucket: Bucket) -> None:
        names = [f"new/folder/{number:03}" for number in range(self.threads)]
        together(lambda name: bucket.put(name, name.encode()), names)
        assert keys(bucket) == names
        assert [bucket.get(name) for name in names] == [name.encode() for name in names]

    # --- listing -----------------------------------------------------------------------------

    def test_listing_is_in_key_order(self, bucket: Bucket) -> None:
        # "+", "-" and "." sort before the slash, digits and letters after it.
        names = ["b", "a/z", "a-b", "a.b/c", "a+", "a0", "a/b/c", "a/b-c", "A", "_", "a/b.c/d", "@"]
        for size, name in enumerate(names):
            bucket.put(name, b"x" * size)
        sizes = {name: size for size, name in enumerate(names)}
        assert list(bucket.list()) == [ObjectInfo(name, sizes[name]) for name in sorted(names)]

    def test_listing_by_prefix(self, bucket: Bucket) -> None:
        names = sorted(
            ["commits/0001", "commits/0002", "commits/0010", "commits-old", "deltas/0001"]
        )
        for name in names:
            bucket.put(name, b"")
        for prefix in (
            "",
            "c",
            "commits",
            "commits/",
            "commits/000",
            "commits/0001",
            "d",
            "x",
            "commits/0001/",
            "commits/0001x",
            "/",
            "../",
            ".",
            "commits//",
        ):
            expected = [name for name in names if name.startswith(prefix)]
            assert keys(bucket, prefix) == expected, prefix

    def test_listing_follows_writes_and_deletes(self, bucket: Bucket) -> None:
        bucket.put("a", b"1")
        bucket.create("b", b"22")
        assert list(bucket.list()) == [ObjectInfo("a", 1), ObjectInfo("b", 2)]
        bucket.delete("a")
        assert list(bucket.list()) == [ObjectInfo("b", 2)]

    # --- what is missing, and what is wrong --------------------------------------------------

    @every_read
    def test_a_missing_key(self, bucket: Bucket, operation: str) -> None:
        bucket.put("a/b", b"x")
        for key in ("c", "a/c", "a/b/c", "a", "a/b0", "0/1/2"):
            with pytest.raises(KeyNotFound):
                OPERATIONS[operation](bucket, key)

    @every_read
    def test_a_deleted_key(self, bucket: Bucket, operation: str) -> None:
        bucket.put("a/b", b"x")
        bucket.delete("a/b")
        with pytest.raises(KeyNotFound):
            OPERATIONS[operation](bucket, "a/b")

    def test_deleting_is_idempotent(self, bucket: Bucket) -> None:
        bucket.put("a/b", b"x")
        bucket.put("a/c", b"x")
        for key in ("a/b", "a/b", "never/was", "a", "a/b/c"):
            bucket.delete(key)
        assert keys(bucket) == ["a/c"]

    @pytest.mark.parametrize("operation", [*READS, "delete"])
    def test_a_missing_bucket_is_not_an_empty_one(
        self, missing_bucket: Bucket, operation: str
    ) -> None:
        with pytest.raises(BucketNotFound):
            OPERATIONS[operation](missing_bucket, "key")

    def test_listing_a_missing_bucket(self, missing_bucket: Bucket) -> None:
        with pytest.raises(BucketNotFound):
            list(missing_bucket.list())

    @pytest.mark.parametrize("bad", list(BAD_KEYS))
    @every_operation
    def test_bad_keys(self, bucket: Bucket, operation: str, bad: str) -> None:
        with pytest.raises(InvalidKey):
            OPERATIONS[operation](bucket, BAD_KEYS[bad])
        with contextlib.suppress(BucketNotFound):
            assert keys(bucket) == []

    def test_the_longest_and_oddest_keys(self, bucket: Bucket) -> None:
        for key in ("a" * 255, "/".join(["b" * 99] * 9), "1/2/3/4/5/6/7/8/9", "a.b_c@d=e+f-g", "-"):
            bucket.create(key, key.encode())
            assert_holds(bucket, key, key.encode())

    # --- the surroundings --------------------------------------------------------------------

    def test_it_says_where_it_is(self, bucket: Bucket) -> None:
        assert "://" in bucket.url
        assert bucket.url in repr(bucket)

    def test_it_is_a_context_manager(self, bucket: Bucket) -> None:
        with bucket as same:
            assert same is bucket
            same.put("key", b"x")


def assert_holds(bucket: Bucket, key: str, content: bytes) -> None:
    """Every way of reading agrees that ``key`` holds ``content``."""
    assert bucket.get(key) == content
    assert b"".join(bucket.stream(key, chunk=5)) == content
    assert bucket.head(key) == ObjectInfo(key, len(content))
    assert list(bucket.list(key)) == [ObjectInfo(key, len(content))]


def created(bucket: Bucket, key: str, content: bytes) -> bool:
    """Whether this writer made the object. A loser finds the winner's already there, whole."""
    try:
        bucket.create(key, content)
    except AlreadyExists:
        assert len(bucket.get(key)) == len(content)
        return False
    return True


def keys(bucket: Bucket, prefix: str = "") -> Sequence[str]:
    """The listed keys, in the order of the listing."""
    return [info.key for info in bucket.list(prefix)]


def together(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work`` of every item, each in a thread of its own, all released at the same moment."""
    barrier = threading.Barrier(len(items))

    def run(item: T) -> R:
        barrier.wait()
        return work(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(run, items))
