"""A bucket in this process's memory: for tests, examples, and a trainer beside its replica."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

from thinwire.bucket.base import (
    CHUNK,
    Bucket,
    Capabilities,
    Data,
    ObjectInfo,
    check_key,
    check_prefix,
    iter_data,
)
from thinwire.errors import AlreadyExists, KeyNotFound

__all__ = ["MemoryBucket"]


class MemoryBucket(Bucket):
    """An empty store of its own; :meth:`named` gives the one that others hold as well.

    It exists as soon as it is made, so it never raises ``BucketNotFound``.
    """

    capabilities = Capabilities(create_only=True, atomic_replace=True, notifications=True)

    _named: ClassVar[dict[str, MemoryBucket]] = {}
    _naming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.url = "memory://"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._watchers: dict[object, tuple[str, Callable[[], None]]] = {}

    @classmethod
    def named(cls, name: str) -> MemoryBucket:
        """The store called ``name``: in one process, the same one each time."""
        with cls._naming:
            if name not in cls._named:
                cls._named[name] = bucket = cls()
                bucket.url = f"memory://{name}"
            return cls._named[name]

    def get(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise KeyNotFound(f"no object {key!r} in {self.url}") from None

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        data = self.get(key)
        for start in range(0, len(data), chunk):
            yield data[start : start + chunk]

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.get(key)))

    def put(self, key: str, data: Data) -> None:
        check_key(key)
        content = b"".join(iter_data(data))
        with self._lock:
            self._objects[key] = content
        self._changed(key)

    def create(self, key: str, data: Data) -> None:
        check_key(key)
        content = b"".join(iter_data(data))
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"{key!r} already exists in {self.url}")
            self._objects[key] = content
        self._changed(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            found = [(key, len(data)) for key, data in self._objects.items()]
        for key, size in sorted(found):
            if key.startswith(prefix):
                yield ObjectInfo(key, size)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)
        self._changed(key)

    def watch(self, prefix: str, wake: Callable[[], None]) -> Callable[[], None]:
        token = object()
        with self._lock:
            self._watchers[token] = (check_prefix(prefix), wake)

        def end() -> None:
            with self._lock:
                self._watchers.pop(token, None)

        return end

    def _changed(self, key: str) -> None:
        with self._lock:
            due = [wake for prefix, wake in self._watchers.values() if key.startswith(prefix)]
        for wake in due:
            wake()
