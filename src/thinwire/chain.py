"""A run's records in its bucket: reading them, finding the head, creating versions.

The chain trusts nothing it reads: every record is checked against its own seal, every commit
against its parent. A missing key is the only thing ever taken for "not there".
"""

from __future__ import annotations

import contextlib
import enum
import time

from thinwire.bucket import Bucket, Data
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    CorruptPayload,
    HistoryRewritten,
    KeyNotFound,
    Misuse,
    RunNotFound,
)
from thinwire.log import keys
from thinwire.log.commit import Commit, RunInfo, Tip
from thinwire.log.plan import find_head
from thinwire.log.records import MAX_RECORD

__all__ = ["Chain", "Outcome", "create_record", "read_bounded", "upload"]

MAX_COMMIT = 4 << 20
"""Bytes of a commit; a real one has a few hundred."""

_ATTEMPTS = 4
_BACKOFF_S = 0.1
_PATIENCE_S = 20.0
"""No attempt begins later than this: a bucket that is patient itself has waited long enough."""


def read_bounded(bucket: Bucket, key: str, limit: int) -> bytes:
    """A whole object of at most ``limit`` bytes: a larger one never fills the memory.

    Raises:
        CorruptPayload: it is larger.
        Bucket errors.
    """
    pieces, size = [], 0
    for piece in bucket.stream(key):
        size += len(piece)
        if size > limit:
            raise CorruptPayload(f"{key} is longer than the {limit} bytes it can have")
        pieces.append(piece)
    return b"".join(pieces)


class Outcome(enum.Enum):
    """What became of a create-only write."""

    COMMITTED = "committed"
    LOST = "lost"
    UNRESOLVED = "unresolved"


def create_record(bucket: Bucket, key: str, data: bytes) -> Outcome:
    """Create a record, and find out what really happened.

    Clients and proxies retry on their own, so "already exists" may speak of our own bytes: the
    stored record is read back and compared whole. When neither the write nor the read-back gets
    through, the outcome is UNRESOLVED; calling again with the same bytes is safe.

    Raises:
        AccessDenied, BucketNotFound: refused before anything can have been written.
    """
    began = time.monotonic()
    for attempt in range(_ATTEMPTS):
        if attempt:
            if time.monotonic() - began > _PATIENCE_S:
                break
            time.sleep(_BACKOFF_S * 2 ** (attempt - 1))
        try:
            bucket.create(key, data)
            return Outcome.COMMITTED
        except (AlreadyExists, BucketUnavailable):
            pass
        except AccessDenied:
            if attempt == 0:
                raise
            break
        try:
            return Outcome.COMMITTED if _holds(bucket, key, data) else Outcome.LOST
        except (KeyNotFound, BucketNotFound, BucketUnavailable):
            continue  # no bucket: the write that failed would have made it
        except AccessDenied:
            break
    return Outcome.UNRESOLVED


def _holds(bucket: Bucket, key: str, data: bytes) -> bool:
    try:
        return read_bounded(bucket, key, len(data)) == data
    except CorruptPayload:
        return False


def upload(bucket: Bucket, key: str, data: Data, size: int) -> None:
    """Store a content-named object and see that it is there with its size.

    An object that is there already has this content: its name is its hash.

    Raises:
        CorruptPayload: the store holds another size under this key.
        Bucket errors.
    """
    with contextlib.suppress(AlreadyExists):
        bucket.create(key, data)
    stored = bucket.head(key).size
    if stored != size:
        raise CorruptPayload(f"{key}: the store holds {stored} bytes of {size}")


class Chain:
    """The records of the run in one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        if not isinstance(bucket, Bucket):
            raise Misuse(f"{bucket!r} is not a bucket", hint="pass open_bucket(url)")
        self.bucket = bucket

    def read_run(self) -> RunInfo:
        """``run.json``.

        Raises:
            RunNotFound: the bucket answers that there is none.
            CorruptPayload, UnsupportedFormat, and bucket errors.
        """
        try:
            return RunInfo.decode(read_bounded(self.bucket, keys.RUN, MAX_RECORD))
        except KeyNotFound:
            raise RunNotFound(f"{self.bucket.url} holds no run") from None

    def exists(self, version: int) -> bool:
        """Whether a version is committed. Bucket errors are raised, never read as "no"."""
        try:
            self.bucket.head(keys.commit_key(version))
        except KeyNotFound:
            return False
        return True

    def head(self, known: int | None = None) -> int | None:
        """The newest version, or None; ``known`` is a version that exists."""
        return find_head(self.exists, known)

    def sure_head(self) -> int | None:
        """The newest version, after seeing that no commit lies beyond it.

        A history with a hole would otherwise end before the hole, and be continued there.

        Raises:
            HistoryRewritten: a commit is missing below one that is there.
        """
        head = self.head()
        listed = (keys.commit_version(info.key) for info in self.bucket.list(keys.COMMITS))
        newest = max((version for version in listed if version is not None), default=None)
        if newest is not None and (head is None or newest > head):
            head = self.head(head)  # it may have come between the two looks
            if head is None or newest > head:
                hole = 0 if head is None else head + 1
                raise HistoryRewritten(f"version {hole} is gone; version {newest} is still there")
        return head

    def read(self, version: int) -> Commit:
        """One commit, checked against its seal and its place, not against its parent.

        Raises:
            KeyNotFound: the version is not committed (yet).
            CorruptPayload, UnsupportedFormat, and bucket errors.
        """
        data = read_bounded(self.bucket, keys.commit_key(version), MAX_COMMIT)
        commit = Commit.decode(data)
        if commit.version != version:
            raise CorruptPayload(f"the commit of version {version} says {commit.version}")
        return commit

    def confirm(self, seen: Tip) -> None:
        """Check that a record still reads back as it was.

        A missing next version means "not yet" only while this holds.

        Raises:
            HistoryRewritten: the record is gone or different.
            CorruptPayload, UnsupportedFormat, and bucket errors.
        """
        what = "the run" if seen.version < 0 else f"version {seen.version}"
        try:
            now = self.read_run().tip if seen.version < 0 else self.read(seen.version).tip
        except (KeyNotFound, RunNotFound):
            raise HistoryRewritten(f"{what} was there and is gone") from None
        if now != seen:
            raise HistoryRewritten(f"{what} is not what it was")

    def confirm_alone(self, run: Tip, seen: Tip) -> None:
        """Check that ``seen`` is the newest record of its run, and both are as they were.

        For stores in which two writers at once may both be told that they created a record. It
        comes too late to prevent that, but neither goes on as if nothing were wrong.

        Args:
            run: of ``run.json``.

        Raises:
            HistoryRewritten: another writer's record stands in the place of one of ours, or ours
                in the place of an older one of its.
            CorruptPayload, UnsupportedFormat, and bucket errors.
        """
        try:
            self.confirm(run)
            if seen != run:
                self.confirm(seen)
            if self.exists(seen.version + 1):
                raise HistoryRewritten(f"version {seen.version + 1} is there already")
        except HistoryRewritten as error:
            raise HistoryRewritten(
                f"two writers at once in {self.bucket.url}, which cannot keep them apart: {error}",
                hint="publish to a fresh prefix, one trainer to each; "
                "on the Hub, ?create=s3 keeps writers apart",
            ) from None
