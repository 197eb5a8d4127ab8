"""Several writers, resuming, and what a publisher does with errors, time and its own end."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from thinwire import Publisher, Replica
from thinwire.bucket import Bucket, LocalBucket, MemoryBucket
from thinwire.chain import Chain
from thinwire.dtypes import dtype
from thinwire.errors import (
    BucketUnavailable,
    HistoryRewritten,
    Misuse,
    PublishFailed,
    RunExists,
    RunNotFound,
    SchemaMismatch,
    ThinwireError,
    WriterConflict,
)
from thinwire.log import keys
from thinwire.mirror import MemoryMirror
from thinwire.testing import FaultyBucket
from thinwire.weights import FlatTensor


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture(params=["memory", "local"])
def any_bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    return MemoryBucket() if request.param == "memory" else LocalBucket(tmp_path / "bucket")


class Gate:
    """Holds calls of a bucket until it is opened."""

    def __init__(self, bucket: FaultyBucket, operation: Any, pattern: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

        def wait(_: str) -> None:
            self.reached.set()
            assert self.opened.wait(20)

        bucket.run(wait, operation, pattern)


class TestTwoWriters:
    def test_of_two_that_race_one_wins_and_the_other_stops(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        slow = FaultyBucket(bucket)
        first = Publisher(slow, states[0].source)
        gate = Gate(slow, "create", "commits/*")
        receipt = first.publish(states[1].source)
        assert gate.reached.wait(20)
        second = Publisher(bucket, states[2].source, fence=False)
        second.publish(states[2].source).result()
        gate.opened.set()
        with pytest.raises(WriterConflict):
            receipt.result()
        assert (first.version, second.version) == (0, 1)
        for _ in range(3):
            with pytest.raises(WriterConflict):
                first.publish(states[3].source)
        second.publish(states[4].source).result()
        assert kit.history(bucket) == [states[0].raw, states[2].raw, states[4].raw]

    def test_a_takeover_fences_off_the_former_writer(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        former = kit.start_run(bucket, *states[:2])
        new = Publisher(bucket, states[1].source)
        assert (new.version, new.started_run) == (2, False)
        fence = Chain(bucket).read(2)
        assert (fence.payloads, fence.changed) == ((), 0)
        assert fence.writer != Chain(bucket).read(1).writer
        with pytest.raises(WriterConflict):
            former.publish(states[2].source).result()
        for _ in range(2):
            with pytest.raises(WriterConflict):
                former.publish(states[2].source)
        new.publish(states[3].source).result()
        assert kit.history(bucket) == [s.raw for s in (states[0], states[1], states[1], states[3])]

    def test_without_a_fence_whoever_publishes_first_wins(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        former = kit.start_run(bucket, states[0])
        new = Publisher(bucket, states[0].source, fence=False)
        assert new.version == 0
        former.publish(states[1].source).result()
        with pytest.raises(WriterConflict):
            new.publish(states[2].source).result()
        assert kit.history(bucket) == [states[0].raw, states[1].raw]

    def test_a_takeover_that_loses_to_a_live_writer_is_a_conflict(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        live = kit.start_run(bucket, states[0])
        racing = FaultyBucket(bucket).run(
            lambda _: live.publish(states[1].source).result(), "create", "commits/*"
        )
        with pytest.raises(WriterConflict):
            Publisher(racing, states[2].source)
        live.publish(states[3].source).result()
        assert kit.history(bucket) == [s.raw for s in (states[0], states[1], states[3])]

    def test_two_finish_the_same_half_started_run_and_one_wins(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        broken = FaultyBucket(bucket).fail("create", "anchors/*")
        with pytest.raises(BucketUnavailable):
            Publisher(broken, states[0].source)
        winner: list[Publisher] = []
        racing = FaultyBucket(bucket).run(
            lambda _: winner.append(Publisher(bucket, states[1].source)), "create", "commits/*"
        )
        with pytest.raises(WriterConflict):
            Publisher(racing, states[2].source)
        winner[0].publish(states[3].source).result()
        assert kit.history(bucket) == [states[1].raw, states[3].raw]

    @pytest.mark.parametrize("resume", ["new", "auto"])
    def test_of_many_that_start_one_run_at_once_one_can_go_on(
        self, kit: SimpleNamespace, any_bucket: Bucket, resume: Any
    ) -> None:
        many = [kit.State.random(seed) for seed in range(8)]
        ready = threading.Barrier(len(many))

        def start(state: Any) -> Publisher | None:
            ready.wait(20)
            try:
                return Publisher(any_bucket, state.source, resume=resume)
            except (WriterConflict, RunExists):
                return None

        with ThreadPoolExecutor(len(many)) as pool:
            started = [p for p in pool.map(start, many) if p is not None]
        assert sum(p.started_run for p in started) <= 1
        if resume == "new":
            assert len(started) == 1
        final = kit.State.random(99)
        alive = []
        for publisher in started:
            try:
                publisher.publish(final.source).result()
                alive.append(publisher)
            except WriterConflict:
                pass
        assert len(alive) == 1
        versions = kit.history(any_bucket)
        assert versions[-1] == final.raw
        assert versions[0] in [state.raw for state in many]


class TestResuming:
    def test_auto_starts_and_continues(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        with Publisher(bucket, states[0].source, resume="auto") as first:
            assert first.started_run
            first.publish(states[1].source)
        with Publisher(bucket, states[3].source, resume="auto") as second:
            assert not second.started_run
            assert second.run == first.run
            commit = second.publish(states[3].source).result()
        assert commit.changed == states[3].distance(states[1])
        assert kit.pulled(bucket) == states[3].raw

    def test_require_needs_a_run(self, states: list[Any], bucket: MemoryBucket) -> None:
        with pytest.raises(RunNotFound):
            Publisher(bucket, states[0].source, resume="require")
        assert not list(bucket.list())
        Publisher(bucket, states[0].source)
        assert Publisher(bucket, states[0].source, resume="require").version == 1

    def test_new_refuses_a_run(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        Publisher(bucket, states[0].source, resume="new")
        before = list(bucket.list())
        with pytest.raises(RunExists):
            Publisher(bucket, states[1].source, resume="new")
        assert list(bucket.list()) == before

    @pytest.mark.parametrize("option", ["resume", "busy", "codec"])
    def test_unknown_options_are_refused_before_anything_happens(
        self, states: list[Any], bucket: MemoryBucket, option: str
    ) -> None:
        with pytest.raises(Misuse):
            Publisher(bucket, states[0].source, **{option: "perhaps"})
        assert not list(bucket.list())

    def test_a_rewound_trainer_is_a_diff_like_any_other(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        kit.start_run(bucket, *states).close()
        with Publisher(bucket, states[1].source) as rewound:
            rewound.publish(states[1].source)
        assert kit.pulled(bucket) == states[1].raw

    def test_another_schema_is_refused_before_any_upload(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        publisher = kit.start_run(bucket, states[0])
        before = list(bucket.list())
        name, tensor = states[0].source[0]
        rest = states[0].source[1:]
        f32 = FlatTensor(np.zeros(480, np.uint32), dtype("I32"), (40, 12))
        changes: dict[str, Any] = {
            "missing": rest,
            "surplus": [*states[0].source, ("more", f32)],
            "renamed": [(name + "x", tensor), *rest],
            "shape": [(name, FlatTensor(tensor.bits, tensor.dtype, (12, 40))), *rest],
            "dtype": [(name, f32), *rest],
            "tie": [*states[0].source, ("alias", tensor)],
        }
        for what, source in changes.items():
            with pytest.raises(SchemaMismatch):
                Publisher(bucket, source)
            with pytest.raises(SchemaMismatch):
                publisher.publish(source)
            assert list(bucket.list()) == before, what
        publisher.publish(states[1].source).result()
        assert kit.pulled(bucket) == states[1].raw

    def test_the_runs_serving_dtype_is_kept(
        self, kit: SimpleNamespace, bucket: MemoryBucket
    ) -> None:
        master = {"w": np.linspace(-3, 3, 1000, dtype=np.float32)}
        Publisher(bucket, master, dtype="bf16").close()
        resumed = Publisher(bucket, master)
        assert [str(spec.dtype) for spec in resumed.schema] == ["BF16"]
        assert resumed.publish(master).result().changed == 0

    def test_a_cache_makes_resuming_cheap_and_changes_nothing(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        kit.start_run(bucket, *states[:3]).close()
        Publisher(bucket, states[2].source, cache=tmp_path / "cache").close()
        counting = FaultyBucket(bucket)
        with Publisher(counting, states[2].source, cache=tmp_path / "cache") as publisher:
            publisher.publish(states[3].source)
        assert not any("anchors/" in call.key for call in counting.calls)
        assert kit.pulled(bucket) == states[3].raw

    @pytest.mark.parametrize("harm", ["flipped byte", "another run", "torn state"])
    def test_a_cache_that_does_not_fit_is_passed_by(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        bucket: MemoryBucket,
        tmp_path: Path,
        harm: str,
    ) -> None:
        cache = tmp_path / "cache"
        elsewhere = MemoryBucket() if harm == "another run" else bucket
        kit.start_run(elsewhere, *states[:2]).close()
        Publisher(elsewhere, states[1].source, cache=cache).close()
        if harm == "another run":
            kit.start_run(bucket, *states[:2]).close()
        else:
            path = cache / (
                "model.safetensors" if harm == "flipped byte" else ".thinwire/state.json"
            )
            data = bytearray(path.read_bytes())
            data[-20] ^= 4
            path.write_bytes(data)
        with Publisher(bucket, states[2].source, cache=cache, fence=False) as publisher:
            commit = publisher.publish(states[2].source).result()
        assert commit.changed == states[2].distance(states[1])
        assert kit.pulled(bucket) == states[2].raw


class TestBusy:
    def test_skip_returns_at_once_and_the_next_carries_the_changes(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        slow = FaultyBucket(bucket)
        publisher = Publisher(slow, states[0].source, busy="skip")
        gate = Gate(slow, "create", "deltas/*")
        first = publisher.publish(states[1].source)
        assert gate.reached.wait(20)
        skipped = publisher.publish(states[2].source)
        assert (skipped.skipped, skipped.version, skipped.done()) == (True, None, True)
        with pytest.raises(PublishFailed):
            skipped.result()
        with pytest.raises(TimeoutError):
            first.result(timeout=0.01)
        gate.opened.set()
        assert first.result().version == 1
        assert publisher.publish(states[3].source).result().changed == states[3].distance(states[1])
        assert kit.history(bucket) == [s.raw for s in (states[0], states[1], states[3])]

    def test_wait_blocks_until_the_former_publish_is_committed(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        slow = FaultyBucket(bucket)
        publisher = Publisher(slow, states[0].source)
        gate = Gate(slow, "create", "deltas/*")
        first = publisher.publish(states[1].source)
        assert gate.reached.wait(20)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(publisher.publish, states[2].source)
            assert not second.done()
            assert not first.done()
            gate.opened.set()
            assert second.result(20).result().version == 2
        assert kit.history(bucket) == [s.raw for s in states[:3]]

    def test_weights_may_change_as_soon_as_publish_returns(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        slow = FaultyBucket(bucket)
        publisher = Publisher(slow, states[0].source)
        gate = Gate(slow, "create", "deltas/*")
        live = states[0].changed(77)
        published = live.raw
        receipt = publisher.publish(live.source)
        for bits in live.bits.values():
            bits[...] = 0
        gate.opened.set()
        receipt.result()
        assert kit.pulled(bucket) == published


class Interrupted(BaseException):
    """As KeyboardInterrupt and SystemExit are."""


class TestErrors:
    @pytest.fixture
    def failing(self, bucket: MemoryBucket) -> FaultyBucket:
        return FaultyBucket(bucket)

    def test_an_unseen_error_is_raised_by_the_next_publish_once(
        self, kit: SimpleNamespace, states: list[Any], failing: FaultyBucket
    ) -> None:
        publisher = Publisher(failing, states[0].source)
        failing.fail("create", "deltas/*")
        publisher.publish(states[1].source)
        with pytest.raises(BucketUnavailable):
            publisher.publish(states[2].source)
        assert publisher.publish(states[3].source).result().changed == states[3].distance(states[0])
        publisher.close()
        assert kit.history(failing.inner) == [states[0].raw, states[3].raw]

    @pytest.mark.parametrize("ask", ["result", "stats"])
    def test_an_error_that_the_receipt_raised_is_not_raised_again(
        self, states: list[Any], failing: FaultyBucket, ask: str
    ) -> None:
        publisher = Publisher(failing, states[0].source)
        failing.fail("create", "deltas/*")
        receipt = publisher.publish(states[1].source)
        for _ in range(2):
            with pytest.raises(BucketUnavailable):
                getattr(receipt, ask)()
        assert publisher.publish(states[2].source).result().version == 1
        failing.fail("create", "deltas/*")
        receipt = publisher.publish(states[3].source)
        with pytest.raises(BucketUnavailable):
            getattr(receipt, ask)()
        publisher.close()

    def test_an_old_receipt_does_not_hide_a_new_error(
        self, states: list[Any], failing: FaultyBucket
    ) -> None:
        publisher = Publisher(failing, states[0].source)
        failing.fail("create", "deltas/*", times=2)
        old = publisher.publish(states[1].source)
        with pytest.raises(BucketUnavailable):
            old.result()
        publisher.publish(states[2].source)._future.exception()
        with pytest.raises(BucketUnavailable):
            old.result()
        with pytest.raises(BucketUnavailable):
            publisher.publish(states[3].source)

    def test_an_interruption_in_the_background_surfaces_and_nothing_is_lost(
        self, kit: SimpleNamespace, states: list[Any], failing: FaultyBucket
    ) -> None:
        publisher = Publisher(failing, states[0].source)

        def interrupt(_: str) -> None:
            raise Interrupted

        for pattern, after in itertools.product(("deltas/*", "commits/*"), (False, True)):
            failing.run(interrupt, "create", pattern, after=after)
            with pytest.raises(Interrupted):
                publisher.publish(states[1].source).result()
        failing.run(interrupt, "create", "deltas/*")
        publisher.publish(states[2].source)
        with pytest.raises(Interrupted):
            publisher.publish(states[2].source)
        publisher.publish(states[3].source).result()
        publisher.close()
        versions = kit.history(failing.inner)
        assert versions[-1] == states[3].raw
        assert all(found in [s.raw for s in states] for found in versions)

    def test_a_conflict_nobody_saw_is_raised_by_close_once(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        publisher = kit.start_run(bucket, states[0])
        Publisher(bucket, states[0].source)
        publisher.publish(states[1].source)
        with pytest.raises(WriterConflict):
            publisher.close()
        publisher.close()

    def test_a_conflict_that_was_seen_is_not_raised_by_close(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        for ask in ("result", "publish", "publish later"):
            publisher = Publisher(bucket, states[0].source)
            Publisher(bucket, states[0].source)
            receipt = publisher.publish(states[1].source)
            while ask == "publish later" and not receipt.done():
                time.sleep(0.001)
            with pytest.raises(WriterConflict):
                receipt.result() if ask == "result" else publisher.publish(states[1].source)
            publisher.close()


class TestClosing:
    def test_close_drains(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        slow = FaultyBucket(bucket).delay(0.1, "create", "deltas/*")
        publisher = Publisher(slow, states[0].source)
        receipt = publisher.publish(states[1].source)
        publisher.close()
        assert receipt.done()
        assert kit.pulled(bucket) == states[1].raw

    def test_close_raises_what_nobody_saw(self, states: list[Any], bucket: MemoryBucket) -> None:
        failing = FaultyBucket(bucket)
        publisher = Publisher(failing, states[0].source)
        failing.fail("create", "deltas/*")
        publisher.publish(states[1].source)
        with pytest.raises(BucketUnavailable):
            publisher.close()
        publisher.close()

    def test_a_closed_publisher_publishes_no_more(
        self, states: list[Any], bucket: MemoryBucket
    ) -> None:
        publisher = Publisher(bucket, states[0].source)
        publisher.close()
        before = list(bucket.list())
        with pytest.raises(PublishFailed):
            publisher.publish(states[1].source)
        assert list(bucket.list()) == before

    def test_a_with_block_drains_and_raises(self, states: list[Any], bucket: MemoryBucket) -> None:
        failing = FaultyBucket(bucket)

        def body() -> None:
            with Publisher(failing, states[0].source) as publisher:
                failing.fail("create", "deltas/*")
                publisher.publish(states[1].source)

        with pytest.raises(BucketUnavailable):
            body()

    def test_a_with_block_shows_its_own_error(
        self, states: list[Any], bucket: MemoryBucket
    ) -> None:
        failing = FaultyBucket(bucket)

        def body() -> None:
            with Publisher(failing, states[0].source) as publisher:
                failing.fail("create", "deltas/*")
                publisher.publish(states[1].source)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            body()


def test_a_base_that_replicas_have_is_not_uploaded(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
) -> None:
    donor = MemoryBucket()
    kit.start_run(donor, states[0])
    with Replica(donor, tmp_path / "model") as replica:
        replica.sync()
    publisher = Publisher(bucket, states[0].source, base="hf://org/name@0123abc")
    publisher.publish(states[1].source).result()
    assert not list(bucket.list("anchors/"))
    with Replica(bucket, tmp_path / "mirror", base=tmp_path / "model") as replica:
        assert [u.version for u in replica.sync()] == [0, 1]
    assert kit.on_disk(tmp_path / "mirror") == states[1].raw
    with Replica(bucket, tmp_path / "other") as replica, pytest.raises(Misuse):
        replica.sync()
    wrong = MemoryBucket()
    Publisher(wrong, states[2].source, base="hf://org/name@0123abc")
    with (
        Replica(wrong, tmp_path / "third", base=tmp_path / "model") as replica,
        pytest.raises(ThinwireError),
    ):
        replica.sync()
    assert not kit.on_disk(tmp_path / "third")


def test_a_run_on_a_base_is_resumed_with_a_folder_that_holds_it(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
) -> None:
    donor = MemoryBucket()
    kit.start_run(donor, states[0])
    with Replica(donor, tmp_path / "model") as replica:
        replica.sync()
    kit.start_run(bucket, states[0], states[1], base="hf://org/name@0123abc").close()
    with pytest.raises(Misuse):
        Publisher(bucket, states[2].source)
    with Publisher(bucket, states[2].source, base=str(tmp_path / "model")) as publisher:
        commit = publisher.publish(states[2].source).result()
    assert commit.changed == states[2].distance(states[1])
    assert Chain(bucket).read_run().base == "hf://org/name@0123abc"


def test_keys_are_named_by_version_and_content(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
) -> None:
    kit.start_run(bucket, *states[:3])
    commits = [Chain(bucket).read(v) for v in range(3)]
    expected = {keys.RUN, *(keys.commit_key(v) for v in range(3))}
    expected |= {ref.key for c in commits for ref in c.payloads}
    folder = commits[0].payloads[0].key.removesuffix(keys.MANIFEST)
    assert {i.key for i in bucket.list()} == expected | {folder + "model.safetensors"}


class TestAHoleInTheHistory:
    def test_is_neither_published_over_nor_read_as_the_end(
        self, kit: SimpleNamespace, states: list[Any], any_bucket: Bucket
    ) -> None:
        kit.start_run(any_bucket, *states[:4])
        any_bucket.delete(keys.commit_key(1))
        for attempt in (
            lambda: Publisher(any_bucket, states[0].source),
            lambda: Replica(any_bucket, MemoryMirror()).sync(),
            lambda: Chain(any_bucket).sure_head(),
        ):
            with pytest.raises(HistoryRewritten, match="version 1 is gone; version 3"):
                attempt()

    def test_is_not_seen_where_versions_only_come_in_between(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket
    ) -> None:
        kit.start_run(bucket, *states[:3])
        late = FaultyBucket(bucket)
        publisher = Publisher(bucket, states[2].source, fence=False)
        late.run(lambda _: publisher.publish(states[3].source).result(), "list", "*")
        assert Chain(late).sure_head() == 3


def test_a_serving_dtype_that_the_run_does_not_have_is_refused(bucket: MemoryBucket) -> None:
    source = {"w": np.zeros(4, np.float32)}
    Publisher(bucket, source, dtype="bf16")
    Publisher(bucket, source, dtype="bf16")
    with pytest.raises(SchemaMismatch, match="F16"):
        Publisher(bucket, source, dtype="fp16")
