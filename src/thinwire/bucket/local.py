"""A bucket in a directory: for one machine, a shared file system, and tests.

An object is a file whose path under the root is its key. It is written to a temporary name in
its own folder, synced, then renamed (``put``) or hard-linked (``create``) into place, and the
folder is synced too: a crash at any moment leaves the old object, or none, or the new one whole.
What a crash leaves behind is called ``.<random>.tmp``. No key can start with a dot, so leftovers
are never listed or read, and may be deleted whenever no writer runs.

Folders are opened one by one, each relative to the one before, and symbolic links below the root
are not followed: a key cannot leave the root. Being a file system, a local bucket cannot hold both
``a`` and ``a/b``; the second write raises :class:`~thinwire.errors.InvalidKey`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

from thinwire.bucket._files import (
    IN_BUCKET,
    link_or_rename,
    supports_hard_links,
    sync_folder,
    temporary_file,
)
from thinwire.bucket.base import (
    CHUNK,
    Bucket,
    Capabilities,
    Data,
    ObjectInfo,
    check_key,
    iter_data,
)
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    InvalidKey,
    KeyNotFound,
    ThinwireError,
)

__all__ = ["LocalBucket"]

Meaning = Mapping[int, type[ThinwireError]]

_ANYWHERE: Meaning = {
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.ELOOP: InvalidKey,
    errno.ENAMETOOLONG: InvalidKey,
}
_READING: Meaning = {
    **_ANYWHERE,
    errno.ENOENT: KeyNotFound,
    errno.ENOTDIR: KeyNotFound,
    errno.EISDIR: KeyNotFound,
}
_WRITING: Meaning = {**_ANYWHERE, errno.ENOTDIR: InvalidKey, errno.EISDIR: InvalidKey}


class LocalBucket(Bucket):
    """A bucket in the directory ``root``, which the first write creates.

    ``capabilities.create_only`` is found by making one hard link. Where the file system has none,
    ``create`` checks and renames under a file lock: atomic among writers that share the lock (one
    machine), which is less than the capability promises, so it reads false there, as it does where
    this process may write nothing.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = self.root.as_uri()
        self._synced: set[str] = set()

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """Probed once, in the root or else its nearest existing parent.

        Raises:
            BucketUnavailable: the probe failed for a reason that says nothing about links.
        """
        with _translated("probe", self.url, _ANYWHERE):
            place = next(path for path in (self.root, *self.root.parents) if path.is_dir())
            return Capabilities(create_only=supports_hard_links(place), atomic_replace=True)

    def get(self, key: str) -> bytes:
        with self._object(key) as file:
            return file.read()

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        with self._object(key) as file:
            while block := file.read(chunk):
                yield block

    def head(self, key: str) -> ObjectInfo:
        with self._object(key) as file:
            return ObjectInfo(key, os.fstat(file.fileno()).st_size)

    def put(self, key: str, data: Data) -> None:
        with (
            self._folder(key, "write", _WRITING) as (folder, name),
            temporary_file(folder, iter_data(data)) as temporary,
        ):
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            sync_folder(folder)

    def create(self, key: str, data: Data) -> None:
        with (
            self._folder(key, "create", _WRITING) as (folder, name),
            temporary_file(folder, iter_data(data)) as temporary,
        ):
            try:
                link_or_rename(folder, temporary, name)
            except FileExistsError:
                if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
                # Whoever made it may not have synced yet, and "exists" must mean "stays".
                sync_folder(folder)
                raise AlreadyExists(f"{key!r} already exists in {self.url}") from None
            sync_folder(folder)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with _translated("list", self.url, _ANYWHERE):
            root = self._open_root()
            try:
                yield from _objects(root, "", prefix)
            finally:
                os.close(root)

    def delete(self, key: str) -> None:
        with (
            contextlib.suppress(KeyNotFound),
            self._folder(key, "delete", _READING) as (folder, name),
        ):
            if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def _object(self, key: str) -> Iterator[FileIO]:
        """The file under ``key``, open for reading."""
        with self._folder(key, "read", _READING) as (folder, name):

            def opener(path: str, flags: int) -> int:
                return os.open(path, flags | IN_BUCKET, dir_fd=folder)

            with open(name, "rb", buffering=0, opener=opener) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise KeyNotFound(f"{key!r} in {self.url} is not a regular file")
                yield file

    @contextlib.contextmanager
    def _folder(self, key: str, action: str, meaning: Meaning) -> Iterator[tuple[int, str]]:
        """The open folder that holds ``key`` (made for writing) and the object's name in it."""
        *segments, name = check_key(key).split("/")
        make = meaning is _WRITING
        with _translated(action, f"{key!r} in {self.url}", meaning):
            folder = self._open_root(make=make)
            try:
                path = ""
                for segment in segments:
                    path += f"{segment}/"
                    if make:
                        self._make_folder(folder, segment, path)
                    parent, folder = folder, os.open(segment, IN_BUCKET, dir_fd=folder)
                    os.close(parent)
                yield folder, name
            finally:
                os.close(folder)

    def _make_folder(self, parent: int, name: str, path: str) -> None:
        made = True
        try:
            os.mkdir(name, dir_fd=parent)
        except FileExistsError:
            made = False
        # A folder found is synced once as well: whoever made it may not have come that far.
        if made or path not in self._synced:
            sync_folder(parent)
            self._synced.add(path)

    def _open_root(self, *, make: bool = False) -> int:
        try:
            if make:
                self._make_root()
            return os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise BucketNotFound(f"no bucket at {self.url}: {error.strerror}") from error

    def _make_root(self) -> None:
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
        if not missing and "" in self._synced:
            return
        for path in {self.root, *missing}:
            # A parent that may not be opened is somebody else's, made long before.
            with contextlib.suppress(PermissionError):
                parent = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    sync_folder(parent)
                finally:
                    os.close(parent)
        self._synced.add("")


@contextlib.contextmanager
def _translated(action: str, subject: str, meaning: Meaning) -> Iterator[None]:
    """Operating-system errors as thinwire's; what ``meaning`` lacks is ``BucketUnavailable``."""
    try:
        yield
    except OSError as error:
        kind = meaning.get(error.errno or 0, BucketUnavailable)
        raise kind(f"cannot {action} {subject}: {error.strerror or error}") from error


def _objects(folder: int, path: str, prefix: str) -> Iterator[ObjectInfo]:
    """The objects below an open folder in key order; what vanishes meanwhile is left out."""

    def key_of(entry: os.DirEntry[str]) -> str:
        # "a-b" sorts before "a/b", so a folder is compared with its slash.
        return path + entry.name + "/" * entry.is_dir(follow_symlinks=False)

    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=key_of)
    for entry in ordered:
        key = key_of(entry)
        if not _is_key(key.rstrip("/")):
            continue
        with contextlib.suppress(FileNotFoundError):
            if key.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from _objects_in(entry.name, folder, key, prefix)
            elif key.startswith(prefix) and entry.is_file(follow_symlinks=False):
                yield ObjectInfo(key, entry.stat(follow_symlinks=False).st_size)


def _objects_in(name: str, parent: int, path: str, prefix: str) -> Iterator[ObjectInfo]:
    folder = os.open(name, IN_BUCKET, dir_fd=parent)
    try:
        yield from _objects(folder, path, prefix)
    finally:
        os.close(folder)


def _is_key(name: str) -> bool:
    try:
        check_key(name)
    except InvalidKey:
        return False
    return True
