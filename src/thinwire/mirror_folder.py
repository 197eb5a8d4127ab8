"""A mirror's folder as it describes itself: names, locks, the state file, and what is not right.

Everything here only reads, or is about one file; :mod:`thinwire.disk` is the writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.digest import TensorDigest
from thinwire.errors import CorruptPayload, MirrorBusy, MirrorCorrupt, Misuse, ThinwireError
from thinwire.journal import Entry, read_entries
from thinwire.log.commit import Tip
from thinwire.log.records import open_record, seal_record
from thinwire.schema import Schema

__all__ = [
    "CONTROL",
    "INCOMING",
    "JOURNAL",
    "PATCHING",
    "STATE",
    "WRITER",
    "MirrorState",
    "claim",
    "damaged_files",
    "file_hash",
    "fsync_file",
    "fsync_folder",
    "header_hash",
    "is_mirror",
    "locked",
    "read_held",
    "read_state",
    "unlock",
    "writer_lock",
]

CONTROL = ".thinwire"
STATE, JOURNAL, WRITER, PATCHING, INCOMING = (
    "state.json",
    "journal",
    "writer",
    "patching",
    "incoming",
)


def is_mirror(folder: Path) -> bool:
    """Whether a folder is, or is becoming, a mirror."""
    return (folder / CONTROL).is_dir()


# --- what it holds -------------------------------------------------------------------------


@dataclass(frozen=True)
class MirrorState:
    """What a mirror holds: the contents of ``state.json``, or those moved on by its journal.

    Attributes:
        held: run, version and commit hash.
        schema: the run's tensors.
        digests: per tensor, in schema order.
        files: path, size and ``sha256`` (shards: ``header_sha256``) of every file pulled.
    """

    held: Tip
    schema: Schema
    digests: Sequence[TensorDigest]
    files: Sequence[dict[str, Any]]

    def encode(self) -> bytes:
        """The bytes of the state file."""
        body = {
            "commit": self.held.hash,
            "digests": [f"{d.lo:016x}{d.hi:016x}" for d in self.digests],
            "files": list(self.files),
            "run": self.held.run,
            "schema": self.schema.to_json(),
            "version": self.held.version,
        }
        return seal_record("mirror", body)

    def after(self, entry: Entry) -> MirrorState | None:
        """The state that a journal entry leads to; None if it is in the state already.

        Raises:
            MirrorCorrupt: the entry does not follow.
        """
        if entry.version <= self.held.version:
            return None  # written down before the journal was emptied
        if entry.version != self.held.version + 1 or entry.parent != self.held.hash:
            raise MirrorCorrupt(f"the journal's version {entry.version} does not follow")
        digests = list(self.digests)
        for ordinal, digest in entry.digests.items():
            digests[ordinal] = digest
        return replace(self, held=Tip(self.held.run, entry.version, entry.commit), digests=digests)


def read_state(folder: Path) -> MirrorState:
    """What ``state.json`` says.

    Raises:
        Misuse: there is none: nothing has been pulled in full.
        MirrorCorrupt: it is not what was written.
    """
    path = folder / CONTROL / STATE
    try:
        body = open_record("mirror", path.read_bytes())
        digests = [TensorDigest(int(d[:16], 16), int(d[16:], 16)) for d in body["digests"]]
        held = Tip(body["run"], body["version"], body["commit"])
        return MirrorState(held, Schema.from_json(body["schema"]), digests, body["files"])
    except FileNotFoundError:
        raise Misuse(f"the mirror {folder} holds no version yet", hint="pull into it") from None
    except (CorruptPayload, KeyError, TypeError, ValueError) as error:
        raise MirrorCorrupt(f"{path}: {error}") from None


def read_held(folder: Path, *, torn: bool = False) -> MirrorState:
    """``state.json`` moved on by the journal: what the files hold while nobody patches them.

    Args:
        torn: whether the journal may have the torn tail that a crash leaves.

    Raises:
        Misuse, MirrorCorrupt: as for :func:`read_state`; or the journal is damaged or torn.
    """
    state = read_state(folder)
    path = folder / CONTROL / JOURNAL
    data = path.read_bytes() if path.exists() else b""
    sealed = list(read_entries(data, state.schema))
    for entry, _ in sealed:
        state = state.after(entry) or state
    end = sealed[-1][1] if sealed else 0
    if end != len(data) and not torn:
        raise MirrorCorrupt(f"{path} is torn or damaged at byte {end}")
    return state


# --- what is not right ---------------------------------------------------------------------


def damaged_files(folder: Path, files: Iterable[dict[str, Any]]) -> Iterator[tuple[Path, str]]:
    """Files that are not as they were pulled, and why; of shards, the headers are compared."""
    for entry in files:
        path = folder / entry["path"]
        try:
            size = path.stat().st_size
            have = header_hash(path) if "header_sha256" in entry else file_hash(path)
        except (OSError, ThinwireError) as error:
            yield path, str(error)
            continue
        if size != entry["size"] or have != entry.get("header_sha256", entry.get("sha256")):
            yield path, "it is not the file that was pulled"


def file_hash(path: Path) -> str:
    """SHA-256 of a whole file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def header_hash(path: Path) -> str:
    """SHA-256, in hex, of a safetensors file up to its first tensor."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = min(int.from_bytes(prefix, "little"), path.stat().st_size)
        return hashlib.sha256(prefix + file.read(length)).hexdigest()


# --- locks ---------------------------------------------------------------------------------


def writer_lock(folder: Path) -> int:
    """A descriptor that makes this process the mirror's writer until it is unlocked.

    Raises:
        MirrorBusy: another process is.
    """
    path = folder / CONTROL / WRITER
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise MirrorBusy(f"another process writes the mirror {folder}") from None
    return descriptor


@contextlib.contextmanager
def locked(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """The lock that a writer holds exclusively while it patches, and readers share."""
    path = folder / CONTROL / PATCHING
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        unlock(descriptor)


def unlock(descriptor: int) -> None:
    """Give up a lock. Closing alone would leave it to a child forked meanwhile, for its life."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def claim(folder: Path) -> None:
    """Make the folder a mirror's.

    Raises:
        Misuse: it holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise Misuse(f"{folder} is not a folder")
    if not is_mirror(folder):
        if folder.exists() and any(folder.iterdir()):
            raise Misuse(
                f"{folder} is not empty and is not a mirror", hint="pull into a new folder"
            )
        (folder / CONTROL).mkdir(parents=True, exist_ok=True)


def fsync_file(path: Path) -> None:
    """Make a file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
