"""``thinwire verify``: what it prints, and with which status it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.bucket import LocalBucket
from thinwire.errors import BucketUnavailable


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_sound_bucket(cli, bucket) -> None:
    result = cli("verify", bucket)
    assert "versions 0 to 2" in result.stdout
    assert "all good" in result.stdout
    assert result.stderr == ""
    document = cli.json("verify", bucket)
    assert document.keys() == {
        *("kind", "ok", "url", "run", "head", "replayed", "objects", "bytes"),
        *("problems", "orphans", "skipped"),
    }
    assert (document["kind"], document["ok"], document["replayed"]) == ("bucket", True, 2)
    assert document["problems"] == document["orphans"] == document["skipped"] == []


@pytest.mark.parametrize(
    "pattern",
    ["run.json", "commits/*1.json", "deltas/*", "anchors/*/model.safetensors", "anchors/*/tok*"],
)
def test_a_damaged_bucket_ends_with_status_4(cli, bucket, pattern) -> None:
    path = next(bucket.glob(pattern))
    flip(path)
    result = cli("verify", bucket, status=4)
    assert f"damaged: {path.relative_to(bucket)}" in result.stdout
    assert "all good" not in result.stdout
    assert result.stderr.startswith(f"error: {bucket}: 1 problem\nhint: ")
    document = cli.json("verify", bucket, status=4)
    assert not document["ok"]
    assert [p["subject"] for p in document["problems"]] == [str(path.relative_to(bucket))]


def test_a_sound_and_a_damaged_mirror(cli, bucket, tmp_path) -> None:
    mirror = tmp_path / "mirror"
    cli("pull", bucket, mirror)
    assert "version 2" in cli("verify", mirror).stdout
    document = cli.json("verify", mirror)
    assert document.keys() == {
        *("kind", "ok", "folder", "run", "version", "files", "bytes", "live", "problems"),
    }
    assert (document["kind"], document["ok"], document["version"]) == ("mirror", True, 2)
    flip(mirror / "tokenizer.json")
    flip(mirror / "model.safetensors")
    result = cli("verify", mirror, status=4)
    assert "tokenizer.json" in result.stdout
    assert "2 problems" in result.stderr
    assert "fresh folder" in result.stderr


def test_orphans_are_said_and_no_error(cli, bucket) -> None:
    orphan = bucket / "deltas" / f"0000000001-{'0' * 32}.safetensors"
    orphan.write_bytes(b"left by a crash")
    result = cli("verify", bucket)
    assert f"unreferenced, harmless: {orphan.relative_to(bucket)}" in result.stdout
    assert "all good" in result.stdout


def test_a_store_that_does_not_answer_is_no_damage(cli, bucket, monkeypatch) -> None:
    def silent(self: LocalBucket, *args: object, **kwargs: object) -> None:
        raise BucketUnavailable("the store does not answer")

    monkeypatch.setattr(LocalBucket, "stream", silent)
    assert "does not answer" in cli.fails("verify", bucket, status=3)


def test_nothing_there_is_misuse(cli, tmp_path) -> None:
    cli.fails("verify", tmp_path / "nowhere", status=2)
    assert "holds no run" in cli.fails("verify", tmp_path, status=2)
