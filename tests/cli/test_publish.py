"""``thinwire publish``: two plain calls, two versions."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from thinwire.bucket import open_bucket
from thinwire.chain import Chain
from thinwire.errors import WriterConflict
from thinwire.publisher import Publisher


def test_two_plain_calls_make_exactly_versions_0_and_1(cli, checkpoint, tmp_path) -> None:
    bucket = tmp_path / "bucket"
    first = cli.json("publish", checkpoint("a"), bucket, "--step", 5)
    second = cli.json("publish", checkpoint("b", step=1), bucket, "--step", 6)
    assert sorted(p.name for p in (bucket / "commits").iterdir()) == [
        "0000000000.json",
        "0000000001.json",
    ]
    assert first.keys() == second.keys()
    assert (first["version"], first["step"], first["new_run"]) == (0, 5, True)
    assert first["changed"] == first["elements"] == 64 * 16 + 48 * 16 + 16 + 1
    assert first["payload_bytes"] > first["full_bytes"] == 2 * first["elements"]
    assert first["seconds"] is None
    assert (second["version"], second["step"], second["new_run"]) == (1, 6, False)
    assert (second["changed"], second["tensors"], second["codec"]) == (7, 1, "compact")
    assert 0 < second["payload_bytes"] < 400
    assert second["ratio"] == second["payload_bytes"] / second["full_bytes"]
    assert set(second["seconds"]) == {"diff", "encode", "upload", "commit"}
    assert second["run"] == first["run"]
    commits = [Chain(open_bucket(bucket)).read(v) for v in (0, 1)]
    assert [c.step for c in commits] == [5, 6]
    assert [c.hash for c in commits] == [first["commit"], second["commit"]]


def test_the_same_checkpoint_again_is_an_empty_version(cli, checkpoint, tmp_path) -> None:
    folder, bucket = checkpoint("a"), tmp_path / "bucket"
    cli("publish", folder, bucket)
    again = cli.json("publish", folder, bucket)
    assert (again["version"], again["changed"], again["payload_bytes"]) == (1, 0, 0)


def test_says_what_it_did_in_one_line_on_stdout(cli, checkpoint, tmp_path) -> None:
    bucket = tmp_path / "bucket"
    first = cli("publish", checkpoint("a"), bucket)
    second = cli("publish", checkpoint("b", step=1), bucket)
    assert first.stdout.startswith("version 0 of a new run")
    assert second.stdout.startswith("version 1: 7 of 1,809 elements changed (0.387 %)")
    assert first.stdout.count("\n") == second.stdout.count("\n") == 1
    assert first.stderr == second.stderr == ""


@pytest.mark.parametrize("flag", ["--assets", "--no-assets"])
def test_assets_travel_with_version_0_unless_refused(cli, checkpoint, tmp_path, flag) -> None:
    cli("publish", checkpoint("a"), tmp_path / "bucket", flag)
    names = {p.name for p in (tmp_path / "bucket" / "anchors").rglob("*.json")}
    beside = {"config.json", "tokenizer.json"} if flag == "--assets" else set()
    assert names == {"manifest.json"} | beside


def test_dtype_serves_fp32_masters_in_bf16(cli, checkpoint, tmp_path) -> None:
    masters = {"w": np.linspace(-1, 1, 100, dtype="f4"), "ids": np.arange(4)}
    bucket = tmp_path / "bucket"
    document = cli.json("publish", checkpoint("a", tensors=masters), bucket, "--dtype", "bf16")
    assert document["full_bytes"] == 2 * 100 + 8 * 4
    # an existing run keeps its dtype
    masters["w"] = masters["w"] * np.float32(1.001)
    document = cli.json("publish", checkpoint("b", tensors=masters), bucket)
    assert document["full_bytes"] == 2 * 100 + 8 * 4


def test_resume_modes(cli, checkpoint, tmp_path) -> None:
    folder, bucket = checkpoint("a"), tmp_path / "bucket"
    assert "no bucket" in cli.fails("publish", folder, bucket, "--resume", "require", status=2)
    cli("publish", folder, bucket, "--resume", "new")
    assert "already holds run" in cli.fails("publish", folder, bucket, "--resume", "new", status=2)
    assert cli.json("publish", folder, bucket, "--resume", "require")["version"] == 1


def test_base_uploads_no_weights_and_can_be_resumed_and_pulled(cli, checkpoint, tmp_path) -> None:
    base, bucket = checkpoint("a"), tmp_path / "bucket"
    first = cli.json("publish", base, bucket, "--base", base)
    assert first["payload_bytes"] == 0
    assert not (bucket / "anchors").exists()
    assert cli.json("publish", checkpoint("b", step=1), bucket)["changed"] == 7
    assert "pass its folder as base" in cli.fails("pull", bucket, tmp_path / "m", status=2)
    cli("pull", bucket, tmp_path / "m", "--base", base)
    assert load_file(tmp_path / "m" / "model.safetensors").keys()
    assert cli.json("verify", bucket, "--base", base)["replayed"] == 1
    unreplayed = cli.json("verify", bucket)
    assert unreplayed["ok"]
    assert unreplayed["replayed"] is None
    assert unreplayed["skipped"]


def test_the_ties_of_a_run_hold_for_a_checkpoint_that_stores_them_once(
    cli, checkpoint, tmp_path
) -> None:
    folder, bucket = checkpoint("a"), tmp_path / "bucket"
    loaded = load_file(folder / "model.safetensors")
    tied = {**loaded, "zz_head.weight": loaded["model.embed_tokens.weight"]}
    with Publisher(open_bucket(bucket), tied):
        pass
    assert cli.json("publish", folder, bucket)["version"] == 1


def test_a_changed_model_is_refused(cli, checkpoint, tmp_path) -> None:
    bucket = tmp_path / "bucket"
    cli("publish", checkpoint("a"), bucket)
    other = checkpoint("b", tensors={"w": np.ones(3, "f2")})
    assert "tensor names changed" in cli.fails("publish", other, bucket, status=2)
    assert cli.json("log", bucket)["head"] == 0


def test_what_is_not_a_checkpoint_is_refused(cli, tmp_path) -> None:
    assert "not a folder" in cli.fails("publish", tmp_path / "no", tmp_path / "b", status=2)
    (tmp_path / "empty").mkdir()
    assert "holds no model" in cli.fails("publish", tmp_path / "empty", tmp_path / "b", status=2)
    assert not (tmp_path / "b").exists()


def test_a_lost_race_stops(cli, checkpoint, tmp_path, monkeypatch) -> None:
    def lose(self: Publisher, *args: object) -> None:
        raise WriterConflict("another writer committed version 1")

    folder, bucket = checkpoint("a"), tmp_path / "bucket"
    cli("publish", folder, bucket)
    monkeypatch.setattr(Publisher, "_commit_now", lose)
    cli.fails("publish", folder, bucket, status=5)


def test_works_without_torch(checkpoint, process, tmp_path) -> None:
    blocker = tmp_path / "blocked"
    blocker.mkdir()
    (blocker / "torch.py").write_text("raise ImportError('no torch here')\n")
    env = {"PYTHONPATH": str(blocker)}
    bucket = tmp_path / "bucket"
    for name, step in (("a", 0), ("b", 1)):
        run = process("publish", checkpoint(name, step), bucket, "--json", env=env)
        out, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
        assert json.loads(out)["version"] == step


def test_sharded_checkpoints_are_published_whole(cli, checkpoint, tmp_path) -> None:
    folder = checkpoint("a")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[:2], "two.safetensors": names[2:]}
    for part, some in parts.items():
        save_file({n: tensors[n] for n in some}, folder / part)
    index = {"weight_map": {n: part for part, some in parts.items() for n in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cli.json("publish", folder, tmp_path / "bucket")["elements"] == 1809


def test_a_checkpoint_copied_out_of_a_bucket_can_be_published(cli, bucket, tmp_path) -> None:
    anchor = next((bucket / "anchors").iterdir())
    cli("publish", anchor, tmp_path / "other")
    cli("pull", tmp_path / "other", tmp_path / "mirror")
    assert cli.json("diff", anchor, tmp_path / "mirror")["changed"] == 0
    assert sorted(p.name for p in (tmp_path / "mirror").iterdir() if p.is_file()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize(("name", "size"), [("a b.txt", 1), ("big.dat", (1 << 30) + 1)])
def test_assets_that_no_replica_would_take(cli, checkpoint, tmp_path, name, size) -> None:
    folder = checkpoint("a")
    with (folder / name).open("wb") as file:
        file.truncate(size)
    assert "without assets" in cli.fails("publish", folder, tmp_path / "bucket", status=2)
    assert not (tmp_path / "bucket" / "anchors").exists()
    cli("publish", folder, tmp_path / "bucket", "--no-assets")
    cli("pull", tmp_path / "bucket", tmp_path / "mirror")


def test_a_step_that_no_replica_would_take(cli, checkpoint, tmp_path) -> None:
    cli.fails("publish", checkpoint("a"), tmp_path / "bucket", "--step", 1 << 63, status=2)
    assert not (tmp_path / "bucket").exists()


def test_a_bucket_in_memory_would_be_gone_at_once(cli, tmp_path) -> None:
    result = cli("publish", tmp_path, "memory://x", status=2)
    assert "memory://" in result.stderr
    assert "hint:" in result.stderr


def test_bandwidth(cli, checkpoint, tmp_path) -> None:
    folder = checkpoint("a")
    size = (folder / "model.safetensors").stat().st_size
    started = time.monotonic()
    cli("publish", folder, tmp_path / "bucket", "--bandwidth", size)
    assert 0.8 < time.monotonic() - started < 10
    assert "memory://" in cli.fails("publish", folder, "memory://x", "--bandwidth", 1e6, status=2)
