"""A bucket around a bucket: the base of what adds retries, pacing, caching or counting to one.

A wrapper changes one thing and hands everything else through: the inner bucket's address, what it
can do, what it tells watchers, and its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from thinwire.bucket.base import CHUNK, Bucket, Capabilities, Data, ObjectInfo

__all__ = ["WrappedBucket", "innermost"]


class WrappedBucket(Bucket):
    """``inner`` unchanged; subclasses override the operations that they are about.

    Attributes:
        inner: the bucket that everything goes to. Closing the wrapper closes it.
    """

    def __init__(self, inner: Bucket) -> None:
        self.inner = inner
        self.url = inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        return self.inner.stream(key, chunk=chunk)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def put(self, key: str, data: Data) -> None:
        self.inner.put(key, data)

    def create(self, key: str, data: Data) -> None:
        self.inner.create(key, data)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def forget(self, key: str) -> None:
        self.inner.forget(key)

    def watch(self, prefix: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self.inner.watch(prefix, wake)

    def close(self) -> None:
        self.inner.close()


def innermost(bucket: Bucket) -> Bucket:
    """The store itself, under however many wrappers: for asking what kind of store it is."""
    while isinstance(bucket, WrappedBucket):
        bucket = bucket.inner
    return bucket
