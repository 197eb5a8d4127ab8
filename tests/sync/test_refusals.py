"""What a replica refuses, and that a refusal leaves the mirror exactly as it was."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire import Publisher, Replica
from thinwire import codec as codecs
from thinwire.bucket import MemoryBucket
from thinwire.chain import Chain
from thinwire.codec import wire
from thinwire.disk import DiskMirror
from thinwire.dtypes import DTYPES
from thinwire.errors import (
    AccessDenied,
    BucketUnavailable,
    CorruptPayload,
    DigestMismatch,
    HistoryRewritten,
    KeyNotFound,
    Misuse,
    Resync,
    RollbackRefused,
    RunChanged,
    RunNotFound,
    SchemaMismatch,
    ThinwireError,
    UnsupportedFormat,
    VersionGone,
)
from thinwire.log import keys
from thinwire.log.commit import AnchorFile, Commit, Manifest, PayloadRef, RunInfo
from thinwire.log.records import open_record, seal_record
from thinwire.mirror import MemoryMirror
from thinwire.schema import Schema, TensorSpec
from thinwire.testing import FaultyBucket


@pytest.fixture
def bucket(kit: SimpleNamespace, states: list[Any]) -> MemoryBucket:
    """A run with versions 0 to 3."""
    bucket = MemoryBucket()
    kit.start_run(bucket, *states[:4], max_shard=1000).close()
    return bucket


@pytest.fixture
def folder(bucket: MemoryBucket, tmp_path: Path) -> Path:
    """A mirror at version 1."""
    with Replica(bucket, tmp_path / "mirror") as replica:
        replica.sync(1)
    return tmp_path / "mirror"


def wipe(bucket: MemoryBucket, prefix: str = "") -> None:
    for info in list(bucket.list(prefix)):
        bucket.delete(info.key)


class TestMoving:
    def test_from_nothing_to_the_newest(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        with Replica(bucket, tmp_path / "mirror") as replica:
            assert replica.version is None
            updates = replica.sync()
            assert [u.version for u in updates] == [0, 1, 2, 3]
            assert updates[0].patches is None
            assert [sum(map(len, u.patches or ())) for u in updates[1:]] == [
                states[v].distance(states[v - 1]) for v in (1, 2, 3)
            ]
            assert replica.sync() == []
        assert kit.on_disk(tmp_path / "mirror") == states[3].raw

    def test_from_where_the_mirror_stands(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, folder: Path
    ) -> None:
        assert kit.on_disk(folder) == states[1].raw
        counting = FaultyBucket(bucket)
        with Replica(counting, folder) as replica:
            assert replica.version == 1
            assert [u.version for u in replica.sync()] == [2, 3]
        assert not any("anchors/" in call.key for call in counting.calls)
        assert kit.on_disk(folder) == states[3].raw

    def test_patches_lead_a_copy_from_version_to_version(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        follower = kit.State(states[0].layout, {n: b.copy() for n, b in states[0].bits.items()})
        for update in Replica(bucket, MemoryMirror()).catch_up():
            for patch in update.patches or ():
                follower.bits[patch.name][patch.positions] = patch.bits
            assert follower.raw == states[update.version].raw

    @pytest.mark.parametrize("ahead", [1, 2, 16])
    def test_many_versions_with_any_read_ahead(self, kit: SimpleNamespace, ahead: int) -> None:
        many = [kit.State.random(0)]
        for seed in range(1, 40):
            many.append(many[-1].changed(seed, 0.03))
        bucket = MemoryBucket()
        kit.start_run(bucket, *many)
        mirror = MemoryMirror()
        for update in Replica(bucket, mirror, ahead=ahead).catch_up():
            assert kit.held(mirror) == many[update.version].raw

    def test_a_target_version(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        with Replica(bucket, tmp_path / "mirror") as replica:
            for target in (0, 2, 2, 3):
                replica.sync(target)
                assert replica.version == target
                assert kit.held(replica.mirror) == states[target].raw
            with pytest.raises(Misuse, match="not committed"):
                replica.sync(4)

    def test_a_rollback_is_refused(self, kit: SimpleNamespace, bucket: Any, folder: Path) -> None:
        before = kit.files(folder)
        with Replica(bucket, folder) as replica, pytest.raises(RollbackRefused):
            replica.sync(0)
        assert kit.files(folder) == before

    def test_abandoning_a_catch_up_leaves_a_whole_version(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        with Replica(bucket, tmp_path / "mirror") as replica:
            for update in replica.catch_up():
                if update.version == 2:
                    break
        assert kit.on_disk(tmp_path / "mirror") == states[2].raw


class TestHistory:
    def refused(
        self,
        kit: SimpleNamespace,
        bucket: Any,
        folder: Path,
        error: type[ThinwireError],
        **options: Any,
    ) -> None:
        before = kit.files(folder)
        with Replica(bucket, folder, **options) as replica, pytest.raises(error):
            replica.sync()
        assert kit.files(folder) == before

    def test_the_held_commit_was_replaced(
        self, kit: SimpleNamespace, bucket: MemoryBucket, folder: Path
    ) -> None:
        commit = Chain(bucket).read(1)
        bucket.put(keys.commit_key(1), replace(commit, step=999).encode())
        wipe(bucket, keys.commit_key(2))
        wipe(bucket, keys.commit_key(3))
        self.refused(kit, bucket, folder, HistoryRewritten)

    def test_a_rewritten_history_goes_on_past_the_held_version(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, folder: Path
    ) -> None:
        for version in (1, 2, 3):
            wipe(bucket, keys.commit_key(version))
        with Publisher(bucket, states[4].source, fence=False) as publisher:
            for state in (states[4], states[2], states[3]):
                publisher.publish(state.source)
        self.refused(kit, bucket, folder, HistoryRewritten)

    @pytest.mark.parametrize("gone", ["commits/", ""])
    def test_the_commits_were_deleted(
        self, kit: SimpleNamespace, bucket: MemoryBucket, folder: Path, gone: str
    ) -> None:
        wipe(bucket, gone)
        self.refused(kit, bucket, folder, HistoryRewritten)

    def test_the_run_was_deleted_under_a_live_replica(
        self, kit: SimpleNamespace, bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        with Replica(bucket, tmp_path / "mirror") as replica:
            replica.sync()
            before = kit.files(tmp_path / "mirror")
            wipe(bucket)
            with pytest.raises(HistoryRewritten):
                replica.sync()
            with pytest.raises(HistoryRewritten):
                next(replica.follow(poll=0))
            assert kit.files(tmp_path / "mirror") == before

    def test_nothing_new_is_not_a_rewritten_history(
        self, bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        with Replica(bucket, tmp_path / "mirror") as replica:
            replica.sync()
            for _ in range(3):
                assert replica.sync() == []

    def test_a_missing_next_version_counts_only_while_the_held_one_is_confirmed(
        self, bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        faulty = FaultyBucket(bucket)
        with Replica(faulty, tmp_path / "mirror") as replica:
            replica.sync()
            for error in (BucketUnavailable, AccessDenied):
                faulty.fail("stream", keys.commit_key(3), error=error)
                with pytest.raises(error):
                    replica.sync()
            assert not faulty.unfired

    def test_a_commit_in_the_middle_was_deleted(
        self, kit: SimpleNamespace, bucket: MemoryBucket, folder: Path
    ) -> None:
        faulty = FaultyBucket(bucket).run(bucket.delete, "head", keys.commit_key(2), after=True)
        self.refused(kit, faulty, folder, HistoryRewritten)

    def test_another_run_is_refused_and_can_be_adopted(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, folder: Path
    ) -> None:
        wipe(bucket)
        kit.start_run(bucket, states[4], states[0], max_shard=500).close()
        self.refused(kit, bucket, folder, RunChanged)
        with Replica(bucket, folder, adopt=True) as replica:
            assert [u.version for u in replica.sync()] == [0, 1]
            replica.mirror.rescan()
        assert kit.on_disk(folder) == states[0].raw
        with Replica(bucket, folder) as replica:
            assert replica.sync() == []
            assert isinstance(replica.mirror, DiskMirror)
            replica.mirror.verify()

    def test_another_run_with_another_schema_can_be_adopted(
        self, kit: SimpleNamespace, bucket: MemoryBucket, folder: Path
    ) -> None:
        wipe(bucket)
        other = kit.State.random(5, [("only", "F64", (3, 3))])
        kit.start_run(bucket, other, other.changed(1)).close()
        with Replica(bucket, folder, adopt=True) as replica:
            replica.sync()
        assert kit.on_disk(folder) == other.changed(1).raw

    def test_a_run_that_replaced_the_followed_one_is_noticed(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        with Replica(bucket, tmp_path / "mirror") as replica:
            replica.sync()
            wipe(bucket)
            kit.start_run(bucket, *states[::-1]).close()
            before = kit.files(tmp_path / "mirror")
            with pytest.raises(HistoryRewritten):
                replica.sync()
            assert kit.files(tmp_path / "mirror") == before

    @pytest.mark.parametrize("pattern", ["deltas/0000000002*", "deltas/0000000003*"])
    def test_a_deleted_payload_is_a_gone_version(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        bucket: MemoryBucket,
        folder: Path,
        pattern: str,
    ) -> None:
        missing = int(pattern[-2])
        with (
            Replica(FaultyBucket(bucket).hide(pattern), folder) as replica,
            pytest.raises(VersionGone, match=f"version {missing}"),
        ):
            replica.sync()
        assert kit.on_disk(folder) == states[missing - 1].raw

    @pytest.mark.parametrize("pattern", ["*manifest.json", "anchors/*00001-of*"])
    def test_a_deleted_anchor_is_a_gone_version(
        self, kit: SimpleNamespace, bucket: MemoryBucket, tmp_path: Path, pattern: str
    ) -> None:
        for mirror in (MemoryMirror(), tmp_path / "mirror"):
            with (
                Replica(FaultyBucket(bucket).hide(pattern), mirror) as replica,
                pytest.raises(VersionGone),
            ):
                replica.sync()
        assert kit.on_disk(tmp_path / "mirror") == {}

    def test_no_run_and_no_version_are_told_apart_from_errors(self, states: list[Any]) -> None:
        empty = MemoryBucket()
        with pytest.raises(RunNotFound):
            Replica(empty, MemoryMirror()).sync()
        with pytest.raises(BucketUnavailable):
            Publisher(FaultyBucket(empty).fail("create", "anchors/*"), states[0].source)
        with pytest.raises(RunNotFound, match="no version yet"):
            Replica(empty, MemoryMirror()).sync()


OBJECTS = ["run.json", "commits/*", "deltas/*", "*manifest.json", "*.index.json", "anchors/*of*"]


class TestTroubleWithTheStore:
    @pytest.mark.parametrize("error", [BucketUnavailable, AccessDenied])
    def test_at_any_call_of_a_pull_it_is_raised_and_the_next_pull_works(
        self,
        kit: SimpleNamespace,
        states: list[Any],
        bucket: MemoryBucket,
        folder: Path,
        error: type[ThinwireError],
    ) -> None:
        calm = FaultyBucket(bucket)
        Replica(calm, MemoryMirror(), ahead=1).sync()
        calls = list(calm.calls)
        exists = {info.key for info in bucket.list()}.__contains__
        # "missing" is a response by itself: nothing comes after it
        answered = [call for call in calls if call.operation != "head" or exists(call.key)]
        for after, those in ((False, calls), (True, answered)):
            for index in range(len(those)):
                self.strike_a_pull(kit, states, bucket, error, after, those, index)

    @staticmethod
    def strike_a_pull(
        kit: SimpleNamespace,
        states: list[Any],
        bucket: MemoryBucket,
        error: type[ThinwireError],
        after: bool,
        calls: list[Any],
        index: int,
    ) -> None:
        faulty = kit.strike(FaultyBucket(bucket), index, calls, after=after, error=error)
        mirror = MemoryMirror()
        replica = Replica(faulty, mirror, ahead=1)
        with pytest.raises(error):
            replica.sync()
        if mirror.held is not None:
            assert kit.held(mirror) == states[mirror.held.version].raw
        replica.sync()
        assert kit.held(mirror) == states[3].raw

    @pytest.mark.parametrize("error", [BucketUnavailable, AccessDenied])
    @pytest.mark.parametrize("operation", ["head", "stream"])
    def test_it_leaves_the_mirror_as_it_was(
        self,
        kit: SimpleNamespace,
        bucket: MemoryBucket,
        folder: Path,
        operation: Any,
        error: type[ThinwireError],
    ) -> None:
        before = kit.files(folder)
        faulty = FaultyBucket(bucket).fail(operation, times=None, error=error)
        with Replica(faulty, folder) as replica, pytest.raises(error):
            replica.sync()
        assert kit.files(folder) == before


class TestDamage:
    @pytest.mark.parametrize("how", ["flipped", "truncated"])
    @pytest.mark.parametrize("pattern", ["deltas/*", "commits/*2.json", "run.json"])
    def test_nothing_damaged_reaches_a_mirror(
        self, kit: SimpleNamespace, bucket: MemoryBucket, folder: Path, pattern: str, how: str
    ) -> None:
        before = kit.files(folder)
        prefix = pattern.partition("*")[0]
        size = min(info.size for info in bucket.list(prefix))
        for at in {0, 1, 9, size // 3, size // 2, size - 70, size - 2, size - 1}:
            faulty = FaultyBucket(bucket)
            faulty.corrupt(pattern, at=at) if how == "flipped" else faulty.truncate(pattern, at=at)
            with Replica(faulty, folder) as replica, pytest.raises(CorruptPayload):
                replica.sync()
            assert not faulty.unfired
            assert kit.files(folder) == before

    def test_every_byte_of_a_commit_counts(self, bucket: MemoryBucket) -> None:
        key = keys.commit_key(2)
        whole = bucket.get(key)
        mirror = MemoryMirror()
        Replica(bucket, mirror).sync(1)
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << (at % 8)
            bucket.put(key, bytes(damaged))
            with pytest.raises((CorruptPayload, UnsupportedFormat)):
                Replica(bucket, mirror).sync()
            assert mirror.held is not None
            assert mirror.held.version == 1
        bucket.put(key, whole)
        Replica(bucket, mirror).sync()

    @pytest.mark.parametrize("on_disk", [True, False])
    def test_every_object_of_a_run_is_checked_by_a_fresh_pull(
        self, kit: SimpleNamespace, bucket: MemoryBucket, tmp_path: Path, on_disk: bool
    ) -> None:
        for info in list(bucket.list()):
            if not on_disk and info.key.endswith(".index.json"):
                continue  # of no use to a mirror in memory
            for at in (0, info.size // 2, info.size - 1):
                faulty = FaultyBucket(bucket).corrupt(info.key, at=at)
                mirror = tmp_path / f"{info.key}-{at}".replace("/", "-") if on_disk else None
                with (
                    Replica(faulty, mirror or MemoryMirror()) as replica,
                    pytest.raises(CorruptPayload),
                ):
                    replica.sync()
                assert not faulty.unfired
                # the next look, through a sound connection, goes on from where that stopped
                with Replica(bucket, mirror or MemoryMirror()) as replica:
                    replica.sync()

    def test_a_longer_object_is_cut_off_before_it_fills_the_memory(
        self, bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        endless = 300 << 20

        class Endless(FaultyBucket):
            sent = 0

            def stream(self, key: str, *, chunk: int = 1 << 20) -> Any:
                if not any(part in key for part in self.long):
                    yield from super().stream(key, chunk=chunk)
                    return
                block = bytes(1 << 20)
                for _ in range(endless >> 20):
                    self.sent += len(block)
                    yield block

            long: tuple[str, ...] = ()

        for part in ("commits/", "deltas/", "manifest.json", "00001-of-"):
            faulty = Endless(bucket)
            faulty.long = (part,)
            tracemalloc.start()
            for mirror in (MemoryMirror(), tmp_path / part.strip("/-.")):
                with Replica(faulty, mirror) as replica, pytest.raises(CorruptPayload):
                    replica.sync()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 30 << 20, part
            assert faulty.sent < 30 << 20, part


def recommit(bucket: MemoryBucket, version: int, **changes: Any) -> Commit:
    """Replace a commit by one with other fields and a sound seal, as its writer could."""
    commit = replace(Chain(bucket).read(version), **changes)
    bucket.put(keys.commit_key(version), commit.encode())
    return commit


def store_payload(bucket: MemoryBucket, version: int, data: bytes) -> PayloadRef:
    sha256 = hashlib.sha256(data).hexdigest()
    ref = PayloadRef(keys.delta_key(version, sha256), len(data), sha256)
    bucket.put(ref.key, data)
    return ref


class TestHostileCommits:
    """Sealed records with impossible contents: whoever can write to the bucket can make them."""

    @pytest.fixture
    def refuse(
        self, kit: SimpleNamespace, bucket: MemoryBucket, folder: Path, tmp_path: Path
    ) -> Callable[..., None]:
        def refuse(error: Any = CorruptPayload) -> None:
            before = kit.files(tmp_path)
            with Replica(bucket, folder) as replica, pytest.raises(error):
                replica.sync(2)
            assert kit.files(tmp_path) == before

        return refuse

    @pytest.mark.parametrize(
        "key",
        [
            "../../outside",
            "/etc/passwd",
            "deltas/../run.json",
            "run.json",
            "commits/0000000001.json",
            "deltas/0000000001-" + "0" * 32 + ".safetensors",
            "deltas/0000000002-" + "0" * 32 + ".safetensors/../../x",
            "",
            "x" * 5000,
        ],
    )
    def test_a_payload_key_that_is_not_that_versions(
        self, bucket: MemoryBucket, refuse: Callable[..., None], key: str
    ) -> None:
        ref = Chain(bucket).read(2).payloads[0]
        recommit(bucket, 2, payloads=(replace(ref, key=key),))
        refuse()

    @pytest.mark.parametrize("size", [0, 1, 1 << 40, (1 << 63) - 1])
    def test_a_payload_size_that_is_not_so(
        self, bucket: MemoryBucket, refuse: Callable[..., None], size: int
    ) -> None:
        ref = Chain(bucket).read(2).payloads[0]
        recommit(bucket, 2, payloads=(replace(ref, size=size),))
        refuse()

    def test_many_payloads_that_together_cannot_be(
        self, bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        ref = Chain(bucket).read(2).payloads[0]
        recommit(bucket, 2, payloads=(ref,) * 1000)
        refuse()
        many = [
            PayloadRef(keys.delta_key(2, f"{n:032x}"), 150_000_000, ref.sha256) for n in range(50)
        ]
        recommit(bucket, 2, payloads=tuple(many))
        refuse()

    def test_a_payload_with_another_hash(
        self, bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        ref = Chain(bucket).read(2).payloads[0]
        recommit(bucket, 2, payloads=(replace(ref, sha256="0" * 64),))
        refuse()

    def test_a_missing_payload_list_is_another_state(
        self, bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        recommit(bucket, 2, payloads=())
        refuse(DigestMismatch)

    def test_a_commit_of_another_version(
        self, bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        bucket.put(keys.commit_key(2), bucket.get(keys.commit_key(3)))
        refuse()
        bucket.put(keys.commit_key(2), Chain(bucket).read(1).encode())
        refuse()

    def test_a_commit_of_another_run(
        self, bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        recommit(bucket, 2, run="0" * 32)
        refuse(HistoryRewritten)

    def test_a_commit_with_another_parent(
        self, bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        recommit(bucket, 2, parent="0" * 64)
        refuse(HistoryRewritten)

    def test_a_commit_that_promises_another_state(
        self, bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        recommit(bucket, 2, digest="0" * 64)
        refuse(DigestMismatch)

    def test_a_valid_payload_for_another_base(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, refuse: Any
    ) -> None:
        other = MemoryBucket()
        kit.start_run(other, states[0], states[4], states[2])
        foreign = Chain(other).read(2)
        bucket.put(foreign.payloads[0].key, other.get(foreign.payloads[0].key))
        recommit(bucket, 2, payloads=foreign.payloads)
        # a coded payload may contradict a base that is not its own before the digest does
        refuse(Resync)

    def test_values_of_the_wrong_type(
        self, bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        body = open_record("commit", bucket.get(keys.commit_key(2)))
        wrong: list[dict[str, Any]] = [
            {"payloads": {}},
            {"payloads": [{"key": 1, "size": 1, "sha256": "0" * 64}]},
            {"payloads": "deltas"},
            {"payloads": [[]]},
            {"version": -1},
            {"version": "2"},
            {"version": 1 << 70},
            {"changed": -5},
            {"step": "many"},
            {"digest": 5},
            {"digest": "A" * 64},
            {"writer": ""},
        ]
        for change in wrong:
            bucket.put(keys.commit_key(2), seal_record("commit", {**body, **change}))
            refuse()
        for name in ("payloads", "digest", "parent", "run", "version", "writer"):
            less = {k: v for k, v in body.items() if k != name}
            bucket.put(keys.commit_key(2), seal_record("commit", less))
            refuse()

    def test_a_newer_major_version(self, bucket: MemoryBucket, refuse: Callable[..., None]) -> None:
        line = bucket.get(keys.commit_key(2)).split(b"\n")[0].replace(b'"major":1', b'"major":2')
        seal = b'{"sha256":"' + hashlib.sha256(line).hexdigest().encode() + b'"}'
        bucket.put(keys.commit_key(2), line + b"\n" + seal + b"\n")
        refuse(UnsupportedFormat)

    def test_payloads_that_are_not_patches_of_these_tensors(
        self, states: list[Any], bucket: MemoryBucket, refuse: Callable[..., None]
    ) -> None:
        name, kind, shape = states[0].layout[0]
        spec = TensorSpec(name, DTYPES[kind], shape)
        i4, i8, bf16, f16 = (DTYPES[n] for n in ("I32", "I64", "BF16", "F16"))
        metadata = {"format": "thinwire-delta", "major": "1", "codec": "raw"}

        def payload(
            indices: bytes,
            values: bytes,
            *,
            name: str = name,
            index: Any = i4,
            kind: Any = bf16,
            counts: tuple[int, int] | None = None,
            metadata: dict[str, str] = metadata,
        ) -> bytes:
            n, m = counts or (len(indices) // index.itemsize, len(values) // kind.itemsize)
            head, order = wire.build_header(
                [(name + ".indices", index, (n,)), (name + ".values", kind, (m,))], metadata
            )
            data = {".indices": indices, ".values": values}
            return head + b"".join(data["." + part.rpartition(".")[2]] for part in order)

        def i32(*numbers: int) -> bytes:
            return b"".join(n.to_bytes(4, "little", signed=True) for n in numbers)

        two = bytes(4)
        hostile = {
            "repeated": payload(i32(3, 3), two),
            "descending": payload(i32(4, 3), two),
            "negative": payload(i32(-1, 3), two),
            "outside": payload(i32(3, spec.numel), two),
            "far outside": payload(i32(3, (1 << 31) - 1), two),
            "fewer values": payload(i32(1, 2), two[:2], counts=(2, 1)),
            "int64 indices": payload(bytes(8) + (5).to_bytes(8, "little"), two, index=i8),
            "other dtype": payload(i32(1, 2), two, kind=f16),
            "unknown tensor": payload(i32(1, 2), two, name="model.other"),
            "other format": payload(i32(1), two[:2], metadata={**metadata, "format": "pt"}),
            "no metadata": payload(i32(1), two[:2], metadata={}),
            "empty file": b"",
            "huge header": (1 << 62).to_bytes(8, "little") + b"{}",
            "deep header": (200_000).to_bytes(8, "little") + b"[" * 200_000,
            "gap": payload(i32(1), two[:2]) + b"\0",
            "pickle": b"\x80\x04\x95" + bytes(100),
        }
        for what, data in hostile.items():
            recommit(bucket, 2, payloads=(store_payload(bucket, 2, data),))
            refuse((CorruptPayload, UnsupportedFormat))
            assert what
        good = bucket.get(Chain(bucket).read(3).payloads[0].key)
        twice = (store_payload(bucket, 2, good), store_payload(bucket, 2, good[:-1] + b"\x17"))
        recommit(bucket, 2, payloads=twice)
        refuse()
        unknown = payload(i32(1), two[:2], metadata={**metadata, "codec": "newer"})
        recommit(bucket, 2, payloads=(store_payload(bucket, 2, unknown),))
        refuse(UnsupportedFormat)

    def test_a_payload_made_by_hand_is_accepted_if_it_is_right(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, folder: Path
    ) -> None:
        """The tests above would pass as well if everything were refused."""
        schema = Chain(bucket).read_run().schema
        mirror = MemoryMirror()
        updates = Replica(bucket, mirror).sync()
        patches = updates[2].patches or ()
        halves = [
            b"".join(codecs.encode(list(part))) for part in (patches[:1], patches[1:]) if part
        ]
        assert [p for data in halves for p in codecs.decode(data, schema)]
        recommit(bucket, 2, payloads=tuple(store_payload(bucket, 2, d) for d in halves))
        with Replica(bucket, folder) as replica:
            replica.sync(2)
        assert kit.on_disk(folder) == states[2].raw


class TestHostileAnchors:
    @pytest.fixture
    def manifest(self, bucket: MemoryBucket) -> Manifest:
        return Manifest.decode(bucket.get(Chain(bucket).read(0).payloads[0].key))

    @pytest.fixture
    def refuse(
        self, kit: SimpleNamespace, bucket: MemoryBucket, tmp_path: Path
    ) -> Callable[..., None]:
        def refuse(
            manifest: Manifest,
            extra: dict[str, bytes] | None = None,
            error: Any = (CorruptPayload, DigestMismatch, SchemaMismatch),
            *,
            memory: bool = True,
            key: Callable[[str], str] = lambda sha256: keys.anchor_prefix(0, sha256),
        ) -> None:
            data = manifest.encode()
            sha256 = hashlib.sha256(data).hexdigest()
            old = Chain(bucket).read(0)
            prefix, was = key(sha256), old.payloads[0].key.removesuffix(keys.MANIFEST)
            for info in list(bucket.list(was)):
                bucket.put(prefix + info.key.removeprefix(was), bucket.get(info.key))
            for name, content in (extra or {}).items():
                bucket.put(prefix + name, content)
            bucket.put(prefix + keys.MANIFEST, data)
            ref = PayloadRef(prefix + keys.MANIFEST, len(data), sha256)
            try:
                recommit(bucket, 0, payloads=(ref,))
                (tmp_path / "beside").mkdir(exist_ok=True)
                before = kit.files(tmp_path / "beside")
                if memory:
                    with pytest.raises(error):
                        Replica(bucket, MemoryMirror()).sync(0)
                mirror = tmp_path / "beside" / "mirror"
                with Replica(bucket, mirror) as replica, pytest.raises(error):
                    replica.sync(0)
                assert kit.files(tmp_path / "beside") == before
            finally:
                recommit(bucket, 0, payloads=old.payloads)

        return refuse

    @pytest.mark.parametrize(
        "name",
        [
            "../x",
            "..",
            ".",
            "",
            "/tmp/thinwire-escaped",
            ".thinwire/state.json",
            ".thinwire",
            ".hidden",
            "sub/model.safetensors",
            "a\\b",
            "a\0b",
            "x" * 300,
            "model.bin",
            "weights.pt",
            "pytorch_model.bin",
        ],
    )
    def test_a_file_name_that_leads_elsewhere_or_is_none_of_a_checkpoint(
        self, manifest: Manifest, refuse: Callable[..., None], name: str
    ) -> None:
        content = b"harm"
        bad = AnchorFile(name, len(content), hashlib.sha256(content).hexdigest())
        refuse(replace(manifest, files=(*manifest.files, bad)), error=CorruptPayload)
        assert not Path("/tmp/thinwire-escaped").exists()

    def test_a_file_listed_twice(self, manifest: Manifest, refuse: Callable[..., None]) -> None:
        refuse(replace(manifest, files=(*manifest.files, manifest.files[0])))

    @pytest.mark.parametrize("size", [0, 1, 1 << 50, (1 << 63) - 1])
    def test_sizes_that_cannot_be(
        self, manifest: Manifest, refuse: Callable[..., None], size: int
    ) -> None:
        for index, file in enumerate(manifest.files):
            files = list(manifest.files)
            files[index] = replace(file, size=size)
            memory = file.path.endswith(".safetensors")
            tracemalloc.start()
            refuse(replace(manifest, files=tuple(files)), memory=memory)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 10 << 20

    def test_missing_shards(self, manifest: Manifest, refuse: Callable[..., None]) -> None:
        for index in range(len(manifest.files)):
            files = manifest.files[:index] + manifest.files[index + 1 :]
            memory = manifest.files[index].path.endswith(".safetensors")
            refuse(replace(manifest, files=files), memory=memory)

    def test_no_files_at_all(self, manifest: Manifest, refuse: Callable[..., None]) -> None:
        refuse(replace(manifest, files=()))

    def test_weights_that_do_not_fit_the_schema(
        self, kit: SimpleNamespace, manifest: Manifest, refuse: Callable[..., None]
    ) -> None:
        layout = [(n, k, s) for n, k, s in kit.LAYOUT]
        layout[1] = (layout[1][0], "F16", layout[1][2])
        fitting = MemoryBucket()
        kit.start_run(fitting, kit.State.random(1, layout))
        ref = Chain(fitting).read(0).payloads[0]
        other = Manifest.decode(fitting.get(ref.key))
        prefix = ref.key.removesuffix(keys.MANIFEST)
        extra = {file.path: fitting.get(prefix + file.path) for file in other.files}
        refuse(replace(manifest, files=other.files), extra)

    def test_other_weights_of_the_same_schema(
        self, kit: SimpleNamespace, manifest: Manifest, refuse: Callable[..., None]
    ) -> None:
        other = MemoryBucket()
        kit.start_run(other, kit.State.random(55))
        ref = Chain(other).read(0).payloads[0]
        files = Manifest.decode(other.get(ref.key)).files
        extra = {f.path: other.get(ref.key.removesuffix(keys.MANIFEST) + f.path) for f in files}
        refuse(replace(manifest, files=files), extra, DigestMismatch)

    def test_a_surplus_weight_file_that_a_loader_would_prefer(
        self, kit: SimpleNamespace, manifest: Manifest, refuse: Callable[..., None]
    ) -> None:
        other = MemoryBucket()
        kit.start_run(other, kit.State.random(55))
        ref = Chain(other).read(0).payloads[0]
        file = Manifest.decode(other.get(ref.key)).files[0]
        assert file.path == "model.safetensors"
        content = other.get(ref.key.removesuffix(keys.MANIFEST) + file.path)
        refuse(replace(manifest, files=(*manifest.files, file)), {file.path: content}, memory=False)

    def test_a_surplus_weight_file_that_is_none(
        self, manifest: Manifest, refuse: Callable[..., None]
    ) -> None:
        content = b"\xff" * 64
        file = AnchorFile("x.safetensors", 64, hashlib.sha256(content).hexdigest())
        refuse(replace(manifest, files=(*manifest.files, file)), {file.path: content})

    def test_a_manifest_of_something_else(
        self, manifest: Manifest, refuse: Callable[..., None]
    ) -> None:
        refuse(replace(manifest, run="0" * 32))
        refuse(replace(manifest, version=1))
        refuse(replace(manifest, digest="0" * 64))

    def test_a_manifest_under_a_key_that_is_no_anchors(
        self, manifest: Manifest, refuse: Callable[..., None]
    ) -> None:
        for prefix in ("elsewhere/", keys.anchor_prefix(1, "0" * 32), "deltas/"):
            refuse(manifest, key=lambda _, prefix=prefix: prefix)

    def test_a_manifest_reference_of_absurd_size(self, bucket: MemoryBucket) -> None:
        ref = Chain(bucket).read(0).payloads[0]
        recommit(bucket, 0, payloads=(replace(ref, size=1 << 50),))
        with pytest.raises(CorruptPayload):
            Replica(bucket, MemoryMirror()).sync()

    def test_the_honest_manifest_is_accepted(
        self, kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, manifest: Manifest
    ) -> None:
        """The tests above would pass as well if everything were refused."""
        ref = Chain(bucket).read(0).payloads[0]
        recommit(bucket, 0, payloads=(ref,))
        mirror = MemoryMirror()
        Replica(bucket, mirror).sync(0)
        assert kit.held(mirror) == states[0].raw


class TestHostileRuns:
    def test_a_schema_too_large_for_any_memory_is_an_error_before_it_is_allocated(
        self, bucket: MemoryBucket, tmp_path: Path
    ) -> None:
        huge = Schema((TensorSpec("w", DTYPES["BF16"], (1 << 47,)),))
        run = replace(Chain(bucket).read_run(), schema=huge)
        manifest = Manifest(
            run.run, 0, "0" * 64, (AnchorFile("model.safetensors", huge.nbytes + 100, "0" * 64),)
        ).encode()
        sha256 = hashlib.sha256(manifest).hexdigest()
        prefix = keys.anchor_prefix(0, sha256)
        bucket.put(keys.RUN, run.encode())
        bucket.put(prefix + keys.MANIFEST, manifest)
        bucket.put(prefix + "model.safetensors", b"short")
        ref = PayloadRef(prefix + keys.MANIFEST, len(manifest), sha256)
        recommit(bucket, 0, parent=run.hash, digest="0" * 64, payloads=(ref,))
        for mirror in (MemoryMirror(), tmp_path / "mirror"):
            with Replica(bucket, mirror) as replica, pytest.raises(ThinwireError):
                replica.sync(0)

    def test_run_records_that_make_no_sense(self, bucket: MemoryBucket) -> None:
        body = open_record("run", bucket.get(keys.RUN))
        tensors = body["schema"]["tensors"]
        wrong: list[dict[str, Any]] = [
            {"schema": []},
            {"schema": {"tensors": tensors}},
            {"schema": {"aliases": {}, "tensors": [["w", "BF16", [-1]]]}},
            {"schema": {"aliases": {}, "tensors": [["w", "BF17", [1]]]}},
            {"schema": {"aliases": {}, "tensors": [["w", "BF16", [1 << 62, 1 << 62]]]}},
            {"schema": {"aliases": {}, "tensors": [tensors[0], tensors[0]]}},
            {"schema": {"aliases": {"x": "nowhere"}, "tensors": tensors}},
            {"run": "short"},
            {"base": 5},
        ]
        for change in wrong:
            bucket.put(keys.RUN, seal_record("run", {**body, **change}))
            with pytest.raises(CorruptPayload):
                Replica(bucket, MemoryMirror()).sync()

    def test_a_run_record_with_keys_of_a_newer_minor_version_is_read(
        self, kit: SimpleNamespace, states: list[Any]
    ) -> None:
        bucket = MemoryBucket()
        publisher = Publisher(FaultyBucket(bucket), states[0].source, base="somewhere")
        run = seal_record("run", {**open_record("run", bucket.get(keys.RUN)), "colour": "blue"})
        bucket.put(keys.RUN, run)
        commit = Chain(bucket).read(0)
        bucket.put(keys.commit_key(0), replace(commit, parent=RunInfo.decode(run).hash).encode())
        assert publisher.version == 0
        mirror = MemoryMirror()
        with pytest.raises(Misuse, match="not in the bucket"):  # it got as far as the base
            Replica(bucket, mirror).sync()


def test_key_not_found_is_the_only_not_yet(bucket: MemoryBucket) -> None:
    chain = Chain(FaultyBucket(bucket).fail("head", error=AccessDenied).fail("head"))
    for error in (AccessDenied, BucketUnavailable):
        with pytest.raises(error):
            chain.exists(1)
    assert chain.exists(1)
    assert not chain.exists(9)
    with pytest.raises(KeyNotFound):
        chain.read(9)
