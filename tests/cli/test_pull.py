"""``thinwire pull``: a folder that any loader reads, at the wanted version."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from thinwire.cli.pull import pull


def same_weights(a: Path, b: Path) -> bool:
    one, two = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return one.keys() == two.keys() and all(
        np.array_equal(one[k].reshape(-1).view("u2"), two[k].reshape(-1).view("u2")) for k in one
    )


def test_pull_makes_a_loadable_folder_at_the_newest_version(cli, bucket, tmp_path) -> None:
    document = cli.json("pull", bucket, tmp_path / "mirror")
    assert document["version"] == 2
    assert document["folder"] == str(tmp_path / "mirror")
    updates = document["updates"]
    assert [(u["version"], u["step"], u["whole"]) for u in updates] == [
        (0, 0, True),
        (1, 10, False),
        (2, 20, False),
    ]
    assert [u["changed"] for u in updates[1:]] == [7, 7]
    assert set(updates[1]) == {
        *("version", "step", "whole", "changed", "tensors", "payload_bytes"),
        *("fetch_s", "decode_s", "verify_s", "patch_s"),
    }
    assert same_weights(tmp_path / "mirror", tmp_path / "published-2")
    assert (tmp_path / "mirror" / "config.json").exists()


def test_pull_to_a_version_then_on_then_already_there(cli, bucket, tmp_path) -> None:
    mirror = tmp_path / "mirror"
    first = cli("pull", bucket, mirror, "--version", 1)
    assert first.stdout.splitlines()[-1] == f"{mirror} holds version 1"
    assert same_weights(mirror, tmp_path / "published-1")
    assert cli.json("pull", bucket, mirror)["updates"][0]["version"] == 2
    again = cli("pull", bucket, mirror)
    assert again.stdout == f"{mirror} holds version 2 already\n"
    assert again.stderr == ""


def test_an_older_version_is_refused_in_the_same_folder(cli, bucket, tmp_path) -> None:
    cli("pull", bucket, tmp_path / "mirror")
    said = cli.fails("pull", bucket, tmp_path / "mirror", "--version", 1, status=5)
    assert "older than" in said
    assert "fresh folder" in said


def test_a_version_that_is_not_there(cli, bucket, tmp_path) -> None:
    said = cli.fails("pull", bucket, tmp_path / "mirror", "--version", 7, status=2)
    assert "the newest is 2" in said
    assert "--help" in said


def test_a_wrong_url_leaves_no_folder_behind(cli, tmp_path) -> None:
    cli.fails("pull", tmp_path / "no-bucket", tmp_path / "mirror", status=2)
    assert not (tmp_path / "mirror").exists()


def test_a_folder_with_something_else_is_refused(cli, bucket, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not overwrite")
    assert "not a mirror" in cli.fails("pull", bucket, tmp_path / "mine", status=2)


def test_another_run_needs_adopt(cli, bucket, checkpoint, tmp_path) -> None:
    mirror = tmp_path / "mirror"
    cli("pull", bucket, mirror)
    shutil.rmtree(bucket)
    cli("publish", checkpoint("new", step=5), bucket)
    assert "--adopt" in cli.fails("pull", bucket, mirror, status=5)
    assert cli.json("pull", bucket, mirror, "--adopt")["version"] == 0
    assert same_weights(mirror, tmp_path / "new")


def test_a_damaged_payload_leaves_the_mirror_where_it_was(cli, bucket, tmp_path) -> None:
    payload = next((bucket / "deltas").glob("0000000002-*"))
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    mirror = tmp_path / "mirror"
    assert "not the payload" in cli.fails("pull", bucket, mirror, status=4)
    assert cli.json("verify", mirror)["version"] == 1


@pytest.fixture
def mapping():
    """Has a file mapped by another process until the test ends."""
    code = (
        "import mmap,sys; f=open(sys.argv[1],'rb'); "
        "m=mmap.mmap(f.fileno(),0,access=mmap.ACCESS_READ); print('mapped',flush=True); "
        "sys.stdin.readline(); sys.stdout.buffer.write(bytes(m)); sys.stdout.flush()"
    )
    started = []

    def start(path: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, str(path)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are found in /proc")
def test_a_mapped_folder_is_refused_and_swapped_on_request(cli, bucket, tmp_path, mapping) -> None:
    mirror = tmp_path / "mirror"
    cli("pull", bucket, mirror, "--version", 0)
    before = (mirror / "model.safetensors").read_bytes()
    child = mapping(mirror / "model.safetensors")
    said = cli.fails("pull", bucket, mirror, status=2)
    assert f"mapped by process {child.pid}" in said
    assert "--swap" in said
    assert (mirror / "model.safetensors").read_bytes() == before

    assert cli.json("pull", bucket, mirror, "--swap")["version"] == 2
    assert same_weights(mirror, tmp_path / "published-2")
    out, _ = child.communicate(b"\n", timeout=20)
    assert out == before, "what the other process sees must not have changed"
    cli("verify", mirror)


def test_follow_prints_one_json_line_per_version_until_interrupted(
    cli, bucket, checkpoint, process, tmp_path
) -> None:
    mirror = tmp_path / "mirror"
    run = process("pull", bucket, mirror, "--follow", "--json", "--poll", "0.05")
    try:
        assert run.stdout is not None
        lines = [json.loads(run.stdout.readline()) for _ in range(3)]
        assert [line["version"] for line in lines] == [0, 1, 2]
        cli("publish", checkpoint("later", step=3), bucket)
        assert json.loads(run.stdout.readline())["version"] == 3
        # the mirror has a writer now: another one is told to come back later
        assert "another process" in cli.fails("pull", bucket, mirror, status=3)
        live = cli.json("verify", mirror)
        assert (live["ok"], live["live"], live["version"]) == (True, True, 3)
        cli("publish", checkpoint("last", step=4), bucket)
        assert json.loads(run.stdout.readline())["version"] == 4
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=20)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert out == ""
    assert err == "interrupted\n"
    assert same_weights(mirror, tmp_path / "last")


def test_follow_ends_at_the_version_asked_for(cli, bucket, tmp_path) -> None:
    result = cli("pull", bucket, tmp_path / "m", "--follow", "--version", 1, "--poll", 0.01)
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["0", "1"]


def test_follow_bears_an_outage_as_long_as_it_is_told(cli, tmp_path) -> None:
    (patience,) = (option for option in pull.params if option.name == "patience")
    assert patience.default == 24 * 3600
    places = ("pull", tmp_path / "nowhere", tmp_path / "m", "--follow", "--poll", 0.01)
    started = time.monotonic()
    cli.fails(*places, "--patience", 0.5, status=2)
    assert 0.5 < time.monotonic() - started < 20


def test_a_killed_pull_can_be_repeated(bucket, cli, process, tmp_path) -> None:
    mirror = tmp_path / "mirror"
    run = process("pull", bucket, mirror, "--follow", "--json", "--poll", "0.05")
    try:
        assert run.stdout is not None
        run.stdout.readline()
        run.stdout.readline()
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
    cli("pull", bucket, mirror)
    assert same_weights(mirror, tmp_path / "published-2")
    cli("verify", mirror)


def test_mirrors_of_one_host_share_a_cache(cli, bucket, tmp_path) -> None:
    cache = tmp_path / "cache"
    cli("pull", bucket, tmp_path / "a", "--cache", cache, "--bandwidth", "50MB")
    kept = {path.name for path in cache.iterdir()}
    deltas = list((bucket / "deltas").iterdir())
    anchors = [path for path in (bucket / "anchors").rglob("*") if path.is_file()]
    assert len(kept) == len(deltas) + len(anchors)
    for path in deltas:
        path.write_bytes(b"")  # whoever still asks the store will notice
    cli("pull", bucket, tmp_path / "b", "--cache", cache)
    assert {path.name for path in cache.iterdir()} == kept
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_a_bandwidth_that_is_none(cli, bucket, tmp_path) -> None:
    said = cli("pull", bucket, tmp_path / "a", "--bandwidth", "20Mb", status=2).stderr
    assert "means bits" in said
