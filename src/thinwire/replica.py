"""The side that converges: follows a run through its bucket and keeps a verified mirror.

Every payload is checked (size, SHA-256, schema, positions) and the state digest that it would
lead to is compared with the commit's before a byte of the mirror changes. What cannot be verified
is refused, and the mirror stays at the version it holds.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from thinwire.anchor import Progress, first_files
from thinwire.bucket import Bucket
from thinwire.chain import Chain
from thinwire.digest import TensorDigest, digest_change, state_digest
from thinwire.disk import DiskMirror
from thinwire.errors import (
    BucketNotFound,
    CorruptPayload,
    DigestMismatch,
    HistoryRewritten,
    KeyNotFound,
    Misuse,
    Retryable,
    RunChanged,
    RunNotFound,
)
from thinwire.log import keys
from thinwire.log.commit import AnchorFile, Commit, RunInfo, Tip
from thinwire.log.plan import check_child, plan
from thinwire.mirror import Mirror, NoMirror
from thinwire.payload import (
    decode_payload_steps,
    decode_payloads,
    fetch_payloads,
    payload_limit,
)
from thinwire.schema import Schema
from thinwire.update import Update, UpdateStats
from thinwire.wakeup import watching

__all__ = ["Replica"]

_CONFIRM_EVERY_S = 30.0
_LONGEST_POLL_S = 86400.0
_ONE_THREAD = "follow in one thread, and hand the updates on from there"


class Replica:
    """Follows one run.

    Args:
        bucket: where the run is.
        mirror: a folder (:class:`~thinwire.disk.DiskMirror`) or any mirror; the replica closes a
            mirror that it opened. None to keep none: updates of runs published with
            ``codec="packed"`` then carry ULP steps, and the engine, which has to start with the
            weights of version 0, verifies them against its own bits.
        adopt: accept that the prefix now holds another run than the mirror does, and start over
            with it.
        base: a folder with version 0's weights, for runs whose bucket does not hold them.
        ahead: versions fetched ahead while one is verified and applied.
        progress: told about long transfers.

    Raises:
        Misuse, MirrorBusy, MirrorInUse, MirrorCorrupt: as for the mirror.
    """

    def __init__(
        self,
        bucket: Bucket,
        mirror: str | Path | Mirror | None,
        *,
        adopt: bool = False,
        base: str | Path | None = None,
        ahead: int = 2,
        progress: Progress | None = None,
    ) -> None:
        self.chain = Chain(bucket)
        self._adopt = adopt
        self._base = None if base is None else Path(base)
        self._ahead = max(1, ahead)
        self._progress = progress
        self._run: RunInfo | None = None
        self._moving = threading.Lock()
        self._owned = not isinstance(mirror, Mirror)
        if mirror is None:
            mirror = NoMirror()
        self.mirror = mirror if isinstance(mirror, Mirror) else DiskMirror(mirror)

    @property
    def version(self) -> int | None:
        """The version that the mirror holds."""
        return self.mirror.held.version if self.mirror.held else None

    @property
    def schema(self) -> Schema:
        """The run's tensors.

        Raises:
            Misuse: nothing has been pulled yet.
        """
        if self.mirror.held is None:
            raise Misuse("the replica has not pulled a version yet")
        return self.mirror.schema

    def sync(self, target: int | None = None) -> list[Update]:
        """Catch up with the newest version, or with ``target``; return every step made.

        Raises:
            RunNotFound: the bucket holds no run, or no version of it yet.
            RunChanged, RollbackRefused, HistoryRewritten: the bucket is not what it was.
            CorruptPayload, DigestMismatch, VersionGone: a version that cannot be verified or had.
            Misuse: ``target`` is not committed.
            Mirror and bucket errors.
        """
        return list(self.catch_up(target))

    def catch_up(self, target: int | None = None) -> Iterator[Update]:
        """Like :meth:`sync`, one version at a time: patches can be used and dropped."""
        return self._catch_up(target, None)

    def _catch_up(self, target: int | None, seen: int | None) -> Iterator[Update]:
        """``seen``: a version that was just found to exist, so as not to ask for it again."""
        run = self._known_run()
        tip = self._tip(run)
        known = None if tip is None else tip.version
        head = self.chain.sure_head() if known is None else self.chain.head(seen or known)
        if head is None:
            raise RunNotFound(f"{self.chain.bucket.url}: the run has no version yet")
        if target is not None and target > head:
            raise Misuse(f"version {target} is not committed yet: the newest is {head}")
        if tip is not None and head == tip.version:
            self.chain.confirm(tip)
        path = plan(known, head if target is None else target, [0])
        if path.anchor is not None:
            with self._alone():
                if self._tip(run) is not None:
                    raise Misuse("the mirror has moved to a version meanwhile", hint=_ONE_THREAD)
                update = self._load_first(run)
            yield update
        yield from self._deltas(run.schema, path.deltas)

    def follow(
        self,
        *,
        poll: float = 1.0,
        until: int | None = None,
        stop: threading.Event | None = None,
        patience: float = 60.0,
    ) -> Iterator[Update]:
        """Yield every version as it appears, starting with what is there already.

        Waits for a run, or for its first version, that does not exist yet. A bucket that tells of
        changes (``capabilities.notifications``) makes the next look come at once.

        Args:
            poll: seconds between looks.
            until: end after this version.
            stop: end when it is set.
            patience: seconds of :class:`~thinwire.errors.Retryable` errors, or of the bucket
                itself missing, to bear in a row before they are raised.

        Raises:
            As for :meth:`sync`.
        """
        if not 0 <= poll <= _LONGEST_POLL_S:
            raise Misuse(f"poll={poll!r} is not between 0 and {_LONGEST_POLL_S:.0f} seconds")
        stop = stop or threading.Event()
        bucket = self.chain.bucket
        hints = bucket.capabilities.notifications
        with watching(bucket, keys.COMMITS) as wakeup:
            yield from self._followed(
                until, stop, patience, lambda: wakeup.pause(poll, stop, hints=hints)
            )

    def _followed(
        self,
        until: int | None,
        stop: threading.Event,
        patience: float,
        pause: Callable[[], None],
    ) -> Iterator[Update]:
        trouble_since: float | None = None
        confirmed = 0.0
        while not stop.is_set():
            if until is not None and self.version is not None and self.version >= until:
                return
            try:
                seen = self._next_version(time.monotonic() - confirmed > _CONFIRM_EVERY_S)
                if seen is not None:
                    for update in self._catch_up(None, seen):
                        trouble_since = None
                        yield update
                        if stop.is_set() or (until is not None and update.version >= until):
                            return
                    confirmed = time.monotonic()
                elif time.monotonic() - confirmed > _CONFIRM_EVERY_S:
                    confirmed = time.monotonic()
                trouble_since = None
            except (Retryable, BucketNotFound):
                # a trainer that starts a moment later makes the bucket; a remount brings it back
                trouble_since = trouble_since or time.monotonic()
                if time.monotonic() - trouble_since > patience:
                    raise
            pause()

    def _next_version(self, confirm: bool) -> int | None:
        """The next version if it exists: one cheap question per poll.

        Now and then a second one, whether history still stands.
        """
        try:
            run = self._known_run()
        except RunNotFound:
            return None
        tip = self._tip(run) or run.tip
        if self.chain.exists(tip.version + 1):
            return tip.version + 1
        if confirm:
            self.chain.confirm(tip)
        return None

    def _known_run(self) -> RunInfo:
        if self._run is None:
            held = self.mirror.held
            try:
                run = self.chain.read_run()
            except RunNotFound:
                if held is None or self._adopt:
                    raise
                raise HistoryRewritten(
                    f"the mirror follows run {held.run}, {self.chain.bucket.url} holds none"
                ) from None
            if held is not None and held.run != run.run and not self._adopt:
                raise RunChanged(f"the mirror follows run {held.run}, the bucket holds {run.run}")
            self._run = run
        return self._run

    def _tip(self, run: RunInfo) -> Tip | None:
        held = self.mirror.held
        return held if held is not None and held.run == run.run else None

    # --- version 0 ----------------------------------------------------------------------

    def _load_first(self, run: RunInfo) -> Update:
        started = time.perf_counter()
        commit = self._read(0)
        check_child(commit, run.tip)
        files: Sequence[AnchorFile]
        fetch: Callable[[AnchorFile], Iterator[bytes]]
        if isinstance(self.mirror, NoMirror):
            files, fetch = (), _nothing
        else:
            files, fetch = first_files(self.chain.bucket, run, commit, self._base, self._progress)
        self.mirror.load(commit, run.schema, files, fetch)
        size = sum(file.size for file in files)
        stats = UpdateStats(size, run.schema.numel, fetch_s=time.perf_counter() - started)
        return Update(0, None, commit, stats)

    # --- deltas -------------------------------------------------------------------------

    def _deltas(self, schema: Schema, versions: range) -> Iterator[Update]:
        """Apply deltas in order, fetching a few ahead of the one being applied."""
        if not versions:
            return
        with ThreadPoolExecutor(self._ahead, thread_name_prefix="thinwire-fetch") as pool:
            waiting: collections.deque[Future[_Fetched]] = collections.deque()
            upcoming = iter(versions)
            try:
                for _ in versions:
                    while len(waiting) < self._ahead and (v := next(upcoming, None)) is not None:
                        waiting.append(pool.submit(self._fetch, schema, v))
                    fetched = waiting.popleft().result()
                    with self._alone():
                        update = self._apply(fetched)
                    yield update
            finally:
                for future in waiting:
                    future.cancel()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse another thread that would move the same mirror meanwhile."""
        if not self._moving.acquire(blocking=False):
            raise Misuse("another thread is using this replica", hint=_ONE_THREAD)
        try:
            yield
        finally:
            self._moving.release()

    def _read(self, version: int) -> Commit:
        try:
            return self.chain.read(version)
        except KeyNotFound:
            raise HistoryRewritten(f"version {version} was there and is gone") from None

    def _fetch(self, schema: Schema, version: int) -> _Fetched:
        started = time.perf_counter()
        commit = self._read(version)
        payloads = fetch_payloads(self.chain.bucket, commit, payload_limit(schema))
        return _Fetched(commit, payloads, time.perf_counter() - started)

    def _apply(self, fetched: _Fetched) -> Update:
        mirror, commit = self.mirror, fetched.commit
        if mirror.held is None:
            raise Misuse("the mirror is closed")
        if commit.version <= mirror.held.version:
            raise Misuse(f"the mirror has moved to version {mirror.held.version}", hint=_ONE_THREAD)
        check_child(commit, mirror.held)
        if isinstance(mirror, NoMirror):
            return self._pass_on(mirror, fetched)
        if len(mirror.tensors) != len(mirror.schema):
            raise Misuse("the mirror is closed")
        started = time.perf_counter()
        try:
            patches = decode_payloads(fetched.payloads, mirror.schema, mirror.tensors)
        except CorruptPayload as error:
            # its SHA-256 is the commit's: either the publisher wrote it so, or the base is damaged
            error.hint = "run `thinwire verify` on the mirror, then on the bucket"
            raise
        decoded = time.perf_counter()
        digests = list(mirror.digests)
        for patch in patches:
            digests[patch.ordinal] += digest_change(mirror.tensors[patch.ordinal], patch)
        _require(commit, mirror.schema, digests)
        verified = time.perf_counter()
        mirror.apply(commit, patches, digests)
        stats = UpdateStats(
            payload_bytes=commit.payload_bytes,
            changed=sum(map(len, patches)),
            fetch_s=fetched.seconds,
            decode_s=decoded - started,
            verify_s=verified - decoded,
            patch_s=time.perf_counter() - verified,
        )
        return Update(commit.version, tuple(patches), commit, stats)

    def _pass_on(self, mirror: NoMirror, fetched: _Fetched) -> Update:
        """Without a mirror: check what can be checked, and leave the bits to the engine."""
        started = time.perf_counter()
        patches = decode_payload_steps(fetched.payloads, mirror.schema)
        stats = UpdateStats(
            payload_bytes=fetched.commit.payload_bytes,
            changed=fetched.commit.changed,
            fetch_s=fetched.seconds,
            decode_s=time.perf_counter() - started,
        )
        mirror.apply(fetched.commit, (), ())
        return Update(fetched.commit.version, tuple(patches), fetched.commit, stats)

    def close(self) -> None:
        """Close the mirror if this replica opened it."""
        if self._owned:
            self.mirror.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _nothing(file: AnchorFile) -> Iterator[bytes]:
    return iter(())


@dataclass(frozen=True)
class _Fetched:
    commit: Commit
    payloads: list[bytearray]
    seconds: float


def _require(commit: Commit, schema: Schema, digests: Sequence[TensorDigest]) -> None:
    if state_digest(schema, digests) != commit.digest:
        raise DigestMismatch(f"version {commit.version} does not follow from what the mirror holds")
