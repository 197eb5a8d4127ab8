"""A folder of checked copies of objects, shared by threads and processes, bounded in size.

An entry is one file: the object's bytes, then a fixed tail of magic, size and SHA-256. It gets its
name by a rename once it is complete, and it is believed only after its hash has been computed
anew, so a crash, a full disk or a bad sector costs a copy and nothing else. Reading one sets its
time; the longest unread go first when the folder is full.

Whatever the file system says, nothing here raises OSError, except :meth:`Entry.pieces`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

__all__ = ["Entry", "EntryFolder", "EntryWriter", "Lead"]

_TAIL = struct.Struct(">8sQ32s")
_MAGIC = b"twcache1"
_BLOCK = 1 << 20
# The folder may hold files of others; these are the names of ours.
_ENTRY = re.compile(r"[0-9a-f]{64}\.entry")
_PASSING = re.compile(r"[0-9a-f]{64}\.(?:lock|[0-9a-f]{16}\.tmp)")
# A FIFO does not block, and a symbolic link leads nowhere.
_PLAIN = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_STALE_S = 3600.0


class EntryFolder:
    """The entries below ``path``.

    Args:
        limit: bytes that complete entries may take together.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit

    def open(self, name: str) -> Entry | None:
        """The entry, if it is there and whole; a damaged one is removed."""
        path = self._file(name)
        try:
            file = FileIO(os.open(path, os.O_RDONLY | _PLAIN), "rb")
        except OSError:
            return None
        with contextlib.suppress(OSError):
            size = _checked(file)
            if size is not None:
                os.utime(file.fileno())
                return Entry(file, size)
        file.close()
        self.remove(name)
        return None

    def remove(self, name: str) -> None:
        """Forget an entry."""
        with contextlib.suppress(OSError):
            self._file(name).unlink()

    def write(self, name: str) -> EntryWriter:
        """What an entry is written with."""
        return EntryWriter(self, self._file(name))

    def lead(self, name: str) -> Lead | None:
        """The right to fetch an object for all others, or None while another has it.

        A lock of the file system, hence of threads and processes alike. Where locks are not to be
        had everybody leads.
        """
        path = self._file(name).with_suffix(".lock")
        file = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | _PLAIN, 0o666)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:
            if file >= 0:
                os.close(file)
            return Lead(path, -1)
        return Lead(path, file)

    def pulse(self, name: str) -> float | None:
        """When whoever leads last got a piece, as a time to compare with others of its kind."""
        try:
            return self._file(name).with_suffix(".lock").stat().st_mtime
        except OSError:
            return None

    def make_room(self, size: int) -> None:
        """Remove the longest unread until ``size`` more bytes fit, and what crashes left."""
        entries, total = [], 0
        with contextlib.suppress(OSError), os.scandir(self.path) as found:
            for item in found:
                with contextlib.suppress(OSError):
                    status = item.stat(follow_symlinks=False)
                    if _ENTRY.fullmatch(item.name):
                        entries.append((status.st_mtime_ns, status.st_size, item.path))
                        total += status.st_size
                    elif time.time() - status.st_mtime > _STALE_S and _PASSING.fullmatch(item.name):
                        os.unlink(item.path)
        for _, freed, path in sorted(entries):
            if total + size <= self.limit:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= freed

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.entry"


class Entry:
    """An open entry whose hash was right. It stays readable if it is removed meanwhile."""

    def __init__(self, file: FileIO, size: int) -> None:
        self._file = file
        self.size = size

    def pieces(self, chunk: int) -> Iterator[bytes]:
        """The object's bytes.

        Raises:
            OSError: the file can no longer be read.
        """
        with self._file as file:
            file.seek(0)
            left = self.size
            while left:
                block = file.read(min(chunk, left))
                if not block:
                    raise OSError("the entry became shorter")
                left -= len(block)
                yield block


class EntryWriter:
    """Takes an object's bytes as they pass; whatever fails, it only stops taking them."""

    def __init__(self, folder: EntryFolder, path: Path) -> None:
        self._folder, self._path = folder, path
        self._temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        self._hash = hashlib.sha256()
        self._size = 0
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self._temporary, "xb")

    def write(self, piece: bytes) -> None:
        """Add the next piece."""
        if self._file is None:
            return
        self._size += len(piece)
        if self._size + _TAIL.size > self._folder.limit:
            self.abandon()
            return
        self._hash.update(piece)
        self._append(piece)

    def commit(self, sha256_prefix: str = "") -> None:
        """The object is complete: keep it, if its hash begins with ``sha256_prefix``."""
        if self._file is None or not self._hash.hexdigest().startswith(sha256_prefix):
            return
        self._append(_TAIL.pack(_MAGIC, self._size, self._hash.digest()))
        if self._file is None:
            return
        self._folder.make_room(self._size + _TAIL.size)
        with contextlib.suppress(OSError):
            os.rename(self._temporary, self._path)
            self._file.close()
            self._file = None

    def abandon(self) -> None:
        """Remove what was written, unless it was committed."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()

    def _append(self, piece: bytes) -> None:
        view = memoryview(piece)
        try:
            while view and self._file is not None:
                view = view[self._file.write(view) :]
        except OSError:  # a full disk, most likely
            self.abandon()


class Lead:
    """The right to fetch an object; others wait as long as it shows a pulse."""

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file

    def pulse(self) -> None:
        """Show that something is still coming."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def end(self) -> None:
        """Let the others look. Who has the old lock file open meanwhile may fetch once more."""
        file, self._file = self._file, -1
        if file < 0:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor as well
        os.close(file)


def _checked(file: FileIO) -> int | None:
    """The object's size if the entry is whole."""
    status = os.fstat(file.fileno())
    size = status.st_size - _TAIL.size
    if size < 0 or not stat.S_ISREG(status.st_mode):
        return None
    digest, left = hashlib.sha256(), size
    while left:
        block = file.read(min(_BLOCK, left))
        if not block:
            return None
        digest.update(block)
        left -= len(block)
    return size if file.read() == _TAIL.pack(_MAGIC, size, digest.digest()) else None
