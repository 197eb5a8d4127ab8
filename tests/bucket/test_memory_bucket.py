"""The memory bucket."""

from __future__ import annotations

import pytest

from thinwire.bucket import Bucket, MemoryBucket
from thinwire.testing.conformance import BucketConformance


class TestMemoryBucket(BucketConformance):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return MemoryBucket()


def test_each_is_a_store_of_its_own() -> None:
    MemoryBucket().put("key", b"x")
    assert list(MemoryBucket().list()) == []


def test_a_listing_is_not_disturbed_by_writes() -> None:
    bucket = MemoryBucket()
    bucket.put("a", b"")
    bucket.put("b", b"")
    listing = bucket.list()
    assert next(listing).key == "a"
    bucket.put("c", b"")
    bucket.delete("b")
    assert [info.key for info in listing] == ["b"]
