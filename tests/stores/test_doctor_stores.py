"""``thinwire doctor`` and ``thinwire bench bucket`` at a real S3 server."""

from __future__ import annotations

import json
from typing import Any

import click.testing
import pytest

from servers.seaweed import SeaweedServer
from thinwire.bucket import open_bucket
from thinwire.cli import main


@pytest.fixture
def url(seaweed: SeaweedServer, credentials: pytest.MonkeyPatch) -> str:
    for name, value in seaweed.environment().items():
        credentials.setenv(name, value)
    return seaweed.bucket_url(seaweed.make_bucket(), "runs/one")


def called(*args: object, status: int = 0) -> Any:
    result = click.testing.CliRunner().invoke(main, [*map(str, args), "--json"])
    assert result.exit_code == status, (result.exit_code, result.stdout, result.stderr)
    return json.loads(result.stdout)


def left(url: str) -> list[str]:
    with open_bucket(url) as bucket:
        return [info.key for info in bucket.list()]


def test_a_sound_bucket(url: str) -> None:
    document = called("doctor", url, "--size", "8MB")
    assert document["ok"] is True
    capabilities = document["capabilities"]
    assert capabilities["claimed"]["create_only"] is True
    assert capabilities["observed"] == {
        "create_only": True,
        "atomic_replace": True,
        "notifications": None,
        "read_after_write": True,
        "read_after_replace": True,
        "list_after_write": True,
        "delete": True,
    }
    assert document["missing_key"] == "KeyNotFound"
    assert document["missing_bucket"] == "BucketNotFound"
    assert document["throughput"]["up"] > 1e6
    assert left(url) == []


def test_a_missing_bucket(url: str) -> None:
    missing = url.replace("s3://", "s3://no-such-")
    document = called("doctor", missing, "--size", "1MB", status=2)
    failures = {row["step"]: row["error"] for row in document["findings"] if not row["ok"]}
    assert failures == {"write and read": "BucketNotFound", "missing key": "BucketNotFound"}


def test_credentials_that_may_only_read(
    url: str, seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bucket(url) as bucket:
        bucket.put("run.json", b"{}")
    for name, value in seaweed.readonly.items():
        monkeypatch.setenv(name, value)
    document = called("doctor", url, "--size", "1MB", status=2)
    failures = {row["step"]: row["error"] for row in document["findings"] if not row["ok"]}
    assert failures["write and read"] == "AccessDenied"
    assert document["missing_key"] == "KeyNotFound"
    assert document["latency_s"] == {}
    assert left(url) == ["run.json"]


def test_a_server_that_is_gone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.doctor.PATIENCE_S", 0.5)
    place, _, query = url.partition("?")
    gone = f"{place}?{query.replace('127.0.0.1', '127.0.0.2')}"
    document = called("doctor", gone, "--size", "1MB", status=3)
    errors = {row["error"] for row in document["findings"] if not row["ok"]}
    assert errors == {"BucketUnavailable"}


def test_the_benchmark_compares_with_plain_obstore(url: str) -> None:
    document = called("bench", "bucket", url, "--size", "20MB", "--versions", 3)
    for way in ("put", "get"):
        assert document[way]["ratio"] == pytest.approx(
            document[way]["mb_per_s"] / document[way]["obstore_mb_per_s"]
        )
    assert document["publish"]["requests"] == {"create": 2, "head": 1, "stream": 1}
    assert left(url) == []
