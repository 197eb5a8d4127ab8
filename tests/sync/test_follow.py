"""Following a run: waiting, order, ending, and patience with the store."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from thinwire import Publisher, Replica
from thinwire.bucket import LocalBucket, MemoryBucket, open_bucket
from thinwire.errors import (
    AccessDenied,
    BucketNotFound,
    BucketUnavailable,
    CorruptPayload,
    HistoryRewritten,
    RunChanged,
    ThinwireError,
)
from thinwire.mirror import MemoryMirror
from thinwire.testing import FaultyBucket

POLL = 0.01


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


def follow_in_thread(pool: ThreadPoolExecutor, replica: Replica, **options: Any) -> Any:
    return pool.submit(lambda: [u.version for u in replica.follow(poll=POLL, **options)])


def test_versions_come_in_order_as_they_are_published(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    mirror = MemoryMirror()
    with ThreadPoolExecutor(1) as pool, Publisher(bucket, states[0].source) as publisher:
        seen = follow_in_thread(pool, Replica(bucket, mirror), until=4)
        for state in states[1:]:
            publisher.publish(state.source).result()
            time.sleep(2 * POLL)
        assert seen.result(20) == [0, 1, 2, 3, 4]
    assert kit.held(mirror) == states[4].raw


def test_it_waits_for_a_run_and_for_its_first_version(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    mirror = MemoryMirror()
    looking = FaultyBucket(bucket)
    with ThreadPoolExecutor(1) as pool:
        seen = follow_in_thread(pool, Replica(looking, mirror), until=0)
        while len(looking.calls) < 3:
            time.sleep(POLL)
        with pytest.raises(BucketUnavailable):
            Publisher(FaultyBucket(bucket).fail("create", "anchors/*"), states[1].source)
        already = len(looking.calls)
        while len(looking.calls) < already + 4:
            time.sleep(POLL)
        assert not seen.done()
        Publisher(bucket, states[0].source)
        assert seen.result(20) == [0]
    assert kit.held(mirror) == states[0].raw


def test_until_ends_at_that_version_even_if_there_are_more(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    kit.start_run(bucket, *states)
    mirror = MemoryMirror()
    replica = Replica(bucket, mirror)
    assert [u.version for u in replica.follow(poll=POLL, until=2)] == [0, 1, 2]
    assert kit.held(mirror) == states[2].raw
    assert list(replica.follow(poll=POLL, until=1)) == []
    assert replica.version == 2
    assert [u.version for u in replica.follow(poll=POLL, until=4)] == [3, 4]


def test_a_stop_event_ends_it_between_versions_and_while_waiting(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    kit.start_run(bucket, *states)
    stop = threading.Event()
    mirror = MemoryMirror()
    for update in Replica(bucket, mirror).follow(poll=POLL, stop=stop):
        if update.version == 2:
            stop.set()
    assert kit.held(mirror) == states[2].raw
    assert list(Replica(bucket, MemoryMirror()).follow(stop=stop)) == []
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(list, Replica(bucket, mirror).follow(poll=60, stop=stop))
        while mirror.held is None or mirror.held.version < 4:
            time.sleep(POLL)
        stop.set()
        assert len(waiting.result(5)) == 2


@pytest.mark.parametrize("pattern", ["run.json", "commits/*", "deltas/*", "anchors/*"])
def test_an_unavailable_store_is_borne_for_a_while(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, pattern: str
) -> None:
    kit.start_run(bucket, *states[:3])
    faulty = FaultyBucket(bucket)
    faulty.fail("stream", pattern, times=3).fail("head", "commits/*", times=3, skip=1)
    mirror = MemoryMirror()
    versions = [u.version for u in Replica(faulty, mirror).follow(poll=POLL, until=2)]
    assert versions == [0, 1, 2]
    assert not faulty.unfired
    assert kit.held(mirror) == states[2].raw


def test_patience_ends(states: list[Any], bucket: MemoryBucket) -> None:
    Publisher(bucket, states[0].source)
    faulty = FaultyBucket(bucket).fail("head", times=None)
    began = time.monotonic()
    with pytest.raises(BucketUnavailable):
        list(Replica(faulty, MemoryMirror()).follow(poll=POLL, patience=0.2))
    assert 0.2 <= time.monotonic() - began < 5
    assert len(faulty.calls) > 5


def test_patience_counts_from_the_last_progress(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    """A slow and shaky connection that brings one version at a time is not a dead one."""
    kit.start_run(bucket, *states)
    faulty = FaultyBucket(bucket)
    for version in range(1, 5):
        faulty.fail("stream", f"deltas/000000000{version}*", times=8)
    versions = [
        u.version
        for u in Replica(faulty, MemoryMirror(), ahead=1).follow(poll=0.05, until=4, patience=1.0)
    ]
    assert versions == [0, 1, 2, 3, 4]
    assert not faulty.unfired


@pytest.mark.parametrize("pattern", ["run.json", "commits/*", "deltas/*", "anchors/*"])
@pytest.mark.parametrize("error", [AccessDenied, CorruptPayload])
def test_what_waiting_cannot_help_is_raised_at_once(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    pattern: str,
    error: type[ThinwireError],
) -> None:
    kit.start_run(bucket, *states[:2])
    faulty = FaultyBucket(bucket).fail("stream", pattern, error=error)
    with pytest.raises(error):
        list(Replica(faulty, MemoryMirror()).follow(poll=60, until=1))


def test_a_rewritten_history_is_noticed_at_the_first_miss(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    kit.start_run(bucket, *states[:3])
    mirror = MemoryMirror()
    Replica(bucket, mirror).sync()
    bucket.delete("commits/0000000002.json")
    with pytest.raises(HistoryRewritten):
        list(Replica(bucket, mirror).follow(poll=60))


def test_a_rewritten_history_is_noticed_now_and_then(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("thinwire.replica._CONFIRM_EVERY_S", 0.1)
    kit.start_run(bucket, *states[:2])
    replica = Replica(bucket, MemoryMirror())
    stop = threading.Event()
    following = replica.follow(poll=POLL, stop=stop)
    assert [next(following).version, next(following).version] == [0, 1]
    bucket.delete("commits/0000000001.json")
    threading.Timer(5, stop.set).start()
    with pytest.raises(HistoryRewritten):
        next(following)


def test_another_run_is_refused_while_following(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    mirror = MemoryMirror()
    kit.start_run(bucket, states[0])
    Replica(bucket, mirror).sync()
    other = MemoryBucket()
    kit.start_run(other, states[1])
    with pytest.raises(RunChanged):
        next(Replica(other, mirror).follow(poll=POLL))
    with pytest.raises(HistoryRewritten):
        next(Replica(MemoryBucket(), mirror).follow(poll=POLL))
    adopted = Replica(other, mirror, adopt=True).follow(poll=POLL)
    assert next(adopted).version == 0
    assert kit.held(mirror) == states[1].raw


def test_one_publisher_and_eight_replicas_converge(kit: SimpleNamespace, tmp_path: Path) -> None:
    many = [kit.State.random(0)]
    for seed in range(1, 16):
        many.append(many[-1].changed(seed, 0.05))
    last = len(many) - 1

    def replicate(number: int) -> list[int]:
        bucket = LocalBucket(tmp_path / "bucket")
        mirror = MemoryMirror() if number % 2 else tmp_path / f"mirror-{number}"
        with Replica(bucket, mirror) as replica:
            versions = []
            for update in replica.follow(poll=POLL, until=last):
                versions.append(update.version)
                assert kit.held(replica.mirror) == many[update.version].raw
            replica.mirror.rescan()
        return versions

    (tmp_path / "bucket").mkdir()
    with ThreadPoolExecutor(8) as pool:
        replicas = [pool.submit(replicate, number) for number in range(8)]
        with Publisher(LocalBucket(tmp_path / "bucket"), many[0].source) as publisher:
            for state in many[1:]:
                publisher.publish(state.source)
        assert [r.result(60) for r in replicas] == [list(range(last + 1))] * 8
    for number in range(0, 8, 2):
        assert kit.on_disk(tmp_path / f"mirror-{number}") == many[-1].raw


def test_following_in_another_process(
    kit: SimpleNamespace, states: list[Any], tmp_path: Path
) -> None:
    script = textwrap.dedent(
        """
        import sys
        from thinwire import Replica, open_bucket
        with Replica(open_bucket(sys.argv[1]), sys.argv[2]) as replica:
            for update in replica.follow(poll=0.05, until=int(sys.argv[3])):
                print(update.version, flush=True)
        """
    )
    bucket = LocalBucket(tmp_path / "bucket")
    publisher = Publisher(bucket, states[0].source)
    command = [sys.executable, "-c", script, str(tmp_path / "bucket"), str(tmp_path / "mirror")]
    child = subprocess.Popen([*command, "4"], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        for version, state in enumerate(states[1:], 1):
            publisher.publish(state.source)
            assert child.stdout.readline() == f"{version}\n"
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
    publisher.close()
    assert kit.on_disk(tmp_path / "mirror") == states[4].raw


def test_following_waits_for_a_bucket_that_the_trainer_has_yet_to_make(tmp_path: Path) -> None:
    replica = Replica(open_bucket(tmp_path / "bucket"), MemoryMirror())
    with pytest.raises(BucketNotFound):
        next(replica.follow(poll=0.01, patience=0.05))
    with pytest.raises(BucketNotFound):
        replica.sync()

    def start() -> None:
        time.sleep(0.2)
        Publisher(open_bucket(tmp_path / "bucket"), {"w": np.zeros(4, np.float32)}).close()

    starter = threading.Thread(target=start)
    starter.start()
    update = next(replica.follow(poll=0.01))
    starter.join()
    assert update.version == 0
