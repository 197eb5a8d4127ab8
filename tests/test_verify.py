"""Full checks: clean runs and mirrors pass; any flipped byte, anywhere, is found and named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from thinwire.bucket import LocalBucket, MemoryBucket
from thinwire.bucket.base import Bucket
from thinwire.disk import DiskMirror
from thinwire.errors import AccessDenied, BucketUnavailable, MirrorCorrupt, Misuse, RunNotFound
from thinwire.log import keys
from thinwire.log.commit import Commit
from thinwire.mirror_folder import read_held
from thinwire.publisher import Publisher
from thinwire.replica import Replica
from thinwire.verify import verify_bucket, verify_mirror

FLIPS = 4


def tensors(step: int) -> dict[str, np.ndarray]:
    values = np.random.default_rng(3)
    found = {
        "a.weight": values.standard_normal((40, 8)).astype("f2"),
        "b.weight": values.standard_normal((64, 4)).astype("f2"),
        "c": np.arange(5),
    }
    for done in range(step):
        found["a.weight"].reshape(-1).view("u2")[done : 100 + done : 10] += 1
        found["b.weight"].reshape(-1).view("u2")[done] += 3
    return found


def publish(bucket: Bucket, assets: Path, steps: int = 4) -> None:
    with Publisher(bucket, tensors(0), assets=assets, max_shard=700) as publisher:
        for step in range(1, steps):
            publisher.publish(tensors(step), step=step).result()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bucket``, ``mirror`` (closed) and ``crashed``: left by a kill, its journal full."""
    root = tmp_path_factory.mktemp("made")
    (root / "assets").mkdir()
    (root / "assets" / "config.json").write_text('{"model_type": "tiny", "layers": 2}\n')
    bucket = LocalBucket(root / "bucket")
    publish(bucket, root / "assets")
    with Replica(bucket, root / "mirror") as replica:
        replica.sync()
        shutil.copytree(root / "mirror", root / "crashed")
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        return Path(shutil.copytree(made / name, tmp_path / name))

    return make


def line_of(path: Path, number: int) -> range:
    """Byte positions of a record's line, newline included."""
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    return range(first) if number == 1 else range(first, len(data))


def flips(path: Path, where: range, count: int = FLIPS) -> Iterator[int]:
    """Damage a file at its ends and at random positions, one at a time."""
    data = path.read_bytes()
    chosen = [where[0], where[-1]]
    chosen += random.Random(str(path.name)).choices(where, k=count)
    for at in chosen:
        damaged = bytearray(data)
        damaged[at] ^= 1 << random.Random(at).randrange(8)
        path.write_bytes(damaged)
        yield at
    path.write_bytes(data)


# --- buckets -------------------------------------------------------------------------------


def test_a_sound_bucket_has_no_problems(made: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    report = verify_bucket(LocalBucket(made / "bucket"), progress=lambda *call: calls.append(call))
    assert report.ok
    assert (report.head, report.replayed) == (3, 3)
    assert (report.orphans, report.skipped) == ([], [])
    files = [p for p in (made / "bucket").rglob("*") if p.is_file()]
    assert report.objects == len(files)
    assert report.bytes == sum(p.stat().st_size for p in files)
    assert {what for what, _, _ in calls} == {"check commits", "check anchor", "check payloads"}
    assert all(0 <= done <= total for _, done, total in calls)


BUCKET_FILES = {
    "run.json line 1": ("run.json", 1),
    "run.json line 2": ("run.json", 2),
    "first commit line 1": ("commits/0000000000.json", 1),
    "first commit line 2": ("commits/0000000000.json", 2),
    "commit line 1": ("commits/0000000002.json", 1),
    "commit line 2": ("commits/0000000002.json", 2),
    "head line 1": ("commits/0000000003.json", 1),
    "payload": ("deltas/0000000002-*", 0),
    "last payload": ("deltas/0000000003-*", 0),
    "shard": ("anchors/*/model-00001-of-*", 0),
    "index": ("anchors/*/model.safetensors.index.json", 0),
    "asset": ("anchors/*/config.json", 0),
    "manifest": ("anchors/*/manifest.json", 0),
}


@pytest.mark.parametrize("what", BUCKET_FILES)
def test_a_flipped_byte_in_a_bucket_is_found_and_named(
    copy: Callable[[str], Path], what: str
) -> None:
    pattern, line = BUCKET_FILES[what]
    root = copy("bucket")
    path = next(root.glob(pattern))
    where = line_of(path, line) if line else range(path.stat().st_size)
    key = path.relative_to(root).as_posix()
    for at in flips(path, where):
        report = verify_bucket(LocalBucket(root))
        assert not report.ok, f"{key}: byte {at}"
        assert key in [problem.subject for problem in report.problems], f"{key}: byte {at}"
        assert report.orphans == []
    assert verify_bucket(LocalBucket(root)).ok


@pytest.mark.parametrize(
    "pattern", ["run.json", "commits/0000000001.json", "deltas/0000000001-*", "anchors/*/con*"]
)
def test_a_missing_object_is_named(copy: Callable[[str], Path], pattern: str) -> None:
    root = copy("bucket")
    path = next(root.glob(pattern))
    path.unlink()
    report = verify_bucket(LocalBucket(root))
    assert [p.subject for p in report.problems] == [path.relative_to(root).as_posix()]


def test_all_damage_is_found_in_one_pass(copy: Callable[[str], Path]) -> None:
    root = copy("bucket")
    patterns = ["anchors/*/config.json", "anchors/*/model-00002*", "deltas/*1-*", "deltas/*3-*"]
    damaged = [next(root.glob(pattern)) for pattern in patterns]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    report = verify_bucket(LocalBucket(root))
    named = sorted(problem.subject for problem in report.problems)
    assert named == sorted(path.relative_to(root).as_posix() for path in damaged)
    assert report.replayed is None
    assert "versions 0 to 3" in report.skipped[0]


def test_a_missing_stretch_of_commits_is_one_problem(copy: Callable[[str], Path]) -> None:
    root = copy("bucket")
    for version in (1, 2):
        (root / keys.commit_key(version)).unlink()
    report = verify_bucket(LocalBucket(root))
    assert [p.subject for p in report.problems] == [keys.commit_key(1)]
    assert "up to 2" in report.problems[0].message
    assert (report.head, report.replayed) == (3, 0)


def forge(root: Path, at: int, **fields: object) -> None:
    """Replace a commit by one that is sealed well and says something else."""
    path = root / keys.commit_key(at)
    commit = Commit.decode(path.read_bytes())
    path.write_bytes(Commit(**{**commit.__dict__, **fields}).encode())


def test_a_forged_digest_is_found_by_replaying(copy: Callable[[str], Path]) -> None:
    root = copy("bucket")
    forge(root, 3, digest="0" * 64)
    report = verify_bucket(LocalBucket(root))
    assert [p.subject for p in report.problems] == [keys.commit_key(3)]
    assert "state digest" in report.problems[0].message
    assert report.replayed == 2


@pytest.mark.parametrize("field", ["parent", "run", "version"])
def test_a_commit_of_another_history_is_found(copy: Callable[[str], Path], field: str) -> None:
    root = copy("bucket")
    forge(root, 2, **{field: {"parent": "0" * 64, "run": "0" * 32, "version": 1}[field]})
    report = verify_bucket(LocalBucket(root))
    assert keys.commit_key(2) in [p.subject for p in report.problems]
    assert report.replayed == 1


def test_what_no_commit_names_is_information(copy: Callable[[str], Path]) -> None:
    root = copy("bucket")
    orphan = root / keys.delta_key(2, "f" * 64)
    orphan.write_bytes(b"left by a crash")
    (root / keys.delta_key(4, "f" * 64)).write_bytes(b"on its way to version 4")
    report = verify_bucket(LocalBucket(root))
    assert report.ok
    assert report.orphans == [orphan.relative_to(root).as_posix()]


def test_a_run_without_a_version_is_sound(copy: Callable[[str], Path]) -> None:
    root = copy("bucket")
    shutil.rmtree(root / "commits")
    report = verify_bucket(LocalBucket(root))
    assert report.ok
    assert report.head is None


def test_no_run_and_no_answer_are_errors_not_damage(made: Path) -> None:
    with pytest.raises(RunNotFound):
        verify_bucket(MemoryBucket())

    class Silent(LocalBucket):
        def stream(self, key: str, *, chunk: int = 1) -> Iterator[bytes]:
            raise BucketUnavailable("no answer")

    with pytest.raises(BucketUnavailable):
        verify_bucket(Silent(made / "bucket"))


def test_a_store_that_may_not_be_listed_is_checked_without_orphans(made: Path) -> None:
    class Unlisted(LocalBucket):
        def list(self, prefix: str = "") -> Iterator[object]:  # type: ignore[override]
            raise AccessDenied("may not list")

    report = verify_bucket(Unlisted(made / "bucket"))
    assert (report.ok, report.head, report.replayed) == (True, 3, 3)
    assert "orphans" in report.skipped[0]


# --- mirrors -------------------------------------------------------------------------------


def test_a_sound_mirror_has_no_problems(made: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    report = verify_mirror(made / "mirror", progress=lambda *call: calls.append(call))
    assert (report.ok, report.version, report.live) == (True, 3, False)
    assert report.files == len([p for p in (made / "mirror").iterdir() if p.is_file()])
    assert calls[-1][1] == calls[-1][2] > 0


def header_of(path: Path) -> range:
    return range(8 + int.from_bytes(path.read_bytes()[:8], "little"))


MIRROR_FILES = {
    "shard header": "model-00001-of-*",
    "shard data": "model-00002-of-*",
    "index": "model.safetensors.index.json",
    "asset": "config.json",
    "state line 1": ".thinwire/state.json",
    "state line 2": ".thinwire/state.json",
}


@pytest.mark.parametrize("kind", ["mirror", "crashed"])
@pytest.mark.parametrize("what", MIRROR_FILES)
def test_a_flipped_byte_in_a_mirror_is_found(
    copy: Callable[[str], Path], kind: str, what: str
) -> None:
    folder = copy(kind)
    path = next(folder.glob(MIRROR_FILES[what]))
    where = {
        "header": header_of,
        "data": lambda path: range(header_of(path).stop, path.stat().st_size),
        "1": lambda path: line_of(path, 1),
        "2": lambda path: line_of(path, 2),
    }.get(what.split()[-1], lambda path: range(path.stat().st_size))(path)
    # replaying a journal heals what it overwrites, so a crashed mirror's data may be whole again
    untouched = (
        range(where.stop - 2, where.stop) if (kind, what) == ("crashed", "shard data") else where
    )
    keep = folder.with_name("keep")
    shutil.copytree(folder, keep)
    for at in flips(path, untouched):
        report = verify_mirror(folder)
        assert not report.ok, f"{path.name}: byte {at}"
        said = " ".join(f"{p.subject} {p.message}" for p in report.problems)
        assert path.name in said or what.startswith("shard") or what == "index"
        if kind == "crashed":  # opening it may have replayed the journal: start over
            damaged = path.read_bytes()
            shutil.rmtree(folder)
            shutil.copytree(keep, folder)
            path.write_bytes(damaged)


def test_a_flipped_byte_in_a_journal_is_found(copy: Callable[[str], Path]) -> None:
    folder = copy("crashed")
    keep = folder.with_name("keep")
    shutil.copytree(folder, keep)
    journal = folder / ".thinwire" / "journal"
    size = journal.stat().st_size
    assert size > 1000
    for at in [0, 7, size - 1, *random.Random(5).sample(range(size), 12)]:
        shutil.rmtree(folder)
        shutil.copytree(keep, folder)
        data = bytearray(journal.read_bytes())
        data[at] ^= 0x10
        journal.write_bytes(data)
        assert not verify_mirror(folder).ok, f"byte {at}"


def test_a_crashed_mirror_is_completed_by_its_journal(
    copy: Callable[[str], Path], made: Path
) -> None:
    folder = copy("crashed")
    shard = next(folder.glob("model-00001-of-*"))
    whole = shard.read_bytes()
    stop = header_of(shard).stop
    shard.write_bytes(whole[:stop] + b"\0\0" + whole[stop + 2 :])  # half-way through version 1
    report = verify_mirror(folder)
    assert (report.ok, report.version) == (True, 3)
    assert shard.read_bytes() == whole


def test_all_damage_in_a_mirror_is_found_in_one_pass(copy: Callable[[str], Path]) -> None:
    folder = copy("mirror")
    names = {"config.json", *(p.name for p in folder.glob("model-*"))}
    for name in names:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    report = verify_mirror(folder)
    assert {Path(p.subject).name for p in report.problems} == names
    assert len(names) == 3


@pytest.mark.parametrize("damage", ["none", "model-00001-of-*", "config.json", ".thinwire/journal"])
def test_a_mirror_that_is_being_written_is_checked_read_only(
    made: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "live"
    with Replica(LocalBucket(made / "bucket"), folder) as replica:
        replica.sync(2)
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        if damage != "none":
            path = next(folder.glob(damage))
            path.write_bytes(before[path][:-1] + bytes([before[path][-1] ^ 1]))
        report = verify_mirror(folder)
        assert report.live
        assert report.ok == (damage == "none")
        for path, data in before.items():
            if damage == "none":
                assert path.read_bytes() == data
            path.write_bytes(data)
        # the writer goes on: nothing was left mapped or locked
        assert replica.sync()[-1].version == 3


def test_what_is_not_a_mirror_is_misuse(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="not a mirror"):
        verify_mirror(tmp_path)
    DiskMirror(tmp_path / "empty").close()
    with pytest.raises(Misuse, match="no version yet"):
        verify_mirror(tmp_path / "empty")


def test_half_an_entry_is_no_damage_only_after_a_crash(copy: Callable[[str], Path]) -> None:
    folder = copy("crashed")
    assert read_held(folder).held.version == 3
    with (folder / ".thinwire" / "journal").open("ab") as journal:
        journal.write(b"thinwirj, cut off")
    with pytest.raises(MirrorCorrupt, match="torn or damaged"):
        read_held(folder)
    assert read_held(folder, torn=True).held.version == 3
    assert verify_mirror(folder).ok
