"""``thinwire inspect``: anything of thinwire's, recognised by what is in it."""

from __future__ import annotations

import pytest

KINDS = {
    "run.json": ("run", {"run", "writer", "schema", "base", "time_ms", "major"}),
    "commits/*2.json": ("commit", {"version", "parent", "payloads", "digest", "step"}),
    "anchors/*/manifest.json": ("anchor", {"files", "digest", "version"}),
    "anchors/*/model.safetensors": ("shard", {"metadata", "tensors", "bytes"}),
    "deltas/*2-*": ("payload", {"metadata", "tensors", "changed", "bytes"}),
}


@pytest.mark.parametrize("pattern", KINDS)
def test_files_of_a_bucket(cli, bucket, pattern) -> None:
    path = next(bucket.glob(pattern))
    kind, keys = KINDS[pattern]
    document = cli.json("inspect", path)
    assert document["kind"] == kind
    assert keys <= document.keys()
    text = cli("inspect", path)
    assert text.stdout.startswith(f"{path}: ")
    assert text.stderr == ""


def test_a_coded_payload_says_what_it_is(cli, bucket) -> None:
    document = cli.json("inspect", next(bucket.glob("deltas/*2-*")))
    assert document["kind"] == "payload"
    assert document["changed"] is None
    assert [row["name"] for row in document["tensors"]] == ["changes"]
    assert document["metadata"]["codec"] == "compact"
    assert "compact" in cli("inspect", next(bucket.glob("deltas/*2-*"))).stdout


def test_a_raw_payload_says_what_changed(cli, bucket, tmp_path) -> None:
    raw = tmp_path / "raw"
    for number in range(3):
        cli("publish", tmp_path / f"published-{number}", raw, "--codec", "raw")
    document = cli.json("inspect", next(raw.glob("deltas/*2-*")))
    assert document["changed"] == 7
    assert document["tensors"] == [
        {"name": "model.layers.0.mlp.weight", "dtype": "F16", "changed": 7, "bytes": 7 * 6}
    ]
    assert document["metadata"]["version"] == "2"
    assert document["metadata"]["codec"] == "raw"


def test_a_bucket(cli, bucket) -> None:
    document = cli.json("inspect", bucket)
    assert (document["kind"], document["head"], document["elements"]) == ("bucket", 2, 1809)
    assert document["commit"]["step"] == 20
    assert document["url"] == cli.json("inspect", document["url"])["url"]
    assert "head: 2" in cli("inspect", bucket).stdout


def test_a_checkpoint_and_a_mirror(cli, bucket, tmp_path) -> None:
    document = cli.json("inspect", tmp_path / "published-0")
    assert (document["kind"], document["tensors"], document["elements"]) == ("checkpoint", 4, 1809)
    assert [shard["path"] for shard in document["shards"]] == ["model.safetensors"]
    mirror = tmp_path / "mirror"
    cli("pull", bucket, mirror, "--version", 1)
    document = cli.json("inspect", mirror)
    assert (document["kind"], document["version"], document["elements"]) == ("mirror", 1, 1809)
    assert {f["path"] for f in document["files"]} >= {"model.safetensors", "config.json"}
    assert "model.safetensors" in cli("inspect", mirror).stdout
    state = cli.json("inspect", mirror / ".thinwire" / "state.json")
    assert (state["kind"], state["version"]) == ("state", 1)
    assert "schema" in cli("inspect", mirror / ".thinwire" / "state.json").stdout


def test_what_it_does_not_know(cli, bucket, tmp_path) -> None:
    (tmp_path / "x").write_text("hello")
    assert "neither a record" in cli.fails("inspect", tmp_path / "x", status=2)
    (tmp_path / "y.json").write_text("{}\n")
    assert "not a record of thinwire" in cli.fails("inspect", tmp_path / "y.json", status=2)
    cli.fails("inspect", tmp_path / "nowhere", status=2)


def test_a_damaged_record(cli, bucket) -> None:
    path = bucket / "commits" / "0000000001.json"
    path.write_bytes(path.read_bytes().replace(b'"step":10', b'"step":12'))
    assert "SHA-256" in cli.fails("inspect", path, status=4)
