"""Buckets, the files in them, and the stream of what changed."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Buckets", "File", "StoredBucket", "iso_time"]


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as the Hub writes times."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class File:
    """A file in a bucket: a name for a content in the Xet store. Times in seconds since 1970."""

    path: str
    size: int
    xet_hash: str
    modified: float
    uploaded: float

    def as_json(self) -> dict[str, Any]:
        """As listings have it."""
        return {
            "type": "file",
            "path": self.path,
            "size": self.size,
            "xetHash": self.xet_hash,
            "mtime": iso_time(self.modified),
            "uploadedAt": iso_time(self.uploaded),
        }


@dataclass(frozen=True)
class Changes:
    """One batch of changes, as the event stream tells it."""

    time: float
    changes: list[dict[str, Any]]


@dataclass
class StoredBucket:
    """One bucket. Everything that changes it holds ``changed``, and notifies it.

    Attributes:
        previous: the files before the last batch, for listings that are behind.
        events: every batch so far; a cursor is an index into it.
    """

    id: str
    private: bool
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    files: dict[str, File] = field(default_factory=dict)
    previous: dict[str, File] = field(default_factory=dict)
    events: list[Changes] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def as_json(self) -> dict[str, Any]:
        """As ``bucket_info`` has it."""
        files = list(self.files.values())
        return {
            "id": self.id,
            "private": self.private,
            "createdAt": iso_time(self.created),
            "updatedAt": iso_time(self.updated),
            "size": sum(file.size for file in files),
            "totalFiles": len(files),
        }

    def apply(
        self,
        puts: Iterable[File] = (),
        deletes: Iterable[str] = (),
        *,
        allowed: Callable[[StoredBucket], bool] = lambda _: True,
    ) -> bool:
        """Change files in one step, unless ``allowed`` objects; whether it was done."""
        with self.changed:
            if not allowed(self):
                return False
            self.previous, self.files = self.files, dict(self.files)
            changes: list[dict[str, Any]] = []
            for file in puts:
                operation = "update" if file.path in self.files else "add"
                self.files[file.path] = file
                changes.append({**file.as_json(), "op": operation})
            gone = [path for path in deletes if self.files.pop(path, None) is not None]
            changes += [{"path": path, "op": "delete"} for path in gone]
            if changes:
                self.updated = time.time()
                self.events.append(Changes(self.updated, changes))
                self.changed.notify_all()
            return True


class Buckets:
    """Every bucket, by ``namespace/name``."""

    def __init__(self) -> None:
        self._buckets: dict[str, StoredBucket] = {}
        self._lock = threading.Lock()

    def find(self, bucket_id: str) -> StoredBucket | None:
        """The bucket, if there is one."""
        return self._buckets.get(bucket_id)

    def create(self, bucket_id: str, *, private: bool) -> bool:
        """Make a bucket; false if it exists."""
        with self._lock:
            if bucket_id in self._buckets:
                return False
            self._buckets[bucket_id] = StoredBucket(bucket_id, private)
            return True

    def delete(self, bucket_id: str) -> None:
        """Forget a bucket and its files, and end the streams of its events."""
        with self._lock:
            bucket = self._buckets.pop(bucket_id, None)
        if bucket is not None:
            with bucket.changed:
                bucket.changed.notify_all()
