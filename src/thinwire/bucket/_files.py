"""The steps from which a local bucket makes a durable, whole file, each inside an open folder.

Names are relative to a folder's descriptor, so nothing here can be led elsewhere by a rename or a
symbolic link. Everything raises plain :class:`OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = [
    "IN_BUCKET",
    "link_or_rename",
    "supports_hard_links",
    "sync_file",
    "sync_folder",
    "temporary_file",
]

IN_BUCKET = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening anything below the root.

``O_NOFOLLOW`` turns a symbolic link into ELOOP; together with ``O_DIRECTORY`` Linux says ENOTDIR
instead, which reads like a missing key. ``O_NONBLOCK`` keeps a stray FIFO from blocking.
"""

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def sync_file(file: int) -> None:
    """Wait until the file's bytes are on the medium, not only in the drive's cache."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # not every file system there has it
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    os.fsync(file)


def sync_folder(folder: int) -> None:
    """Wait until the folder's names are on the medium."""
    try:
        sync_file(folder)
    except OSError as error:
        # Some network file systems have no such thing for folders and say so with EINVAL.
        if error.errno != errno.EINVAL:
            raise


@contextlib.contextmanager
def temporary_file(folder: int, blocks: Iterable[memoryview]) -> Iterator[str]:
    """The name of a new, synced file that holds ``blocks``; removed at the end if still there."""
    name = _temporary_name()
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | IN_BUCKET, 0o666, dir_fd=folder)
    try:
        try:
            for block in blocks:
                _write(file, block)
            sync_file(file)
        finally:
            os.close(file)
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def link_or_rename(folder: int, temporary: str, name: str) -> None:
    """Give the file its name unless that is taken: atomically, or under a lock without links.

    Raises:
        FileExistsError: the name is taken.
    """
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _rename_under_lock(folder, temporary, name)
    else:
        os.unlink(temporary, dir_fd=folder)


def supports_hard_links(place: Path) -> bool:
    """Whether a hard link can be made in ``place``, by making one; false if nothing can be made."""
    file, link = place / _temporary_name(), place / _temporary_name()
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | IN_BUCKET, 0o600))
        os.link(file, link)
    except OSError as error:
        if error.errno in {*_NO_HARD_LINKS, errno.EACCES, errno.EROFS}:
            return False
        raise
    finally:
        for leftover in (file, link):
            with contextlib.suppress(OSError):
                leftover.unlink()
    return True


def _temporary_name() -> str:
    return f".{secrets.token_hex(8)}.tmp"


def _write(file: int, block: memoryview) -> None:
    while block:
        block = block[os.write(file, block) :]


def _rename_under_lock(folder: int, temporary: str, name: str) -> None:
    lock = os.open(".lock", os.O_RDWR | os.O_CREAT | IN_BUCKET, 0o666, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor as well
        os.close(lock)
