"""Probes a bucket by using it: objects under one random key prefix, removed whatever happens."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from thinwire.bucket import Bucket, Data, innermost
from thinwire.doctor.findings import Findings
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    CorruptPayload,
    KeyNotFound,
    Retryable,
    Stop,
    ThinwireError,
)

__all__ = ["Probe"]

_RACERS, _RACES, _REPLACES = 8, 3, 6
_WATCH_S = 5.0
_DENIED = "a missing key is answered as forbidden: allow listing the bucket to these credentials"
_DIFFERENT = "do not publish to this store before it is known why"


class Probe:
    """What a bucket does, against what it says it can do.

    Attributes:
        prefix: what all keys of this probe start with.
        observed: by capability true, false, or None where it could not be tried.
        missing_key, missing_bucket: the class of error that each is answered with.
    """

    def __init__(self, bucket: Bucket, findings: Findings) -> None:
        self.bucket = bucket
        self.findings = findings
        self.prefix = f"doctor/{secrets.token_hex(8)}/"
        self.observed: dict[str, bool | None] = dict.fromkeys(
            (
                "create_only",
                "atomic_replace",
                "notifications",
                "read_after_write",
                "read_after_replace",
                "list_after_write",
                "delete",
            )
        )
        self.missing_key: str | None = None
        self.missing_bucket: str | None = None
        self._written: dict[str, None] = {}

    @contextlib.contextmanager
    def cleaning_up(self) -> Iterator[None]:
        """Remove every object of this probe at the end, and what a local bucket leaves of it."""
        root = getattr(innermost(self.bucket), "root", None)
        existed = root is None or root.is_dir()
        try:
            yield
        finally:
            if self._written:
                self.findings.step("clean up", self._clean)
            if isinstance(root, Path):
                _remove_empty(root, self.prefix, itself=not existed)

    def key(self, name: str) -> str:
        """A key of this probe; it will be cleaned up, whether writing it seems to work or not."""
        key = self.prefix + name
        self._written[key] = None
        return key

    # --- steps -------------------------------------------------------------------------------

    def claims(self) -> dict[str, bool]:
        """What the bucket says of itself."""
        claimed = self.bucket.capabilities
        return {
            "create_only": claimed.create_only,
            "atomic_replace": claimed.atomic_replace,
            "notifications": claimed.notifications,
        }

    def write_and_read(self) -> str:
        key = self.key("first")
        self.bucket.put(key, b"thinwire doctor")
        self._see(key, b"thinwire doctor", "read_after_write", "what was just written")
        return f"wrote and read {key}"

    def missing_keys(self) -> str:
        key = f"{self.prefix}missing"
        reads: tuple[Callable[[str], object], ...] = (
            self.bucket.head,
            self.bucket.get,
            lambda key: list(self.bucket.stream(key)),
        )
        for read in reads:
            try:
                read(key)
            except KeyNotFound:
                self.missing_key = "KeyNotFound"
            except AccessDenied as error:
                self.missing_key = "AccessDenied"
                raise AccessDenied(f"a missing key: {error}", hint=_DENIED) from error
            except ThinwireError as error:
                self.missing_key = type(error).__name__
                raise
            else:
                raise Stop("a missing key could be read", hint=_DIFFERENT)
        return "KeyNotFound, as it should be"

    def missing_buckets(self, other: Bucket | None) -> str:
        if other is None:
            return "cannot be told here"
        with other:
            try:
                other.head("thinwire-doctor")
            except KeyNotFound:
                self.missing_bucket = "KeyNotFound"
                raise Stop(
                    f"{other.url} does not exist and looks like an empty bucket",
                    hint="check the bucket's name by hand: a wrong one will not be noticed",
                ) from None
            except ThinwireError as error:
                self.missing_bucket = type(error).__name__
                if isinstance(error, (BucketNotFound, AccessDenied)):
                    return f"{self.missing_bucket}: {error}"
                raise
        raise Stop(f"{other.url} was made up and holds an object", hint=_DIFFERENT)

    def create_twice(self) -> str:
        key = self.key("twice")
        self.observed["create_only"] = False
        try:
            self.bucket.create(key, b"first")
        except AlreadyExists:
            # a client that retried by itself finds its own object
            if self.bucket.get(key) != b"first":
                raise
        try:
            self.bucket.create(key, b"second")
        except AlreadyExists:
            self._see(key, b"first", None, "the first creator's bytes")
            self.observed["create_only"] = True
            return "the second is refused"
        raise Stop("the second create of a key replaced the first", hint=_DIFFERENT)

    def create_race(self) -> str:
        """One of eight wins, three times; a store that does not claim it may have more."""
        claimed = self.bucket.capabilities.create_only
        most = 0
        for race in range(_RACES):
            key = self.key(f"race-{race}")
            contents = [f"creator {number}".encode() for number in range(_RACERS)]
            won = _together(functools.partial(self._created, key), contents)
            most = max(most, won.count(True))
            stored = self.bucket.get(key)
            if won.count(True) == 1 and stored != contents[won.index(True)]:
                self.observed["create_only"] = False
                raise Stop(
                    "a creator was told that it won, another's bytes are there", hint=_DIFFERENT
                )
        if most <= 1:
            return f"one of {_RACERS} wins, {_RACES} times out of {_RACES}"
        self.observed["create_only"] = False
        said = f"{most} of {_RACERS} creators at once were told that they won"
        if claimed:
            raise Stop(f"{said}, although the store claims create-only", hint=_DIFFERENT)
        return f"{said}; as the store says: let one trainer write to a prefix"

    def replace(self) -> str:
        key = self.key("replaced")
        for number in range(_REPLACES):
            content = f"content {number}".encode() * (number + 1)
            self.bucket.put(key, content)
            self._see(key, content, "read_after_replace", "what just replaced it")
        return "visible at once"

    def replace_whole(self) -> str:
        """Readers at work while an object is replaced see one content or the other."""
        key = self.key("whole")
        contents = [b"a" * 200_000, b"b" * 150_001]
        self.bucket.put(key, contents[0])
        done = threading.Event()

        def read() -> bool:
            whole = True
            while not done.is_set():
                whole &= self.bucket.get(key) in contents
            return whole

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for number in range(_REPLACES):
                    self.bucket.put(key, contents[(number + 1) % 2])
            finally:
                done.set()
            whole = all(reader.result() for reader in readers)
        self.observed["atomic_replace"] = whole
        if whole:
            return "readers see the old content or the new"
        if self.bucket.capabilities.atomic_replace:
            raise Stop("a reader saw a mixture while an object was replaced", hint=_DIFFERENT)
        return "readers may see a mixture, as the store says"

    def listing(self) -> str:
        names = [self.key(f"list/{number}") for number in range(3)]
        self.observed["list_after_write"] = False
        for name in names:
            self.bucket.put(name, b"12345")
            if name not in self._listed("list/"):
                raise Stop(f"{name} was written and is not listed", hint=_DIFFERENT)
        if self._listed("list/") != dict.fromkeys(names, 5):
            raise Stop("a listing shows other keys or sizes than were written", hint=_DIFFERENT)
        self.observed["list_after_write"] = True
        return "sees a new key at once"

    def deleting(self) -> str:
        key = self.key("deleted")
        self.bucket.put(key, b"x")
        self.observed["delete"] = False
        self.bucket.delete(key)
        with contextlib.suppress(KeyNotFound):
            self.bucket.head(key)
            raise Stop("a deleted object is still there", hint=_DIFFERENT)
        if key in self._listed("deleted"):
            raise Stop("a deleted object is still listed", hint=_DIFFERENT)
        self.bucket.delete(key)
        self.observed["delete"] = True
        return "works, and once more does no harm"

    def notifications(self) -> str:
        if not self.bucket.capabilities.notifications:
            return "none: followers look once per poll interval"
        told = threading.Event()
        key = self.key("watched")
        end = self.bucket.watch(self.prefix, told.set)
        try:
            self.bucket.put(key, b"x")
            self.observed["notifications"] = told.wait(_WATCH_S)
        finally:
            end()
        if not self.observed["notifications"]:
            raise Retryable(
                f"no word of a change within {_WATCH_S:.0f} s",
                hint="nothing depends on it: followers look once per poll interval as well",
            )
        return "a change is told of"

    # --- inside ------------------------------------------------------------------------------

    def _see(self, key: str, content: bytes, capability: str | None, what: str) -> None:
        seen = self.bucket.get(key) == content and self.bucket.head(key).size == len(content)
        if capability is not None:
            self.observed[capability] = seen
        if not seen:
            raise CorruptPayload(f"reading {key} does not give {what}", hint=_DIFFERENT)

    def _created(self, key: str, content: Data) -> bool:
        try:
            self.bucket.create(key, content)
        except AlreadyExists:
            return False
        return True

    def _listed(self, name: str) -> dict[str, int]:
        return {info.key: info.size for info in self.bucket.list(self.prefix + name)}

    def _clean(self) -> str:
        count, failure = 0, None
        for key in self._written:
            try:
                self.bucket.delete(key)
                count += 1
            except BucketNotFound:
                return "nothing was written"
            except ThinwireError as error:
                failure = error
        if failure is not None:
            kept = len(self._written) - count
            failure.args = (f"up to {kept} objects are left under {self.prefix}: {failure}",)
            raise failure
        return f"removed everything under {self.prefix}"


def _together(work: Callable[[bytes], bool], items: list[bytes]) -> list[bool]:
    barrier = threading.Barrier(len(items))

    def run(item: bytes) -> bool:
        barrier.wait()
        return work(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(run, items))


def _remove_empty(root: Path, prefix: str, *, itself: bool) -> None:
    """Folders that the probe made and emptied, in a local bucket."""
    base = root / prefix
    for folder in (base / "list", base, base.parent, *([root] if itself else [])):
        with contextlib.suppress(OSError):
            folder.rmdir()
