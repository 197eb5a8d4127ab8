"""The local bucket: what only a file system can get wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.bucket import Bucket, Capabilities, LocalBucket
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    InvalidKey,
    KeyNotFound,
    Misuse,
    ThinwireError,
)
from thinwire.testing.conformance import OPERATIONS, BucketConformance


def no_hard_links(*_args: object, **_options: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


class TestLocalBucket(BucketConformance):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return LocalBucket(tmp_path / "not" / "yet")

    @pytest.fixture
    def missing_bucket(self, tmp_path: Path) -> Bucket:
        return LocalBucket(tmp_path / "nowhere")


class TestWithoutHardLinks(BucketConformance):
    @pytest.fixture
    def bucket(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
        monkeypatch.setattr(os, "link", no_hard_links)
        return LocalBucket(tmp_path / "bucket")

    def test_one_of_many_creators_wins(self, bucket: Bucket) -> None:
        # On one machine the lock keeps the promise, though the capability cannot.
        assert not bucket.capabilities.create_only
        bucket.__dict__["capabilities"] = Capabilities(create_only=True, atomic_replace=True)
        super().test_one_of_many_creators_wins(bucket)


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    return LocalBucket(tmp_path / "bucket")


def listed(bucket: Bucket) -> list[str]:
    return [info.key for info in bucket.list()]


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# --- capabilities and the root ---------------------------------------------------------------


def test_probing_leaves_nothing_behind(bucket: LocalBucket) -> None:
    assert bucket.capabilities.create_only
    assert not bucket.root.exists()
    assert list(bucket.root.parent.iterdir()) == []
    bucket.put("a", b"")
    assert LocalBucket(bucket.root).capabilities.create_only
    assert files(bucket.root) == ["a"]


def test_a_probe_that_fails_otherwise_is_not_an_answer(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", raising(errno.EIO))
        with pytest.raises(BucketUnavailable, match="Input/output error"):
            _ = bucket.capabilities
    assert bucket.capabilities.create_only


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        for operation in OPERATIONS.values():
            with pytest.raises(BucketNotFound):
                operation(LocalBucket(root), "key")


def test_a_root_that_vanishes_is_made_again(bucket: LocalBucket) -> None:
    bucket.put("key", b"x")
    (bucket.root / "key").unlink()
    bucket.root.rmdir()
    with pytest.raises(BucketNotFound):
        bucket.get("key")
    bucket.put("key", b"y")
    assert bucket.get("key") == b"y"


def test_the_root_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    LocalBucket(tmp_path / "link").put("key", b"x")
    assert files(tmp_path / "real") == ["key"]


# --- files and folders are not keys ------------------------------------------------------------


def test_a_folder_is_not_an_object(bucket: LocalBucket) -> None:
    bucket.put("a/b", b"x")
    for operation in ("put", "create"):
        for key in ("a", "a/b/c", "a/b/c/d"):
            with pytest.raises(InvalidKey):
                OPERATIONS[operation](bucket, key)
    assert files(bucket.root) == ["a/b"]


def test_leftovers_and_strangers_are_not_listed(bucket: LocalBucket) -> None:
    bucket.put("a/b", b"x")
    for name in (".0123456789abcdef.tmp", "a/.lock", ".hidden/c", "with space", "a/ümlaut"):
        path = bucket.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"leftover")
    os.mkfifo(bucket.root / "fifo")
    assert listed(bucket) == ["a/b"]
    with pytest.raises(KeyNotFound):
        bucket.get("fifo")


def test_objects_that_vanish_while_listing_are_left_out(bucket: LocalBucket) -> None:
    for key in ("a", "b", "c/d", "e/f", "g"):
        bucket.put(key, b"x")
    listing = bucket.list()
    assert next(listing).key == "a"
    bucket.delete("b")
    (bucket.root / "c" / "d").unlink()
    (bucket.root / "c").rmdir()
    bucket.delete("e/f")
    assert [info.key for info in listing] == ["g"]


def test_new_files_follow_the_umask(bucket: LocalBucket) -> None:
    previous = os.umask(0o027)
    try:
        bucket.put("a", b"")
        bucket.create("b", b"")
    finally:
        os.umask(previous)
    for name in "ab":
        assert (bucket.root / name).stat().st_mode & 0o777 == 0o640


# --- symbolic links ----------------------------------------------------------------------------


@pytest.fixture
def outside(bucket: LocalBucket) -> Path:
    """A folder beside the bucket, with links to it from inside."""
    outside = bucket.root.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    bucket.put("here", b"x")
    (bucket.root / "folder").symlink_to(outside)
    (bucket.root / "file").symlink_to(outside / "secret")
    return outside


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_no_key_leads_through_a_linked_folder(
    bucket: LocalBucket, outside: Path, operation: str
) -> None:
    for key in ("folder/secret", "folder/new", "folder/sub/new"):
        with pytest.raises(InvalidKey):
            OPERATIONS[operation](bucket, key)
    assert files(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize("operation", ["get", "stream", "head"])
def test_a_linked_file_is_not_read(bucket: LocalBucket, outside: Path, operation: str) -> None:
    with pytest.raises(InvalidKey):
        OPERATIONS[operation](bucket, "file")


def test_writes_leave_a_links_target_alone(bucket: LocalBucket, outside: Path) -> None:
    with pytest.raises(AlreadyExists):
        bucket.create("file", b"x")
    bucket.put("file", b"x")
    assert bucket.get("file") == b"x"
    bucket.delete("folder")
    assert (outside / "secret").read_bytes() == b"secret"


def test_links_are_not_listed(bucket: LocalBucket, outside: Path) -> None:
    assert listed(bucket) == ["here"]
    assert list(bucket.list("folder/")) == []


# --- what the operating system says ------------------------------------------------------------


def raising(number: int) -> Callable[..., None]:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("operation", ["put", "create"])
@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, operation: str, call: str, number: int
) -> None:
    bucket.put("other", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, raising(number))
        with pytest.raises(BucketUnavailable, match=os.strerror(number)):
            OPERATIONS[operation](bucket, "key")
    assert files(bucket.root) == ["other"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_denied(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    bucket.put("folder/key", b"x")
    monkeypatch.setattr(os, "open", raising(number))
    with pytest.raises(AccessDenied, match=r"folder/key.*" + os.strerror(number)):
        OPERATIONS[operation](bucket, "folder/key")
    with pytest.raises(AccessDenied):
        list(bucket.list())


@pytest.mark.skipif(os.geteuid() == 0, reason="root is never denied")
def test_denied_for_real(bucket: LocalBucket) -> None:
    bucket.put("folder/key", b"x")
    folder = bucket.root / "folder"
    folder.chmod(0)
    try:
        for operation in OPERATIONS.values():
            with pytest.raises(AccessDenied):
                operation(bucket, "folder/key")
        with pytest.raises(AccessDenied):
            list(bucket.list())
    finally:
        folder.chmod(0o700)


def test_a_source_that_is_denied_is_not_the_buckets_fault(
    bucket: LocalBucket, tmp_path: Path
) -> None:
    with pytest.raises(Misuse, match="cannot read") as caught:
        bucket.put("key", tmp_path)  # a folder
    assert type(caught.value) is Misuse
    assert files(bucket.root) == []


def test_short_writes_are_continued(bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, block: write(file, block[:3]))
    bucket.put("key", [b"01234", b"56789"])
    assert bucket.get("key") == b"0123456789"


@pytest.mark.parametrize("disk", ["sound", "failing"])
def test_no_descriptor_stays_open(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    bucket.put("a/b", b"x")
    if disk == "failing":
        monkeypatch.setattr(os, "fsync", raising(errno.EIO))
    before = len(os.listdir("/dev/fd"))
    for key in ("a/b", "a", "a/b/c", "a/none", "no/folder"):
        for operation in OPERATIONS.values():
            with contextlib.suppress(ThinwireError):
                operation(bucket, key)
    list(bucket.list())
    assert len(os.listdir("/dev/fd")) == before


# --- durability --------------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, bucket: LocalBucket) -> list[str]:
    """What is synced and named, in order: temporary files as "file", folders by their names."""
    events: list[str] = []
    fsync, rename, link = os.fsync, os.rename, os.link

    def name(file: int) -> str:
        status = os.fstat(file)
        for path in (bucket.root.parent, *bucket.root.parent.rglob("*")):
            if path.lstat().st_ino == status.st_ino:
                return "file" if path.is_file() else path.name
        return "?"

    def recorded_fsync(file: int) -> None:
        events.append(f"sync {name(file)}")
        fsync(file)

    def recorded_rename(source: str, target: str, **options: Any) -> None:
        events.append(f"name {target}")
        rename(source, target, **options)

    def recorded_link(source: str, target: str, **options: Any) -> None:
        events.append(f"name {target}")
        link(source, target, **options)

    monkeypatch.setattr(sys, "platform", "linux")  # elsewhere fsync is only the fallback
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    monkeypatch.setattr(os, "link", recorded_link)
    return events


@pytest.mark.parametrize("operation", ["put", "create"])
def test_everything_is_synced_in_order(
    bucket: LocalBucket, events: list[str], operation: str
) -> None:
    above = bucket.root.parent.name
    OPERATIONS[operation](bucket, "a/b/key")
    assert events == [
        f"sync {above}", "sync bucket", "sync a", "sync file", "name key", "sync b"
    ]  # fmt: skip
    events.clear()
    OPERATIONS[operation](bucket, "a/b/other")
    assert events == ["sync file", "name other", "sync b"]


def test_folders_made_by_others_are_synced_once(bucket: LocalBucket, events: list[str]) -> None:
    (bucket.root / "a").mkdir(parents=True)
    bucket.put("a/key", b"")
    above = bucket.root.parent.name
    assert events == [f"sync {above}", "sync bucket", "sync file", "name key", "sync a"]


def test_parents_of_the_root_are_synced(tmp_path: Path, events: list[str]) -> None:
    LocalBucket(tmp_path / "one" / "two").put("key", b"")
    assert sorted(events[:2]) == sorted([f"sync {tmp_path.name}", "sync one"])


def test_an_object_that_exists_is_made_durable_before_it_is_reported(
    bucket: LocalBucket, events: list[str]
) -> None:
    bucket.create("key", b"x")
    events.clear()
    with pytest.raises(AlreadyExists):
        bucket.create("key", b"x")
    assert events == ["sync file", "name key", "sync bucket"]


def test_file_systems_that_cannot_sync_folders(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def files_only(file: int) -> None:
        if os.path.isdir(f"/dev/fd/{file}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(file)

    monkeypatch.setattr(os, "fsync", files_only)
    bucket.put("a/b", b"x")
    assert bucket.get("a/b") == b"x"


# --- a writer that is killed -------------------------------------------------------------------

WRITER = """
import os, sys, time
import thinwire.bucket.local as local

root, operation, moment = sys.argv[1:]

def stop(at):
    if at == moment:
        print(at, flush=True)
        time.sleep(60)

def patched(module, name, before, after):
    original = getattr(module, name)
    def call(*args, **options):
        stop(before)
        result = original(*args, **options)
        stop(after)
        return result
    setattr(module, name, call)

def blocks(data):
    yield memoryview(data)[:500]
    stop("half written")
    yield memoryview(data)[500:]

local.iter_data = blocks
patched(os, "rename" if operation == "put" else "link", "before naming", "after naming")
getattr(local.LocalBucket(root), operation)("folder/key", b"new" * 1000)
"""


@pytest.fixture
def killed(bucket: LocalBucket) -> Iterator[Callable[[str, str], None]]:
    writers: list[subprocess.Popen[str]] = []

    def run(operation: str, moment: str) -> None:
        command = [sys.executable, "-c", WRITER, str(bucket.root), operation, moment]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        writers.append(writer)
        assert writer.stdout is not None
        assert writer.stdout.readline() == f"{moment}\n"
        writer.kill()
        assert writer.wait() == -signal.SIGKILL

    yield run
    for writer in writers:
        writer.kill()
        writer.wait()
        if writer.stdout is not None:
            writer.stdout.close()


@pytest.mark.parametrize("moment", ["half written", "before naming", "after naming"])
@pytest.mark.parametrize("operation", ["put", "create"])
def test_a_killed_writer_leaves_a_whole_object_or_none(
    bucket: LocalBucket, killed: Callable[[str, str], None], operation: str, moment: str
) -> None:
    killed(operation, moment)
    if moment == "after naming":
        assert bucket.get("folder/key") == b"new" * 1000
    else:
        assert list(bucket.list()) == []
        assert len(files(bucket.root)) == 1  # the leftover
        bucket.create("folder/key", b"next")
        assert bucket.get("folder/key") == b"next"
    assert listed(bucket) == ["folder/key"]


@pytest.mark.parametrize("moment", ["half written", "before naming"])
def test_a_killed_writer_leaves_the_old_object(
    bucket: LocalBucket, killed: Callable[[str, str], None], moment: str
) -> None:
    bucket.put("folder/key", b"old")
    killed("put", moment)
    assert bucket.get("folder/key") == b"old"
    assert listed(bucket) == ["folder/key"]
