"""``thinwire doctor``: sound buckets, every kind of unsound one, and nothing left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.bucket import Bucket, Capabilities, LocalBucket, MemoryBucket, WrappedBucket
from thinwire.doctor import Examination, examine
from thinwire.doctor.estimate import PUBLISH, PULL, Prices, Speed, estimate
from thinwire.doctor.suite import run_suite
from thinwire.doctor.urls import missing_sibling, nested
from thinwire.errors import (
    AccessDenied,
    BucketNotFound,
    BucketUnavailable,
    KeyNotFound,
    ThinwireError,
)
from thinwire.testing import FaultyBucket

SMALL = 100_000
STEPS = [
    "what it claims",
    "write and read",
    "missing key",
    "missing bucket",
    "create twice",
    "create race",
    "replace",
    "replace under readers",
    "notifications",
    "list",
    "delete",
    "latency",
    "throughput",
    "clean up",
]


def failed(found: Examination) -> dict[str, ThinwireError]:
    return {row.step: row.error for row in found.failed if row.error is not None}


# --- sound buckets -------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_sound_bucket(cli: Any, tmp_path: Path, where: str) -> None:
    url = str(tmp_path / "bucket") if where == "folder" else "memory://"
    document = cli.json("doctor", url, "--size", "1MB")
    assert document["ok"] is True
    assert [row["step"] for row in document["findings"]] == STEPS
    assert all(row["error"] is row["hint"] is None for row in document["findings"])
    observed = document["capabilities"]["observed"]
    for name, can in document["capabilities"]["claimed"].items():
        assert observed[name] == can or (not can and observed[name] is None), name
    for name in ("read_after_write", "read_after_replace", "list_after_write", "delete"):
        assert observed[name] is True
    assert document["missing_key"] == "KeyNotFound"
    assert document["missing_bucket"] == ("BucketNotFound" if where == "folder" else None)
    assert document["latency_s"].keys() == {"put", "create", "get", "head", "list"}
    assert min(document["latency_s"].values()) > 0
    assert document["throughput"].keys() == {"bytes", "up", "down"}
    assert document["conformance"] is None
    assert list(tmp_path.iterdir()) == [], "nothing is left, not even a folder"


def test_other_objects_are_left_alone(cli: Any, bucket: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()}

    before = files()
    (bucket / "doctor").mkdir()
    (bucket / "doctor" / "notes").write_bytes(b"mine")
    cli("doctor", bucket, "--size", SMALL)
    assert files() == {**before, bucket / "doctor" / "notes": b"mine"}
    assert [path.name for path in (bucket / "doctor").iterdir()] == ["notes"]


def test_an_empty_folder_stays(cli: Any, tmp_path: Path) -> None:
    cli("doctor", tmp_path, "--size", SMALL)
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_text(cli: Any, tmp_path: Path) -> None:
    said = cli("doctor", tmp_path, "--size", SMALL, "--model-size", "2GB", "--price-get", 0.1)
    out = said.stdout
    assert out.startswith(tmp_path.as_uri() + "\nok   what it claims: create_only")
    assert "FAIL" not in out
    assert "hint" not in out
    assert "2 GB bf16 checkpoint" in out
    assert "4.5 MB" in out  # 0.5 % of a billion elements, 0.9 bytes each
    assert "without put, egress_gb" in out


def test_the_conformance_suite(cli: Any, tmp_path: Path) -> None:
    document = cli.json("doctor", tmp_path / "bucket", "--size", SMALL, "--full")
    counts = document["conformance"]
    assert (counts["failed"], counts["skipped"], counts["failures"]) == (0, 0, [])
    assert counts["passed"] > 100
    assert list(tmp_path.iterdir()) == []


def test_without_pytest_it_says_what_to_install(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    document = cli.json("doctor", tmp_path, "--size", SMALL, "--full", status=2)
    (row,) = [row for row in document["findings"] if not row["ok"]]
    assert (row["step"], row["error"]) == ("conformance suite", "Misuse")
    assert row["hint"] == "pip install pytest"


def test_an_unsound_bucket_fails_the_suite(tmp_path: Path) -> None:
    """A folder that cannot be made because a file is in its way."""
    (tmp_path / "file").write_bytes(b"")
    counts = run_suite(str(tmp_path / "file" / "bucket"), None)
    assert counts["failed"] > 40
    assert counts["skipped"] == 5
    assert {row["test"] for row in counts["failures"]} >= {"test_put_replaces"}
    assert all(row["message"] for row in counts["failures"])


# --- unsound ones --------------------------------------------------------------------------


class Replacing(WrappedBucket):
    """Says create-only and replaces."""

    def create(self, key: str, data: Any) -> None:
        self.inner.put(key, data)


class Racing(WrappedBucket):
    """Looks, then writes: what a store without create-only comes to."""

    promise = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_only=self.promise, atomic_replace=True)

    def create(self, key: str, data: Any) -> None:
        exists = True
        try:
            self.inner.head(key)
        except KeyNotFound:
            exists = False
        time.sleep(0.02)
        if exists:
            self.inner.create(key, data)
        self.inner.put(key, data)


class Promising(Racing):
    promise = True


class Torn(WrappedBucket):
    """Readers see halves while an object is replaced."""

    def put(self, key: str, data: Any) -> None:
        content = b"".join(bytes(part) for part in ([data] if isinstance(data, bytes) else data))
        self.inner.put(key, content[: len(content) // 2])
        time.sleep(0.01)
        self.inner.put(key, content)


class Late(WrappedBucket):
    """Listings do not show the newest key."""

    def list(self, prefix: str = "") -> Iterator[Any]:
        yield from sorted(self.inner.list(prefix), key=lambda info: info.key)[:-1]


class Keeping(WrappedBucket):
    """Deletes nothing."""

    def delete(self, key: str) -> None:
        return


class Stale(WrappedBucket):
    """Reads go to what was there first."""

    def __init__(self, inner: Bucket) -> None:
        super().__init__(inner)
        self.first: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        return self.first.setdefault(key, self.inner.get(key))


class Silent(WrappedBucket):
    """Claims notifications, gives none."""

    def watch(self, prefix: str, wake: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize(
    ("kind", "steps", "capability"),
    [
        (Replacing, {"create twice"}, "create_only"),
        (Promising, {"create race"}, "create_only"),
        (Torn, {"replace under readers"}, "atomic_replace"),
        (Late, {"list"}, "list_after_write"),
        (Keeping, {"delete"}, "delete"),
        (Stale, {"replace"}, "read_after_replace"),
        (Silent, {"notifications"}, "notifications"),
    ],
)
def test_what_is_unsound_is_found(
    kind: type[WrappedBucket],
    steps: set[str],
    capability: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("thinwire.doctor.probe._WATCH_S", 0.1)
    found = examine(kind(MemoryBucket()), size=SMALL, rounds=1)
    assert failed(found).keys() >= steps
    assert len(failed(found)) <= 2
    assert found.observed[capability] is False
    assert found.speed is not None, "later steps still ran"


def test_what_a_store_does_not_claim_is_no_failure() -> None:
    found = examine(Racing(MemoryBucket()), size=SMALL, rounds=1)
    assert failed(found) == {}
    assert found.observed["create_only"] is False
    (race,) = [row.detail for row in found.findings if row.step == "create race"]
    assert "let one trainer write" in race


def test_bytes_that_come_back_changed() -> None:
    faulty = FaultyBucket(MemoryBucket()).corrupt("*/large", at=77_777)
    errors = failed(examine(faulty, size=SMALL, rounds=1))
    assert errors.keys() == {"throughput"}
    assert "those from 0 on come back changed" in str(errors["throughput"])


def test_a_missing_key_that_looks_forbidden() -> None:
    faulty = FaultyBucket(MemoryBucket()).fail("head", "*/missing", error=AccessDenied, times=None)
    found = examine(faulty, size=SMALL, rounds=1)
    errors = failed(found)
    assert errors.keys() == {"missing key"}
    assert "allow listing" in errors["missing key"].hint
    assert found.missing_key == "AccessDenied"


def test_a_bucket_that_may_only_be_read() -> None:
    faulty = FaultyBucket(MemoryBucket())
    for operation in ("put", "create", "delete"):
        faulty.fail(operation, error=AccessDenied, times=None)  # type: ignore[arg-type]
    found = examine(faulty, size=SMALL, rounds=1)
    assert list(failed(found)) == ["write and read", "clean up"]
    assert found.missing_key == "KeyNotFound"
    assert found.latency == {}
    assert found.speed is None
    assert found.estimate(10**9, Prices())[0]["publish_s"] is None


@pytest.mark.parametrize(
    ("error", "status"), [(AccessDenied, 2), (BucketNotFound, 2), (BucketUnavailable, 3)]
)
def test_the_status_is_that_of_the_first_failure(
    cli: Any, monkeypatch: pytest.MonkeyPatch, error: type[ThinwireError], status: int
) -> None:
    monkeypatch.setattr("thinwire.doctor.PATIENCE_S", 0.2)
    faulty = FaultyBucket(MemoryBucket()).fail("put", error=error, times=None)
    monkeypatch.setattr("thinwire.bucket._OPENERS", {"s3": lambda url: faulty})
    document = cli.json("doctor", "s3://bucket/prefix", status=status)
    assert document["ok"] is False
    (row,) = [row for row in document["findings"] if row["step"] == "write and read"]
    assert row["error"] == error.__name__
    assert row["hint"] == error.default_hint
    out = cli("doctor", "s3://bucket/prefix", status=status).stdout
    assert f"FAIL write and read: {error.__name__}: " in out
    assert f"hint: {error.default_hint}" in out


def test_a_store_that_replaces_is_for_a_person_to_look_at(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.bucket._OPENERS", {"s3": lambda url: Replacing(MemoryBucket())})
    cli.json("doctor", "s3://bucket", "--size", SMALL, status=5)


# --- nothing is left -----------------------------------------------------------------------


def test_a_bug_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    inner = MemoryBucket()
    monkeypatch.setattr("thinwire.doctor.throughput", fail)
    with pytest.raises(ZeroDivisionError):
        examine(inner, size=SMALL, rounds=1)
    assert list(inner.list()) == []


def test_a_write_whose_response_was_lost_is_removed() -> None:
    inner = MemoryBucket()
    found = examine(FaultyBucket(inner).fail("put", after=True), size=SMALL, rounds=1)
    # open_bucket tries once more
    assert failed(found) == {}
    assert list(inner.list()) == []


def test_what_could_not_be_removed_is_said() -> None:
    inner = MemoryBucket()
    faulty = FaultyBucket(inner).fail("delete", "*/race-0", error=AccessDenied, times=None)
    errors = failed(examine(faulty, size=SMALL, rounds=1))
    assert errors.keys() == {"clean up"}
    (left,) = inner.list()
    assert left.key.startswith("doctor/")
    assert f"up to 1 objects are left under {left.key[:24]}" in str(errors["clean up"])


def test_ctrl_c_leaves_nothing(tmp_path: Path, process: Callable[..., Any]) -> None:
    bucket = tmp_path / "bucket"
    run = process("doctor", bucket, "--size", "400MB")
    deadline = time.monotonic() + 30
    # with the first object written, most of the work is still to come
    while not list(bucket.glob("doctor/*/*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, out, err) == (130, "", "interrupted\n")
    assert not bucket.exists()


# --- arithmetic and addresses --------------------------------------------------------------


def test_the_estimate() -> None:
    speed = Speed(dict.fromkeys(("put", "create", "get", "head", "list"), 0.1), up=1e6, down=1e7)
    low, high = estimate(2_000_000_000, speed, Prices())
    assert (low["payload_bytes"], high["payload_bytes"]) == (4_500_000, 9_000_000)
    assert low["publish_s"] == pytest.approx(4.501 + 4 * 0.1)
    assert low["pull_s"] == pytest.approx(0.4501 + 4 * 0.1)
    assert low["requests"] == {"publish": 4, "pull": 4}
    assert low["cost"] is None


def test_the_cost() -> None:
    (low, _) = estimate(2_000_000_000, None, Prices(put=5.0, get=0.4, egress_gb=0.09))
    assert low["cost"]["publisher"] == pytest.approx(2 * 5.0 + 2 * 0.4)
    assert low["cost"]["replica"] == pytest.approx(4 * 0.4 + 4.501 * 0.09)
    assert low["cost"]["without"] == []


def test_the_requests_are_those_that_publisher_and_follower_make() -> None:
    import numpy as np

    from thinwire import Publisher, Replica
    from thinwire.bucket import Metrics, open_bucket
    from thinwire.dtypes import dtype
    from thinwire.mirror import MemoryMirror
    from thinwire.weights import FlatTensor

    store = MemoryBucket()
    sides = {"publish": Metrics(), "pull": Metrics()}
    bits = np.arange(10_000, dtype="<u2")
    source = [("w", FlatTensor(bits, dtype("BF16"), (10_000,)))]
    versions = 8
    with Publisher(open_bucket(store, metrics=sides["publish"]), source) as publisher:
        replica = Replica(open_bucket(store, metrics=sides["pull"]), MemoryMirror())
        updates = replica.follow(poll=60.0)
        next(updates)
        for metrics in sides.values():
            metrics.reset()
        for version in range(versions):
            bits[version * 100 : version * 100 + 50] += 1
            publisher.publish(source).result()
            next(updates)
    counted = {
        side: {name: row["calls"] / versions for name, row in metrics.snapshot().items()}
        for side, metrics in sides.items()
    }
    # records are streamed, to bound their size: one GET each
    publish = {name: number for name, number in PUBLISH.items() if name != "get"}
    assert counted["publish"] == {**publish, "stream": PUBLISH["get"]}
    assert counted["pull"].keys() == {"head", "stream"}
    assert counted["pull"]["head"] == pytest.approx(PULL["head"], abs=0.5)
    assert counted["pull"]["stream"] == pytest.approx(PULL["get"], abs=0.25)


@pytest.mark.parametrize(
    ("url", "inside", "missing"),
    [
        ("s3://b/p/?region=x&a=b", "s3://b/p/in?region=x&a=b", "s3://new/?region=x&a=b"),
        ("s3://b", "s3://b/in", "s3://new/"),
        ("gs://b/p", "gs://b/p/in", "gs://new/"),
        ("az://c/p?account=x", "az://c/p/in?account=x", "az://new/?account=x"),
        ("hf://buckets/org/name/p", "hf://buckets/org/name/p/in", "hf://buckets/org/new"),
        ("memory://x", "memory://x/in", None),
        ("memory://", "memory://in", None),
        ("/data/run?1/", "/data/run?1/in", "/data/new"),
    ],
)
def test_addresses(url: str, inside: str, missing: str | None) -> None:
    assert nested(url, "in") == inside
    assert missing_sibling(url, "new") == missing


def test_a_bucket_that_was_handed_over_stays_open() -> None:
    class Closing(MemoryBucket):
        closed = False

        def close(self) -> None:
            self.closed = True

    bucket = Closing()
    assert failed(examine(bucket, size=SMALL, rounds=1)) == {}
    assert not bucket.closed


def test_a_local_bucket_may_be_given_as_such(tmp_path: Path) -> None:
    found = examine(LocalBucket(tmp_path / "bucket"), size=SMALL, rounds=1)
    assert (failed(found), found.missing_bucket) == ({}, "BucketNotFound")
