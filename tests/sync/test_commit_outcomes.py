"""What becomes of a publish when the store fails it, at any call and in any way.

The rule behind all of it: the baseline moves only with a commit that exists. Whatever failed, the
next publish carries every change, and replicas see whole published states in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire import Publisher
from thinwire.bucket import Bucket, MemoryBucket
from thinwire.chain import Chain, Outcome, create_record
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketUnavailable,
    CommitUnresolved,
    CorruptPayload,
    KeyNotFound,
    ThinwireError,
    WriterConflict,
)
from thinwire.log import keys
from thinwire.testing import FaultyBucket

COMMIT_1 = keys.commit_key(1)


@pytest.fixture
def inner() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def faulty(inner: MemoryBucket) -> FaultyBucket:
    return FaultyBucket(inner)


def cut_off(bucket: FaultyBucket, key: str, *, landed: bool) -> None:
    """The record is written or not, and nobody can be asked."""
    if landed:
        bucket.fail("create", key, after=True).fail("create", key, times=None, skip=1)
    else:
        bucket.fail("create", key, times=None)
    # a run's record is looked for before it is made
    bucket.fail("stream", key, times=None, skip=int(key == keys.RUN))


class TestCreatingARecord:
    def test_plain(self, faulty: FaultyBucket) -> None:
        assert create_record(faulty, "a", b"1") is Outcome.COMMITTED
        assert faulty.get("a") == b"1"

    @pytest.mark.parametrize("error", [BucketUnavailable, AlreadyExists])
    def test_response_lost_after_the_write_landed(
        self, faulty: FaultyBucket, error: type[ThinwireError]
    ) -> None:
        faulty.fail("create", after=True, error=error)
        assert create_record(faulty, "a", b"1") is Outcome.COMMITTED
        assert not faulty.unfired

    def test_failure_before_the_write_is_retried(self, faulty: FaultyBucket) -> None:
        faulty.fail("create", times=2)
        assert create_record(faulty, "a", b"1") is Outcome.COMMITTED
        assert faulty.inner.get("a") == b"1"

    @pytest.mark.parametrize("theirs", [b"2", b"", b"11", b"1" * 10_000_000])
    def test_lost_to_other_bytes(self, faulty: FaultyBucket, theirs: bytes) -> None:
        faulty.inner.create("a", theirs)
        assert create_record(faulty, "a", b"1") is Outcome.LOST
        assert faulty.inner.get("a") == theirs

    def test_lost_although_the_first_response_was_a_failure(self, faulty: FaultyBucket) -> None:
        faulty.run(lambda key: faulty.inner.create(key, b"2"), "create")
        faulty.fail("create")
        assert create_record(faulty, "a", b"1") is Outcome.LOST

    @pytest.mark.parametrize("landed", [True, False])
    def test_unresolved_when_neither_write_nor_read_back_gets_through(
        self, faulty: FaultyBucket, landed: bool
    ) -> None:
        cut_off(faulty, "a", landed=landed)
        assert create_record(faulty, "a", b"1") is Outcome.UNRESOLVED
        faulty.heal()
        assert create_record(faulty, "a", b"1") is Outcome.COMMITTED

    def test_unresolved_when_access_is_lost_between_write_and_read_back(
        self, faulty: FaultyBucket
    ) -> None:
        faulty.fail("create", after=True).fail("stream", error=AccessDenied)
        assert create_record(faulty, "a", b"1") is Outcome.UNRESOLVED

    def test_unresolved_when_access_is_lost_after_a_failure(self, faulty: FaultyBucket) -> None:
        faulty.fail("create", after=True).fail("create", error=AccessDenied, skip=1)
        faulty.fail("stream")
        assert create_record(faulty, "a", b"1") is Outcome.UNRESOLVED

    def test_already_exists_that_cannot_be_read_is_unresolved(self, faulty: FaultyBucket) -> None:
        faulty.fail("create", times=None, error=AlreadyExists)
        assert create_record(faulty, "a", b"1") is Outcome.UNRESOLVED

    def test_denied_at_once_is_an_error(self, faulty: FaultyBucket) -> None:
        faulty.fail("create", error=AccessDenied)
        with pytest.raises(AccessDenied):
            create_record(faulty, "a", b"1")


class TestCommitting:
    @pytest.mark.parametrize(
        ("after", "error"),
        [(True, BucketUnavailable), (True, AlreadyExists), (False, BucketUnavailable)],
    )
    def test_one_bad_response_is_settled_inside_the_publish(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        faulty: FaultyBucket,
        after: bool,
        error: type[ThinwireError],
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        faulty.fail("create", COMMIT_1, after=after, error=error)
        assert publisher.publish(states[1].source).result().version == 1
        assert not faulty.unfired
        assert publisher.publish(states[2].source).result().changed == states[2].distance(states[1])
        assert kit.history(faulty.inner) == [s.raw for s in states[:3]]

    @pytest.mark.parametrize("landed", [True, False])
    @pytest.mark.parametrize("asked", [True, False], ids=["result", "unasked"])
    def test_an_unresolved_commit_is_settled_before_the_next_publish(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        faulty: FaultyBucket,
        landed: bool,
        asked: bool,
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        cut_off(faulty, COMMIT_1, landed=landed)
        receipt = publisher.publish(states[1].source, step=1)
        if asked:
            with pytest.raises(CommitUnresolved):
                receipt.result()
            # as long as nothing can be learned, nothing is assumed
            for _ in range(2):
                with pytest.raises(CommitUnresolved):
                    publisher.publish(states[2].source)
        while not receipt.done():
            time.sleep(0.001)
        assert publisher.version == 0
        faulty.heal()
        commit = publisher.publish(states[2].source, step=2).result()
        assert (commit.version, commit.step) == (2, 2)
        assert commit.changed == states[2].distance(states[1])
        assert Chain(faulty.inner).read(1).step == 1
        assert kit.history(faulty.inner) == [s.raw for s in states[:3]]

    def test_an_unresolved_commit_that_another_writer_took_is_a_conflict(
        self, kit: SimpleNamespace, states: list[Any], faulty: FaultyBucket
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        cut_off(faulty, COMMIT_1, landed=False)
        with pytest.raises(CommitUnresolved):
            publisher.publish(states[1].source).result()
        faulty.heal()
        Publisher(faulty.inner, states[3].source, fence=False).publish(states[3].source).result()
        for _ in range(3):
            with pytest.raises(WriterConflict):
                publisher.publish(states[2].source)
        assert publisher.version == 0
        assert kit.history(faulty.inner) == [states[0].raw, states[3].raw]

    @pytest.mark.parametrize("landed", [True, False])
    def test_close_settles_an_unresolved_commit(
        self, kit: SimpleNamespace, states: list[Any], faulty: FaultyBucket, landed: bool
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        cut_off(faulty, COMMIT_1, landed=landed)
        receipt = publisher.publish(states[1].source)
        with pytest.raises(CommitUnresolved):
            receipt.result()
        faulty.heal()
        publisher.close()
        assert publisher.version == 1
        assert kit.pulled(faulty.inner) == states[1].raw

    def test_close_says_when_a_commit_stays_unresolved(
        self, kit: SimpleNamespace, states: list[Any], faulty: FaultyBucket
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        cut_off(faulty, COMMIT_1, landed=True)
        publisher.publish(states[1].source)
        with pytest.raises(CommitUnresolved):
            publisher.close()
        # a new publisher learns what became of it
        again = Publisher(faulty.inner, states[2].source, fence=False)
        assert again.version == 1
        assert again.publish(states[2].source).result().changed == states[2].distance(states[1])

    def test_an_interruption_while_settling_leaves_it_to_be_settled_again(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        faulty: FaultyBucket,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        cut_off(faulty, COMMIT_1, landed=True)
        with pytest.raises(CommitUnresolved):
            publisher.publish(states[1].source).result()
        faulty.heal()

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("thinwire.publisher.patch_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(states[2].source)
        assert publisher.version == 0
        assert publisher.publish(states[2].source).result().version == 2
        assert kit.history(faulty.inner) == [s.raw for s in states[:3]]


class TestUploading:
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("operation", ["create", "head"])
    @pytest.mark.parametrize("error", [BucketUnavailable, AccessDenied])
    def test_a_failed_payload_is_carried_by_the_next_publish(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        faulty: FaultyBucket,
        operation: Any,
        after: bool,
        error: type[ThinwireError],
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        faulty.fail(operation, "deltas/*", after=after, error=error)
        with pytest.raises(error):
            publisher.publish(states[1].source).result()
        assert publisher.version == 0
        assert kit.history(faulty.inner) == [states[0].raw]
        commit = publisher.publish(states[2].source).result()
        assert (commit.version, commit.changed) == (1, states[2].distance(states[0]))
        assert kit.history(faulty.inner) == [states[0].raw, states[2].raw]

    def test_a_payload_that_was_there_already_is_used(
        self, kit: SimpleNamespace, states: list[Any], faulty: FaultyBucket
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        faulty.fail("create", "deltas/*", after=True)
        with pytest.raises(BucketUnavailable):
            publisher.publish(states[1].source).result()
        assert publisher.publish(states[1].source).result().version == 1
        assert len(list(faulty.inner.list("deltas/"))) == 1
        assert kit.pulled(faulty.inner) == states[1].raw

    def test_a_payload_cut_short_by_the_store_is_never_committed(
        self, kit: SimpleNamespace, states: list[Any], faulty: FaultyBucket
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        faulty.run(lambda key: faulty.inner.put(key, b"half"), "create", "deltas/*", after=True)
        with pytest.raises(CorruptPayload):
            publisher.publish(states[1].source).result()
        assert kit.history(faulty.inner) == [states[0].raw]

    def test_a_payload_that_vanished_is_never_committed(
        self, kit: SimpleNamespace, states: list[Any], faulty: FaultyBucket
    ) -> None:
        publisher = Publisher(faulty, states[0].source)
        faulty.run(faulty.inner.delete, "create", "deltas/*", after=True)
        with pytest.raises(KeyNotFound):
            publisher.publish(states[1].source).result()
        assert kit.history(faulty.inner) == [states[0].raw]


class TestStarting:
    """The keys of a start, in order: run.json, the anchor's files, its manifest, commit 0."""

    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize(
        "pattern", ["anchors/*00001-of*", "anchors/*00002-of*", "anchors/*index*", "*manifest*"]
    )
    def test_a_failed_anchor_leaves_a_run_that_can_be_resumed(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        faulty: FaultyBucket,
        pattern: str,
        after: bool,
    ) -> None:
        faulty.fail("create", pattern, after=after)
        with pytest.raises(BucketUnavailable):
            Publisher(faulty, states[0].source, max_shard=1000)
        assert not faulty.unfired
        assert Chain(faulty.inner).head() is None
        # with other weights, in other shards: nothing of the failed attempt shows
        publisher = Publisher(faulty, states[1].source, resume="require", max_shard=500)
        assert publisher.started_run
        publisher.publish(states[2].source).result()
        assert kit.history(faulty.inner) == [states[1].raw, states[2].raw]

    @pytest.mark.parametrize("landed", [True, False])
    @pytest.mark.parametrize("key", [keys.RUN, keys.commit_key(0)])
    def test_an_unresolved_start_is_finished_by_the_same_call(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        faulty: FaultyBucket,
        key: str,
        landed: bool,
    ) -> None:
        cut_off(faulty, key, landed=landed)
        with pytest.raises(CommitUnresolved):
            Publisher(faulty, states[0].source)
        faulty.heal()
        publisher = Publisher(faulty, states[0].source)
        publisher.publish(states[1].source).result()
        assert kit.pulled(faulty.inner) == states[1].raw

    @pytest.mark.parametrize("key", [keys.RUN, keys.commit_key(0)])
    @pytest.mark.parametrize(
        ("after", "error"),
        [(True, BucketUnavailable), (True, AlreadyExists), (False, BucketUnavailable)],
    )
    def test_one_bad_response_goes_unnoticed(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        faulty: FaultyBucket,
        key: str,
        after: bool,
        error: type[ThinwireError],
    ) -> None:
        faulty.fail("create", key, after=after, error=error)
        publisher = Publisher(faulty, states[0].source)
        assert publisher.started_run
        assert not faulty.unfired
        publisher.publish(states[1].source).result()
        assert kit.history(faulty.inner) == [states[0].raw, states[1].raw]

    def test_an_unreadable_run_record_is_never_an_empty_prefix(
        self, states: list[Any], faulty: FaultyBucket
    ) -> None:
        Publisher(faulty.inner, states[0].source)
        faulty.fail("stream", keys.RUN).fail("stream", keys.RUN, error=AccessDenied)
        for error in (BucketUnavailable, AccessDenied):
            with pytest.raises(error):
                Publisher(faulty, states[1].source)

    def test_an_unreadable_commit_is_never_a_missing_version_0(
        self, states: list[Any], faulty: FaultyBucket
    ) -> None:
        Publisher(faulty.inner, states[0].source)
        faulty.fail("head", "commits/*").fail("head", "commits/*", error=AccessDenied)
        for error in (BucketUnavailable, AccessDenied):
            with pytest.raises(error):
                Publisher(faulty, states[1].source)
        assert Chain(faulty.inner).head() == 0


TRANSIENT = (BucketUnavailable, CommitUnresolved, AccessDenied, KeyNotFound)

FAULTS: dict[str, dict[str, Any]] = {
    "fails once": {},
    "response lost once": {"after": True},
    "denied once": {"error": AccessDenied},
    "denied once, after it took effect": {"after": True, "error": AccessDenied},
    "down from here on": {"outage": True},
    "down from here on, after it took effect": {"outage": True, "after": True},
    "denied from here on": {"outage": True, "error": AccessDenied},
    "denied from here on, after it took effect": {
        "outage": True,
        "after": True,
        "error": AccessDenied,
    },
}


class Story:
    """A run from its start over a restart to its end, by someone who tries again after errors."""

    def __init__(self, kit: SimpleNamespace, bucket: FaultyBucket, states: list[Any]) -> None:
        self.kit, self.bucket, self.states = kit, bucket, states
        self.errors: list[ThinwireError] = []

    def persist(self, call: Callable[[], Any]) -> Any:
        for _ in range(4):
            try:
                return call()
            except TRANSIENT as error:
                self.errors.append(error)
                self.bucket.heal()
                self.look()
        raise self.errors[-1]

    def look(self) -> None:
        """Whatever happened: what is in the bucket is a series of whole states, in order."""
        inner: Bucket = self.bucket.inner
        if Chain(inner).exists(0) if list(inner.list()) else False:
            raw = [state.raw for state in self.states]
            order = [raw.index(found) for found in self.kit.history(inner)]
            assert order == sorted(order)

    def publish(self, publisher: Publisher, state: Any) -> None:
        commit = self.persist(lambda: publisher.publish(state.source).result())
        inner = self.bucket.inner
        versions = self.kit.history(inner)
        assert publisher.version == commit.version == Chain(inner).head() == len(versions) - 1
        assert versions[-1] == state.raw
        before = next(s for s in self.states if s.raw == versions[-2])
        assert commit.changed == state.distance(before)

    def tell(self) -> None:
        first, second, third, fourth, fifth = self.states
        publisher = self.persist(
            lambda: Publisher(self.bucket, first.source, max_shard=1000, threads=1)
        )
        self.publish(publisher, second)
        self.publish(publisher, third)
        self.persist(publisher.close)
        publisher = self.persist(lambda: Publisher(self.bucket, third.source, threads=1))
        self.publish(publisher, fourth)
        self.publish(publisher, fifth)
        self.persist(publisher.close)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_call_of_a_whole_run(
    kit: SimpleNamespace, states: list[Any], fault: str
) -> None:
    calm = Story(kit, FaultyBucket(MemoryBucket()), states)
    calm.tell()
    assert not calm.errors
    calls = list(calm.bucket.calls)
    assert len(calls) > 40
    noticed = 0
    for index in range(len(calls)):
        story = Story(kit, FaultyBucket(MemoryBucket()), states)
        kit.strike(story.bucket, index, calls, **FAULTS[fault])
        try:
            story.tell()
        except (AssertionError, ThinwireError) as error:
            raise AssertionError(f"{fault} at call {index}: {calls[index]}") from error
        noticed += bool(story.errors)
    assert noticed > len(calls) // 3


@pytest.mark.parametrize("landed", [True, False])
def test_already_exists_at_any_write_of_a_whole_run(
    kit: SimpleNamespace, states: list[Any], landed: bool
) -> None:
    calm = Story(kit, FaultyBucket(MemoryBucket()), states)
    calm.tell()
    calls = list(calm.bucket.calls)
    for index, call in enumerate(calls):
        if call.operation == "create":
            story = Story(kit, FaultyBucket(MemoryBucket()), states)
            kit.strike(story.bucket, index, calls, after=landed, error=AlreadyExists)
            story.tell()
            assert not story.bucket.unfired


def test_a_patient_bucket_is_not_tried_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a minute by itself would make four attempts take many."""
    now = [0.0]
    bucket = FaultyBucket(MemoryBucket())

    def outage(key: str) -> None:
        now[0] += 60.0
        raise BucketUnavailable("it has been tried for a minute")

    bucket.run(outage, "create", times=None).run(outage, "stream", times=None)
    monkeypatch.setattr("thinwire.chain.time.monotonic", lambda: now[0])
    assert create_record(bucket, "commits/x", b"x") is Outcome.UNRESOLVED
    assert [call.operation for call in bucket.calls] == ["create", "stream"]
