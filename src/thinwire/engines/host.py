"""The mirror that all ranks on a host share: one of them writes it, the others read it.

Whoever gets the mirror's writer lock fetches, decodes and verifies every version, once per host.
The others take the verified changes from the mirror's journal. Where a rank has missed some, since
the journal is emptied now and then, it reads whole tensors instead.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from thinwire.bucket import open_bucket
from thinwire.checkpoint import Checkpoint
from thinwire.digest import TensorDigest
from thinwire.errors import BucketUnavailable, MirrorBusy, MirrorInUse, Misuse, RollbackRefused
from thinwire.journal import Entry, read_entries
from thinwire.mirror_folder import (
    CONTROL,
    JOURNAL,
    STATE,
    MirrorState,
    claim,
    locked,
    read_state,
)
from thinwire.patch import Bits, Patch
from thinwire.replica import Replica
from thinwire.schema import Schema
from thinwire.update import UpdateStats

__all__ = ["HostMirror", "ReadingRank", "WritingRank", "open_host_mirror"]

_LOOK_S = 0.02
_IN_USE_S = 10.0


class HostMirror(abc.ABC):
    """A rank's share in its host's mirror.

    Attributes:
        writes: whether this rank is the one that moves the mirror.
    """

    writes: bool

    def __init__(self) -> None:
        self._changes: dict[int, Sequence[Patch] | None] = {}

    @property
    @abc.abstractmethod
    def version(self) -> int | None:
        """The version that the mirror holds, as far as this rank knows; None before the first."""

    @property
    @abc.abstractmethod
    def schema(self) -> Schema:
        """The run's tensors."""

    @property
    @abc.abstractmethod
    def digests(self) -> Sequence[TensorDigest]:
        """Of the version held, in schema order."""

    @abc.abstractmethod
    def advance(self, target: int | None) -> UpdateStats:
        """Get to ``target``; None: the newest version there is. A reader waits for its writer.

        Raises:
            RollbackRefused: the mirror is beyond the target.
            BucketUnavailable: the writer did not get there in time.
            What a replica and its mirror raise.
        """

    @abc.abstractmethod
    def reading(self) -> contextlib.AbstractContextManager[Sequence[Bits]]:
        """Every tensor's elements, in schema order; nothing changes and nothing may be kept."""

    def changes(self, since: int) -> list[Sequence[Patch]] | None:
        """What changed after version ``since``, version by version; None if that is not known."""
        if self.version is None:
            return None
        found = []
        for version in range(since + 1, self.version + 1):
            patches = self._changes.get(version)
            if patches is None:
                return None
            found.append(patches)
        return found

    def forget(self, upto: int) -> None:
        """Let go of changes that have been applied."""
        for version in [v for v in self._changes if v <= upto]:
            del self._changes[version]

    def close(self) -> None:
        """Let go of files and locks."""
        return


class WritingRank(HostMirror):
    """The rank that follows the bucket."""

    writes = True

    def __init__(self, bucket: str, folder: Path) -> None:
        super().__init__()
        self._replica = Replica(open_bucket(bucket), folder)

    @property
    def version(self) -> int | None:
        return self._replica.version

    @property
    def schema(self) -> Schema:
        return self._replica.schema

    @property
    def digests(self) -> Sequence[TensorDigest]:
        return self._replica.mirror.digests

    def advance(self, target: int | None) -> UpdateStats:
        held = self.version
        if target is not None and held is not None:
            if target == held:
                return UpdateStats()
            if target < held:
                raise RollbackRefused(f"the mirror holds version {held}, which is past {target}")
        give_up = time.monotonic() + _IN_USE_S
        stats = UpdateStats()
        while True:
            try:
                for update in self._replica.catch_up(target):
                    stats += update.stats
                    patches = update.patches
                    self._changes[update.version] = (
                        None
                        if patches is None
                        else [patch for patch in patches if isinstance(patch, Patch)]
                    )
                return stats
            except MirrorInUse:
                # an engine that starts from the mirror's own files lets go of them once it has
                # loaded; one that does not would see its weights change
                if time.monotonic() > give_up:
                    raise
                time.sleep(_LOOK_S)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Sequence[Bits]]:
        with self._replica.mirror.reading():
            yield self._replica.mirror.tensors

    def close(self) -> None:
        self._replica.close()


class ReadingRank(HostMirror):
    """A rank beside the one that writes: sees what is sealed in the mirror's journal."""

    writes = False

    def __init__(self, folder: Path, *, patience: float = 600.0) -> None:
        super().__init__()
        self._folder = folder
        self._patience = patience
        self._stamp: tuple[int, int] | None = None
        self._state: MirrorState | None = None
        self._offset = 0
        self._look()

    @property
    def version(self) -> int | None:
        return None if self._state is None else self._state.held.version

    @property
    def schema(self) -> Schema:
        return self._known().schema

    @property
    def digests(self) -> Sequence[TensorDigest]:
        return self._known().digests

    def _known(self) -> MirrorState:
        if self._state is None:
            raise Misuse(f"the mirror {self._folder} holds no version yet")
        return self._state

    def advance(self, target: int | None) -> UpdateStats:
        give_up = time.monotonic() + self._patience
        self._look()
        while target is not None and (self.version is None or self.version < target):
            if time.monotonic() > give_up:
                raise BucketUnavailable(
                    f"the mirror's writer has not got to version {target} in {self._patience:.0f} s"
                )
            time.sleep(_LOOK_S)
            self._look()
        if target is not None and self.version is not None and self.version > target:
            raise RollbackRefused(f"the mirror holds version {self.version}, past {target}")
        return UpdateStats()

    def _look(self) -> None:
        """Move on to what the folder holds now; nobody writes it meanwhile."""
        state_path, journal = (self._folder / CONTROL / name for name in (STATE, JOURNAL))
        with locked(self._folder, exclusive=False):
            if not state_path.exists():
                return
            found = state_path.stat()
            stamp = (found.st_ino, found.st_mtime_ns)
            written = read_state(self._folder) if stamp != self._stamp else None
            size = journal.stat().st_size if journal.exists() else 0
            if written is not None or size < self._offset:
                self._offset = 0
            data = b""
            if size > self._offset:
                with journal.open("rb") as file:
                    file.seek(self._offset)
                    data = file.read(size - self._offset)
        if written is not None:
            self._stamp = stamp
            if self._state is None or written.held.run != self._state.held.run:
                self._changes.clear()
                self._state = written
            elif written.held.version > self._state.held.version:
                self._state = written  # a gap: what lies between is not known as changes
        end = 0
        for entry, end in read_entries(data, self._known().schema):  # noqa: B007
            self._take(entry)
        self._offset += end

    def _take(self, entry: Entry) -> None:
        after = self._known().after(entry)
        if after is not None:
            self._state = after
            self._changes[entry.version] = entry.patches

    @contextlib.contextmanager
    def reading(self) -> Iterator[Sequence[Bits]]:
        with locked(self._folder, exclusive=False):
            mapped = Checkpoint.open(self._folder).map()
            tensors = [mapped[spec.name] for spec in self.schema]
            try:
                yield tensors
            finally:
                tensors.clear()
                mapped.clear()


def open_host_mirror(bucket: str, folder: str | Path) -> HostMirror:
    """The mirror in ``folder``, as its writer if there is none yet, else as a reader.

    Raises:
        Misuse, MirrorCorrupt: as for a mirror on disk.
    """
    path = Path(folder).absolute()
    claim(path)
    try:
        return WritingRank(bucket, path)
    except MirrorBusy:
        return ReadingRank(path)
