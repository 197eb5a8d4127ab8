"""Processes and objects that end, fork, move or share in ways nobody planned for."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from thinwire import Publisher, Replica
from thinwire.bucket import LocalBucket, MemoryBucket
from thinwire.disk import DiskMirror
from thinwire.errors import HistoryRewritten, MirrorBusy, MirrorCorrupt, Misuse
from thinwire.mirror import MemoryMirror
from thinwire.mirror_folder import locked
from thinwire.verify import verify_mirror

EXIT = """
import sys
import numpy as np
from thinwire import Publisher, open_bucket
weights = {f"w{i}": np.zeros(1000, "f4") for i in range(50)}
publisher = Publisher(open_bucket(sys.argv[1]), weights)
for value in weights.values():
    value += 1
receipt = publisher.publish(weights)
"""


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def child() -> Iterator[Any]:
    """Forks a process that lives until the test ends."""
    pids = []

    def fork() -> int:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
        pids.append((pid, writing))
        return pid

    yield fork
    for pid, writing in pids:
        os.close(writing)
        os.waitpid(pid, 0)


# --- the interpreter ends ------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "raise SystemExit", "1 / 0", "del publisher, receipt"])
def test_a_publish_in_flight_survives_the_end_of_the_program(tmp_path: Path, end: str) -> None:
    bucket = tmp_path / "bucket"
    program = [sys.executable, "-c", EXIT + end, str(bucket)]
    subprocess.run(program, capture_output=True, timeout=60, check=False)
    mirror = MemoryMirror()
    assert [update.version for update in Replica(LocalBucket(bucket), mirror).sync()] == [0, 1]
    assert (mirror.tensors[0].view("f4") == 1).all()


# --- forks ---------------------------------------------------------------------------------


def test_a_fork_of_the_writer_does_not_keep_its_mirror(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path, child: Any
) -> None:
    kit.start_run(bucket, *states).close()
    replica = Replica(bucket, tmp_path / "mirror")
    replica.sync()
    child()
    replica.close()
    with Replica(bucket, tmp_path / "mirror") as again:
        assert again.version == len(states) - 1


def test_a_fork_in_the_middle_of_a_patch_does_not_keep_the_lock(tmp_path: Path, child: Any) -> None:
    with DiskMirror(tmp_path / "mirror") as mirror:
        with locked(mirror.folder, exclusive=True):
            child()
        taken = threading.Event()

        def take() -> None:
            with mirror.reading():
                taken.set()

        threading.Thread(target=take, daemon=True).start()
        assert taken.wait(20)


def test_what_a_fork_does_to_a_mirror_leaves_it_alone(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
) -> None:
    folder = tmp_path / "mirror"
    publisher = kit.start_run(bucket, *states[:2])
    replica = Replica(bucket, folder)
    replica.sync()
    publisher.publish(states[2].source).result()

    def work() -> None:
        with pytest.raises(Misuse, match="fork"):
            replica.sync()
        replica.close()  # as leaving a with-block would

    before = kit.files(folder)
    assert kit.in_child(work) == 0
    assert kit.files(folder) == before
    with pytest.raises(MirrorBusy):
        DiskMirror(folder)
    replica.sync()
    replica.close()
    assert verify_mirror(folder).ok
    assert kit.on_disk(folder) == states[2].raw


def test_a_fork_of_the_publisher_publishes_nothing(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
) -> None:
    store = LocalBucket(tmp_path / "bucket")
    publisher = kit.start_run(store, *states[:2])

    def work() -> None:
        with pytest.raises(Misuse, match="fork"):
            publisher.publish(states[2].source)
        publisher.close()
        own = Publisher(store, states[2].source, fence=False)
        assert own.publish(states[2].source).result().version == 2

    assert kit.in_child(work) == 0
    assert kit.pulled(store) == states[2].raw


# --- mirrors that are let go of, moved or shared -------------------------------------------


def test_a_forgotten_mirror_is_not_locked_for_ever(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
) -> None:
    kit.start_run(bucket, *states).close()
    replica = Replica(bucket, tmp_path / "mirror")
    replica.sync()
    del replica
    gc.collect()
    with Replica(bucket, tmp_path / "mirror") as again:
        assert again.version == len(states) - 1
        again.mirror.rescan()


def test_a_relative_folder_stays_where_it_was(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    publisher = kit.start_run(bucket, states[0])
    with Replica(bucket, "mirror") as replica:
        replica.sync()
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        publisher.publish(states[1].source).result()
        replica.sync()
    assert kit.on_disk(tmp_path / "mirror") == states[1].raw


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_moved_away_is_written_no_more(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path, replaced: bool
) -> None:
    folder, moved = tmp_path / "mirror", tmp_path / "moved"
    publisher = kit.start_run(bucket, *states[:2])
    replica = Replica(bucket, folder)
    replica.sync()
    shutil.move(folder, moved)
    if replaced:
        with Replica(bucket, folder) as other:
            other.sync(0)
    publisher.publish(states[2].source).result()
    with pytest.raises(MirrorCorrupt, match="moved"):
        replica.sync()
    replica.close()
    assert kit.on_disk(moved) == states[1].raw
    assert verify_mirror(moved).ok
    assert folder.exists() == replaced
    if replaced:
        assert kit.on_disk(folder) == states[0].raw
        assert verify_mirror(folder).ok


def test_a_second_thread_is_told_so(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
) -> None:
    kit.start_run(bucket, *states).close()
    replica = Replica(bucket, tmp_path / "mirror")
    errors = []

    def work() -> None:
        try:
            replica.sync()
        except Misuse as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replica.close()
    assert all("another thread" in e or "has moved" in e for e in errors)
    assert verify_mirror(tmp_path / "mirror").ok


def test_two_walks_of_one_replica_do_not_look_like_a_rewritten_history(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    kit.start_run(bucket, *states).close()
    replica = Replica(bucket, MemoryMirror())
    first = replica.catch_up()
    next(first)
    assert [update.version for update in replica.sync()] == [1, 2, 3, 4]
    with pytest.raises(Misuse, match="has moved to version 4"):
        next(first)


@pytest.mark.parametrize("poll", [float("nan"), float("inf"), 1e300, -1])
def test_intervals_that_cannot_be_waited_for(poll: float) -> None:
    with pytest.raises(Misuse, match="poll"):
        next(Replica(MemoryBucket(), MemoryMirror()).follow(poll=poll))


# --- buckets that are emptied, values that no reader would take -----------------------------


@pytest.mark.parametrize("refilled", [False, True])
def test_nothing_is_committed_into_a_bucket_that_lost_the_run(
    kit: SimpleNamespace, states: list[Any], tmp_path: Path, refilled: bool
) -> None:
    store = LocalBucket(tmp_path / "bucket")
    publisher = kit.start_run(store, *states[:2])
    shutil.rmtree(store.root)
    if refilled:
        kit.start_run(store, states[3], states[4]).close()
    for _ in range(2):
        with pytest.raises(HistoryRewritten):
            publisher.publish(states[2].source).result()
    assert not (store.root / "commits/0000000002.json").exists()
    if refilled:
        assert kit.pulled(store) == states[4].raw


@pytest.mark.parametrize("step", [1.0, True, "7", 1 << 63, -(1 << 63)])
def test_a_step_that_no_reader_would_take(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, step: Any
) -> None:
    with pytest.raises(Misuse, match="step="):
        Publisher(bucket, states[0].source, step=step)
    assert not list(bucket.list())
    publisher = kit.start_run(bucket, states[0])
    with pytest.raises(Misuse, match="step="):
        publisher.publish(states[1].source, step=step)
    assert publisher.publish(states[1].source, step=np.int64(7)).result().step == 7
    assert kit.pulled(bucket) == states[1].raw


def test_a_base_that_cannot_be_written_down(states: list[Any], bucket: MemoryBucket) -> None:
    with pytest.raises(Misuse, match="base="):
        Publisher(bucket, states[0].source, base="\udcff")
    assert not list(bucket.list())


def test_the_name_of_a_bucket_is_not_a_bucket(states: list[Any], tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="is not a bucket"):
        Publisher(str(tmp_path), states[0].source)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="is not a bucket"):
        Replica(str(tmp_path), MemoryMirror())  # type: ignore[arg-type]
