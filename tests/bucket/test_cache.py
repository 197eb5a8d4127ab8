"""The disk cache: what it keeps, what it never believes, and that nothing about it can fail."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import thinwire.bucket._entries as entries
import thinwire.bucket.cache as cache
from thinwire import Publisher, Replica
from thinwire.bucket import Bucket, CachedBucket, LocalBucket, MemoryBucket
from thinwire.bucket.cache import named_by_content
from thinwire.errors import (
    AccessDenied,
    BucketUnavailable,
    CorruptPayload,
    KeyNotFound,
    Misuse,
)
from thinwire.mirror import MemoryMirror
from thinwire.testing import FaultyBucket
from thinwire.testing.conformance import OPERATIONS, BucketConformance

MB = 1_000_000
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def inner() -> FaultyBucket:
    bucket = FaultyBucket(MemoryBucket())
    bucket.put("anchors/1", CONTENT)
    bucket.put("anchors/2", CONTENT[::-1])
    bucket.put("run.json", b"{}")
    bucket.put("commits/1", b"one")
    bucket.calls.clear()
    return bucket


@pytest.fixture
def cached(inner: FaultyBucket, folder: Path) -> CachedBucket:
    return CachedBucket(inner, folder, 100 * MB)


def kept(folder: Path) -> list[Path]:
    """Complete entries; nothing else may be there."""
    found = sorted(folder.iterdir()) if folder.exists() else []
    assert all(path.suffix == ".entry" for path in found), found
    return found


class TestOverMemory(BucketConformance):
    @pytest.fixture
    def bucket(self, folder: Path) -> Bucket:
        return CachedBucket(MemoryBucket(), folder, 100 * MB)


class TestOverLocal(BucketConformance):
    @pytest.fixture
    def bucket(self, tmp_path: Path, folder: Path) -> Bucket:
        return CachedBucket(LocalBucket(tmp_path / "bucket"), folder, 100 * MB)

    @pytest.fixture
    def missing_bucket(self, tmp_path: Path, folder: Path) -> Bucket:
        return CachedBucket(LocalBucket(tmp_path / "nowhere"), folder, 100 * MB)


class TestWithEverythingCached(BucketConformance):
    """Even keys that change, as long as they change through this bucket."""

    large = MB

    @pytest.fixture
    def bucket(self, folder: Path) -> Bucket:
        return CachedBucket(MemoryBucket(), folder, 100 * MB, immutable=lambda key: True)


class TestWithoutRoom(BucketConformance):
    @pytest.fixture
    def bucket(self, folder: Path) -> Bucket:
        return CachedBucket(MemoryBucket(), folder, 0, immutable=lambda key: True)


# --- what is kept --------------------------------------------------------------------------


def test_the_second_read_needs_no_store(cached: CachedBucket, inner: FaultyBucket) -> None:
    assert cached.get("anchors/1") == CONTENT
    inner.fail("get", times=None).fail("stream", times=None)
    assert cached.get("anchors/1") == CONTENT
    pieces = list(cached.stream("anchors/1", chunk=1000))
    assert b"".join(pieces) == CONTENT
    assert max(map(len, pieces)) == 1000
    assert (cached.hits, cached.misses) == (2, 1)


@pytest.mark.parametrize("key", ["run.json", "commits/1"])
def test_records_are_always_read_from_the_store(
    cached: CachedBucket, inner: FaultyBucket, folder: Path, key: str
) -> None:
    for _ in range(2):
        cached.get(key)
        list(cached.stream(key))
    assert len(inner.calls) == 4
    assert kept(folder) == []
    assert not named_by_content(key)


def test_presence_and_size_are_the_stores(cached: CachedBucket, inner: FaultyBucket) -> None:
    cached.get("anchors/1")
    inner.inner.delete("anchors/1")
    with pytest.raises(KeyNotFound):
        cached.head("anchors/1")
    assert "anchors/1" not in [info.key for info in cached.list()]


def test_writing_and_deleting_through_it_forgets(cached: CachedBucket, inner: FaultyBucket) -> None:
    cached.get("anchors/1")
    cached.put("anchors/1", b"new")
    assert cached.get("anchors/1") == b"new"
    cached.delete("anchors/1")
    with pytest.raises(KeyNotFound):
        cached.get("anchors/1")


def test_buckets_do_not_share_entries(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        bucket = CachedBucket(LocalBucket(tmp_path / name), folder, MB)
        bucket.put("deltas/1", name.encode())
        assert bucket.get("deltas/1") == name.encode()
    assert len(kept(folder)) == 2


def test_a_stream_left_early_keeps_nothing(
    cached: CachedBucket, inner: FaultyBucket, folder: Path
) -> None:
    pieces = cached.stream("anchors/1", chunk=100)
    assert next(pieces) == CONTENT[:100]
    pieces.close()  # type: ignore[attr-defined]
    assert kept(folder) == []
    assert cached.get("anchors/1") == CONTENT


@pytest.mark.parametrize("error", [BucketUnavailable, AccessDenied])
def test_a_stream_that_fails_keeps_nothing(
    cached: CachedBucket, inner: FaultyBucket, folder: Path, error: type[Exception]
) -> None:
    inner.fail("stream", after=True, error=error)  # type: ignore[arg-type]
    with pytest.raises(error):
        list(cached.stream("anchors/1", chunk=100))
    assert kept(folder) == []
    assert cached.get("anchors/1") == CONTENT


def test_a_delta_that_is_not_what_its_name_says_is_not_kept(
    cached: CachedBucket, inner: FaultyBucket, folder: Path
) -> None:
    key = f"deltas/0000000001-{hashlib.sha256(CONTENT).hexdigest()[:32]}.safetensors"
    inner.put(key, CONTENT)
    inner.corrupt(key, times=1)
    assert cached.get(key) != CONTENT
    assert kept(folder) == []
    for _ in range(2):
        assert cached.get(key) == CONTENT
    assert len(kept(folder)) == 1


# --- what is not believed ------------------------------------------------------------------


def damage(content: bytes) -> dict[str, bytes]:
    flipped = bytearray(content)
    flipped[5000] ^= 1
    tail = bytearray(content)
    tail[-1] ^= 1
    size = bytearray(content)
    size[-33] ^= 1
    return {
        "a flipped bit": bytes(flipped),
        "a flipped bit of the hash": bytes(tail),
        "a wrong size": bytes(size),
        "cut short": content[:-100],
        "empty": b"",
        "a tail alone": content[-48:],
        "longer": content + b"x",
    }


@pytest.mark.parametrize("how", list(damage(bytes(10_000))))
def test_a_damaged_entry_is_a_miss(
    cached: CachedBucket, inner: FaultyBucket, folder: Path, how: str
) -> None:
    cached.get("anchors/1")
    (entry,) = kept(folder)
    entry.write_bytes(damage(entry.read_bytes())[how])
    assert cached.get("anchors/1") == CONTENT
    assert [call.operation for call in inner.calls] == ["stream"] * 2
    assert cached.get("anchors/1") == CONTENT
    assert len(inner.calls) == 2, "it was replaced by a good one"


def test_a_damaged_entry_is_removed_even_if_the_store_is_away(
    cached: CachedBucket, inner: FaultyBucket, folder: Path
) -> None:
    cached.get("anchors/1")
    (entry,) = kept(folder)
    entry.write_bytes(b"rubbish")
    inner.fail("stream", times=None)
    with pytest.raises(BucketUnavailable):
        cached.get("anchors/1")
    assert kept(folder) == []


# --- nothing about it can fail -------------------------------------------------------------


def test_a_full_disk_passes_through(
    cached: CachedBucket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(entries.FileIO):
        written = 0

        def write(self, data: object) -> int:
            if Full.written >= 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            Full.written += 1
            return super().write(memoryview(data)[:50])  # type: ignore[call-overload]

    monkeypatch.setattr(entries, "FileIO", Full)
    assert b"".join(cached.stream("anchors/1", chunk=100)) == CONTENT
    assert kept(folder) == []


def test_a_disk_that_cannot_be_read_in_the_middle(
    cached: CachedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached.get("anchors/1")

    class Dying(entries.FileIO):
        rewound = False

        def seek(self, *args: int) -> int:
            self.rewound = True
            return super().seek(*args)

        def read(self, *args: int) -> bytes:
            if self.rewound and self.tell() >= 300:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(*args)

    monkeypatch.setattr(entries, "FileIO", Dying)
    assert b"".join(cached.stream("anchors/1", chunk=100)) == CONTENT


def test_a_folder_that_cannot_be_made_passes_through(inner: FaultyBucket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cached = CachedBucket(inner, tmp_path / "file" / "cache", MB)
    for _ in range(2):
        assert cached.get("anchors/1") == CONTENT
    assert cached.misses == 2


def test_a_file_for_a_folder_is_refused_at_once(inner: FaultyBucket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Misuse, match="not a folder"):
        CachedBucket(inner, tmp_path / "file", MB)
    with pytest.raises(Misuse, match="-1 bytes"):
        CachedBucket(inner, tmp_path, -1)


# --- its size ------------------------------------------------------------------------------


def test_the_longest_unread_go_first(inner: FaultyBucket, folder: Path) -> None:
    cached = CachedBucket(inner, folder, 3 * (1000 + 48))
    for number in range(5):
        inner.put(f"deltas/{number}", bytes([number]) * 1000)
    for number in (0, 1, 2, 0, 3):  # 1 is now the longest unread
        cached.get(f"deltas/{number}")
        time.sleep(0.02)
    assert len(kept(folder)) == 3
    inner.calls.clear()
    for number in (0, 2, 3):
        assert cached.get(f"deltas/{number}") == bytes([number]) * 1000
    assert inner.calls == []
    cached.get("deltas/1")
    assert len(inner.calls) == 1


def test_what_is_larger_than_the_limit_passes_through(inner: FaultyBucket, folder: Path) -> None:
    cached = CachedBucket(inner, folder, 5000)
    inner.put("deltas/1", b"x" * 1000)
    cached.get("deltas/1")
    assert b"".join(cached.stream("anchors/1", chunk=100)) == CONTENT
    assert len(kept(folder)) == 1
    inner.calls.clear()
    cached.get("deltas/1")
    assert inner.calls == [], "the small one was not evicted for it"


def test_what_a_crash_left_is_cleared_away(cached: CachedBucket, folder: Path) -> None:
    folder.mkdir()
    old, new, lock = (
        folder / f"{digit * 64}{end}"
        for digit, end in (("a", f".{'1' * 16}.tmp"), ("b", f".{'2' * 16}.tmp"), ("a", ".lock"))
    )
    for path in (old, new, lock):
        path.write_bytes(b"x")
    for path in (old, lock):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    cached.get("anchors/1")
    assert not old.exists()
    assert not lock.exists()
    assert new.exists(), "somebody may be writing it"
    new.unlink()
    assert len(kept(folder)) == 1


def test_what_others_keep_there_stays(inner: FaultyBucket, folder: Path) -> None:
    folder.mkdir()
    names = ["uv.lock", "draft.tmp", "my.entry", f"{'a' * 64}.draft.tmp", f"{'A' * 64}.entry"]
    for name in names:
        (folder / name).write_bytes(bytes(len(CONTENT)))
        os.utime(folder / name, (time.time() - 4000, time.time() - 4000))
    cached = CachedBucket(inner, folder, len(CONTENT) + 100)
    cached.get("anchors/1")
    cached.get("anchors/2")
    left = {path.name for path in folder.iterdir()}
    assert left > set(names)
    assert len(left) == len(names) + 1, "one entry has made room for the other"


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "link to an entry"])
def test_what_is_no_plain_file_is_no_entry(
    cached: CachedBucket, folder: Path, tmp_path: Path, kind: str
) -> None:
    cached.get("anchors/1")
    (entry,) = kept(folder)
    elsewhere = tmp_path / "elsewhere"
    if kind == "link to an entry":
        entry.rename(elsewhere)
    else:
        os.mkfifo(elsewhere)
        entry.unlink()
    if kind == "fifo":
        elsewhere.rename(entry)
    else:
        entry.symlink_to(elsewhere)
    done: list[bytes] = []
    reader = threading.Thread(target=lambda: done.append(cached.get("anchors/1")), daemon=True)
    reader.start()
    reader.join(5)
    assert done == [CONTENT]
    assert (cached.hits, cached.misses) == (0, 2)
    assert kept(folder) == [entry]
    assert entry.is_file()
    assert not entry.is_symlink()


# --- together ------------------------------------------------------------------------------


def test_another_is_not_waited_for_without_end(
    cached: CachedBucket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leads shows a pulse, and the object does not come."""
    monkeypatch.setattr(cache, "_LONGEST_WAIT_S", 0.3)
    lead = entries.EntryFolder(folder, MB).lead(cached._name("anchors/1"))
    assert lead is not None
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.01):
            lead.pulse()

    beating = threading.Thread(target=beat)
    beating.start()
    done: list[bytes] = []
    reader = threading.Thread(target=lambda: done.append(cached.get("anchors/1")), daemon=True)
    reader.start()
    reader.join(5)
    ended.set()
    beating.join()
    lead.end()
    assert done == [CONTENT]


class Slow(MemoryBucket):
    """Streams take their time, and count."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause
        self.streams = 0

    def stream(self, key: str, *, chunk: int = 1) -> Iterator[bytes]:
        self.streams += 1
        data = self.get(key)
        for start in range(0, len(data), 1000):
            time.sleep(self.pause)
            yield data[start : start + 1000]


@pytest.mark.parametrize("patience", [5.0, 0.2])
def test_sixteen_threads_fetch_once(folder: Path, patience: float) -> None:
    """Patience is for pieces, not for the whole: this takes longer than 0.2 s."""
    inner = Slow(0.05)
    inner.put("deltas/1", CONTENT)
    buckets = [CachedBucket(inner, folder, MB, patience=patience) for _ in range(16)]
    start = threading.Barrier(16)

    def read(bucket: Bucket) -> bytes:
        start.wait()
        return bucket.get("deltas/1")

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(read, buckets)) == {CONTENT}
    assert inner.streams == 1
    assert len(kept(folder)) == 1
    assert sum(bucket.hits for bucket in buckets) == 15


def test_nobody_waits_for_ever(inner: FaultyBucket, folder: Path) -> None:
    """Two streams of one object in one thread, the first one left standing."""
    cached = CachedBucket(inner, folder, MB, patience=0.1)
    first = cached.stream("anchors/1", chunk=100)
    next(first)
    started = time.monotonic()
    assert cached.get("anchors/1") == CONTENT
    assert time.monotonic() - started < 2
    assert CONTENT[:100] + b"".join(first) == CONTENT
    assert len(kept(folder)) == 1


def test_who_waited_for_one_that_failed_fetches(inner: FaultyBucket, folder: Path) -> None:
    cached = CachedBucket(inner, folder, MB)
    first = cached.stream("anchors/1", chunk=100)
    next(first)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(cached.get, "anchors/1")
        time.sleep(0.1)
        assert not second.done()
        first.close()  # type: ignore[attr-defined]
        assert second.result(timeout=2) == CONTENT


READER = """
import sys
from thinwire.bucket import CachedBucket, LocalBucket, MeteredBucket, Metrics
metrics = Metrics()
bucket = CachedBucket(MeteredBucket(LocalBucket(sys.argv[1]), metrics), sys.argv[2], 10**9)
sys.stdin.readline()
size = len(bucket.get("anchors/1"))
print(size, metrics.summary()["calls"])
"""


def test_processes_share_a_folder(tmp_path: Path, folder: Path) -> None:
    store = LocalBucket(tmp_path / "bucket")
    store.put("anchors/1", CONTENT * 2000)
    command = [sys.executable, "-c", READER, str(store.root), str(folder)]
    readers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
    said = [reader.communicate(timeout=60)[0].split() for reader in readers]
    assert {size for size, _ in said} == {str(len(CONTENT) * 2000)}
    assert sum(int(calls) for _, calls in said) == 1
    assert len(kept(folder)) == 1


def test_a_writer_that_was_killed_holds_nobody_up(tmp_path: Path, folder: Path) -> None:
    store = LocalBucket(tmp_path / "bucket")
    store.put("anchors/1", CONTENT)
    script = READER.replace(
        'size = len(bucket.get("anchors/1"))',
        'next(pieces := bucket.stream("anchors/1", chunk=10)); print("x"); sys.stdin.readline()',
    )
    command = [sys.executable, "-uc", script, str(store.root), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdin is not None
        assert p.stdout is not None
        p.stdin.write("\n")
        p.stdin.flush()
        assert p.stdout.readline() == "x\n"
        p.kill()
        p.wait()
    started = time.monotonic()
    assert CachedBucket(store, folder, MB).get("anchors/1") == CONTENT
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_bad_keys_are_refused_before_the_disk_is_touched(
    inner: FaultyBucket, folder: Path, operation: str
) -> None:
    seen: list[str] = []

    def immutable(key: str) -> bool:
        seen.append(key)
        return True

    cached = CachedBucket(inner, folder, MB, immutable=immutable)
    with pytest.raises(Misuse):
        OPERATIONS[operation](cached, "../x")
    assert seen == []
    assert not folder.exists()


def test_a_checkpoint_that_arrived_wrong_is_fetched_again(tmp_path: Path) -> None:
    """Nothing in its key says what it holds: only the reader can tell, and says so."""
    store = MemoryBucket()
    state = {"w": np.arange(1000, dtype=np.float32)}
    Publisher(store, state).close()
    faulty = FaultyBucket(store).corrupt("anchors/*.safetensors", at=-1, times=1)
    bucket = CachedBucket(faulty, tmp_path / "cache", 1 << 30)
    with pytest.raises(CorruptPayload):
        Replica(bucket, MemoryMirror()).sync()
    replica = Replica(bucket, MemoryMirror())
    replica.sync()
    assert replica.mirror.tensors[0].tobytes() == state["w"].tobytes()
