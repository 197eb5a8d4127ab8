"""What a bucket is asked, and what that takes: calls, errors, bytes and seconds per operation."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from thinwire.bucket.base import CHUNK, Bucket, Data, ObjectInfo, data_size
from thinwire.bucket.wrapper import WrappedBucket

__all__ = ["MeteredBucket", "Metrics"]

T = TypeVar("T")


@dataclass
class _Row:
    calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)


class Metrics:
    """Counts per operation. Thread-safe, and one may be shared by several buckets."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()

    def record(
        self,
        operation: str,
        seconds: float,
        *,
        bytes_in: int = 0,
        bytes_out: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Count one call.

        Args:
            seconds: that the store took, without what the caller did in between.
            bytes_in, bytes_out: from and to the store.
            error: what the call ended with.
        """
        with self._lock:
            row = self._rows.setdefault(operation, _Row())
            row.calls += 1
            row.bytes_in += bytes_in
            row.bytes_out += bytes_out
            row.seconds += seconds
            if error is not None:
                name = type(error).__name__
                row.errors[name] = row.errors.get(name, 0) + 1

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """By operation ``calls``, ``bytes_in``, ``bytes_out``, ``seconds`` and ``errors``.

        ``errors`` counts by class. ``KeyNotFound`` and ``AlreadyExists`` are among them although
        they are answers. Operations that were never called are left out.
        """
        with self._lock:
            return {
                name: {
                    "calls": row.calls,
                    "bytes_in": row.bytes_in,
                    "bytes_out": row.bytes_out,
                    "seconds": row.seconds,
                    "errors": dict(sorted(row.errors.items())),
                }
                for name, row in sorted(self._rows.items())
            }

    def summary(self) -> dict[str, Any]:
        """The same five, summed over all operations."""
        rows = self.snapshot().values()
        errors: dict[str, int] = {}
        for row in rows:
            for name, number in row["errors"].items():
                errors[name] = errors.get(name, 0) + number
        sums = {
            name: sum(row[name] for row in rows)
            for name in ("calls", "bytes_in", "bytes_out", "seconds")
        }
        return {**sums, "errors": dict(sorted(errors.items()))}

    def reset(self) -> None:
        """Start again at nothing."""
        with self._lock:
            self._rows.clear()


class MeteredBucket(WrappedBucket):
    """``inner``, counted in ``metrics``.

    A listing counts as one call, however many requests the store's client makes of it, and a
    stream counts once it ends or is left. Bytes written count when the call has succeeded.
    """

    def __init__(self, inner: Bucket, metrics: Metrics) -> None:
        super().__init__(inner)
        self.metrics = metrics

    def get(self, key: str) -> bytes:
        with self._counted("get") as call:
            data = self.inner.get(key)
            call.bytes_in = len(data)
        return data

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        with self._counted("stream") as call:
            for piece in call.timed(self.inner.stream(key, chunk=chunk)):
                call.bytes_in += len(piece)
                yield piece

    def head(self, key: str) -> ObjectInfo:
        with self._counted("head"):
            return self.inner.head(key)

    def put(self, key: str, data: Data) -> None:
        with self._counted("put") as call:
            size = data_size(data)
            self.inner.put(key, data)
            call.bytes_out = size

    def create(self, key: str, data: Data) -> None:
        with self._counted("create") as call:
            size = data_size(data)
            self.inner.create(key, data)
            call.bytes_out = size

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._counted("list") as call:
            yield from call.timed(self.inner.list(prefix))

    def delete(self, key: str) -> None:
        with self._counted("delete"):
            self.inner.delete(key)

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[_Call]:
        call, failure = _Call(), None
        try:
            yield call
        except GeneratorExit:  # a stream that was left early
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            self.metrics.record(
                operation,
                call.seconds(),
                bytes_in=call.bytes_in,
                bytes_out=call.bytes_out,
                error=failure,
            )


class _Call:
    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self._started = time.perf_counter()
        self._inside: float | None = None

    def timed(self, items: Iterator[T]) -> Iterator[T]:
        """``items``, where only the waiting for them counts as the store's time."""
        self._inside = 0.0
        while True:
            started = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._inside += time.perf_counter() - started
            yield item

    def seconds(self) -> float:
        return time.perf_counter() - self._started if self._inside is None else self._inside
