"""Stores without create-only, where two writers can both be told that they have won.

Nothing can keep them apart there; but nobody goes on as if nothing were wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from thinwire import Publisher, Replica
from thinwire.bucket import Capabilities, Data, MemoryBucket
from thinwire.errors import AlreadyExists, BucketUnavailable, HistoryRewritten, KeyNotFound
from thinwire.log import keys
from thinwire.mirror import MemoryMirror


class LookThenWrite(MemoryBucket):
    """``create`` looks, lets others in, and writes."""

    capabilities = Capabilities(create_only=False, atomic_replace=True)

    def __init__(self) -> None:
        super().__init__()
        self.between: dict[str, Callable[[], None]] = {}

    def create(self, key: str, data: Data) -> None:
        try:
            self.head(key)
        except KeyNotFound:
            self.between.pop(key, lambda: None)()
            self.put(key, data)
        else:
            raise AlreadyExists(key)


@pytest.fixture
def bucket() -> LookThenWrite:
    return LookThenWrite()


def weights(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(300, value, np.float32)}


def publish(publisher: Publisher, value: float) -> int | None:
    return publisher.publish(weights(value)).result().version


def test_one_writer_goes_on_as_anywhere(bucket: LookThenWrite) -> None:
    with Publisher(bucket, weights(0)) as publisher:
        assert [publish(publisher, value) for value in (1, 2)] == [1, 2]
    with Publisher(bucket, weights(2)) as publisher:
        assert publish(publisher, 3) == 4  # version 3 shut out the former writer
    replica = Replica(bucket, MemoryMirror())
    replica.sync()
    assert replica.version == 4


def test_a_late_commit_over_an_older_one_is_told_to_both(bucket: LookThenWrite) -> None:
    """One looks at version 1 and is held up; the other publishes 1 to 3 meanwhile."""
    first = Publisher(bucket, weights(0))
    second = Publisher(bucket, weights(0), fence=False)

    def meanwhile() -> None:
        for value in (1, 2, 3):
            publish(first, value)

    bucket.between[keys.commit_key(1)] = meanwhile
    with pytest.raises(HistoryRewritten, match="version 2 is there already"):
        publish(second, 50)
    with pytest.raises(HistoryRewritten):
        publish(second, 51)
    with pytest.raises(HistoryRewritten):
        Replica(bucket, MemoryMirror()).sync()


def test_a_late_commit_in_place_of_the_newest_is_told_to_both(bucket: LookThenWrite) -> None:
    first = Publisher(bucket, weights(0))
    second = Publisher(bucket, weights(0), fence=False)
    bucket.between[keys.commit_key(1)] = lambda: print(publish(first, 1))
    assert publish(second, 50) == 1
    with pytest.raises(HistoryRewritten, match="two writers"):
        publish(first, 2)
    assert publish(second, 51) == 2  # its history is whole
    replica = Replica(bucket, MemoryMirror())
    replica.sync()
    assert replica.mirror.tensors[0].tobytes() == weights(51)["w"].tobytes()


def test_a_run_record_that_was_replaced_is_told_to_who_wrote_the_first(
    bucket: LookThenWrite,
) -> None:
    """Else it would publish on and on into a run that nobody can read."""
    survivors: list[Publisher] = []
    bucket.between[keys.RUN] = lambda: survivors.append(Publisher(bucket, weights(0)))
    with pytest.raises(Exception, match=r"version 0|run"):
        Publisher(bucket, weights(7))
    with pytest.raises(HistoryRewritten, match="the run is not what it was") as caught:
        publish(survivors[0], 1)
    assert "create=s3" in caught.value.hint
    with pytest.raises(HistoryRewritten):
        publish(survivors[0], 2)


def test_many_at_once_end_in_one_whole_run_or_in_errors_for_all(bucket: LookThenWrite) -> None:
    """Whoever was told that all went well can be followed."""
    barrier = threading.Barrier(4)
    told: dict[int, list[int | None]] = {}

    def train(number: int) -> None:
        barrier.wait()
        try:
            with Publisher(bucket, weights(number), resume="new") as publisher:
                versions = [publish(publisher, number + step / 10) for step in range(1, 6)]
        except Exception:  # noqa: BLE001 - any error tells
            return
        told[number] = versions

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) <= 1
    for number in told:
        replica = Replica(bucket, MemoryMirror())
        replica.sync()
        assert replica.mirror.tensors[0].tobytes() == weights(number + 0.5)["w"].tobytes()


def test_an_outage_right_after_a_commit_is_not_its_failure(bucket: LookThenWrite) -> None:
    publisher = Publisher(bucket, weights(0))
    head = bucket.head

    def out_of_order(key: str) -> object:
        if key == keys.commit_key(2):
            raise BucketUnavailable("gone for a moment")
        return head(key)

    bucket.head = out_of_order  # type: ignore[method-assign, assignment]
    assert publish(publisher, 1) == 1
    bucket.head = head  # type: ignore[method-assign]
    assert publish(publisher, 2) == 2
