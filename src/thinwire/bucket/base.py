"""Bytes under keys: the one interface through which thinwire sees a store.

A bucket promises little, so that every store can keep it:

* after ``put`` or ``create`` returns, the object is durable and a reader sees all of it;
* an object is whole or absent, never half there;
* ``create`` refuses to replace (``capabilities.create_only`` says whether the store itself
  guarantees that, against other writers too);
* a missing object is :class:`~thinwire.errors.KeyNotFound` and nothing else is: denied access, a
  missing bucket and a store that does not answer are errors of their own.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from thinwire.errors import InvalidKey, Misuse

__all__ = [
    "Bucket",
    "Capabilities",
    "Data",
    "ObjectInfo",
    "check_key",
    "check_prefix",
    "data_size",
    "iter_data",
]

Data = bytes | bytearray | memoryview | Sequence["bytes | bytearray | memoryview"] | Path
"""What can be written: one buffer, several that follow each other, or a file on disk."""

CHUNK = 4 << 20

_SEGMENT = re.compile(r"[A-Za-z0-9_@=+-][A-Za-z0-9._@=+-]{0,254}")
MAX_KEY = 900


@dataclass(frozen=True)
class Capabilities:
    """What a store can do.

    Attributes:
        create_only: ``create`` is atomic against every other writer.
        atomic_replace: ``put`` over an existing object never shows readers a mixture.
        notifications: ``watch`` tells of changes; without, it does nothing.
    """

    create_only: bool
    atomic_replace: bool
    notifications: bool = False


@dataclass(frozen=True)
class ObjectInfo:
    """An object's key and its size in bytes."""

    key: str
    size: int


class Bucket(abc.ABC):
    """A store of immutable-ish objects under keys. Safe to use from several threads."""

    url: str

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What this store can do. A class attribute will do where it is always the same."""

    @abc.abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object. For small ones and payloads; see :meth:`stream` for large files.

        Raises:
            KeyNotFound, BucketNotFound, AccessDenied, BucketUnavailable, InvalidKey
        """

    @abc.abstractmethod
    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        """The object in pieces of at most ``chunk`` bytes. Errors as for :meth:`get`."""

    @abc.abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """The object's size, without its bytes. Errors as for :meth:`get`."""

    @abc.abstractmethod
    def put(self, key: str, data: Data) -> None:
        """Write or replace an object.

        Raises:
            AccessDenied, BucketUnavailable, BucketNotFound, InvalidKey
        """

    @abc.abstractmethod
    def create(self, key: str, data: Data) -> None:
        """Write an object that must not exist yet.

        Raises:
            AlreadyExists: there is an object under ``key`` (it may be ours: clients retry).
            AccessDenied, BucketUnavailable, BucketNotFound, InvalidKey
        """

    @abc.abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order.

        Raises:
            BucketNotFound, AccessDenied, BucketUnavailable
        """

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; removing a missing one is no error.

        Raises:
            BucketNotFound, AccessDenied, BucketUnavailable, InvalidKey
        """

    def forget(self, key: str) -> None:
        """Drop a copy of this object that is kept nearer than the store, if there is one.

        For who finds that its bytes are not those they should be: the store may have better ones.
        """
        check_key(key)

    def watch(self, prefix: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` soon after something under ``prefix`` may have changed.

        A hint and no more: it may come late, twice, for nothing, or not at all, so who waits goes
        on polling, and ``wake`` only makes the next look come sooner. It is called from another
        thread and must not block. Where ``capabilities.notifications`` is false nothing happens.

        Returns:
            what ends the watching; calling it twice does no harm.
        """
        check_prefix(prefix)
        return _nothing_to_end

    def close(self) -> None:
        """Release connections and the like. The bucket is not used afterwards."""
        return

    def __enter__(self) -> Bucket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def check_key(key: str) -> str:
    """``key`` itself, if every store can hold it and it cannot escape its prefix.

    Segments are separated by single slashes, hold letters, digits and ``._@=+-``, and do not
    start with a dot.

    Raises:
        InvalidKey: otherwise.
    """
    if not isinstance(key, str) or len(key) > MAX_KEY:
        raise InvalidKey(f"not a usable key: {str(key)[:80]!r}")
    if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise InvalidKey(f"not a usable key: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """``prefix`` itself, if it is a string.

    Raises:
        InvalidKey: otherwise.
    """
    if not isinstance(prefix, str):
        raise InvalidKey(f"not a prefix: {prefix!r}")
    return prefix


def _nothing_to_end() -> None:
    return


def data_size(data: Data) -> int:
    """Bytes in ``data``. Raises: Misuse if it is a file that cannot be read."""
    if isinstance(data, Path):
        try:
            return data.stat().st_size
        except OSError as error:
            raise Misuse(f"cannot read {data}: {error.strerror or error}") from error
    if isinstance(data, (bytes, bytearray, memoryview)):
        return memoryview(data).nbytes
    return sum(memoryview(part).nbytes for part in data)


def iter_data(data: Data, *, chunk: int = CHUNK) -> Iterator[memoryview]:
    """``data`` in pieces of at most ``chunk`` bytes, without joining or copying buffers.

    Raises:
        Misuse: it is a file that cannot be read. An OSError would pass for the store's own.
    """
    if isinstance(data, Path):
        try:
            with data.open("rb") as file:
                while block := file.read(chunk):
                    yield memoryview(block)
        except OSError as error:
            raise Misuse(f"cannot read {data}: {error.strerror or error}") from error
        return
    parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
    for part in parts:
        view = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
        for start in range(0, view.nbytes, chunk):
            yield view[start : start + chunk]
