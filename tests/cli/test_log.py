"""``thinwire log``: every version, newest first."""

from __future__ import annotations

from thinwire.log import keys
from thinwire.log.commit import Commit


def test_json(cli, bucket) -> None:
    document = cli.json("log", bucket)
    assert document.keys() == {
        *("url", "run", "base", "head", "elements", "tensors", "full_bytes", "versions"),
    }
    assert (document["head"], document["elements"], document["tensors"]) == (2, 1809, 4)
    versions = document["versions"]
    assert versions[0].keys() == {
        *("version", "step", "time_ms", "changed", "changed_fraction", "tensors"),
        *("payload_bytes", "ratio", "codec", "writer", "commit", "digest"),
    }
    assert [v["version"] for v in versions] == [2, 1, 0]
    assert [v["step"] for v in versions] == [20, 10, 0]
    assert [v["changed"] for v in versions] == [7, 7, 1809]
    anchor = sum(p.stat().st_size for p in (bucket / "anchors").rglob("*") if p.is_file())
    assert versions[2]["payload_bytes"] == anchor
    assert versions[0]["ratio"] == versions[0]["payload_bytes"] / document["full_bytes"]


def test_the_table_is_whole_when_piped(cli, bucket) -> None:
    lines = cli("log", bucket).stdout.splitlines()
    assert lines[0].startswith("run ")
    for title in ("version", "step", "time", "changed", "%", "tensors", "payload", "of full"):
        assert title in lines[1]
    assert [line.split()[0] for line in lines[3:]] == ["2", "1", "0"]
    assert "compact" in lines[3]


def test_n_limits(cli, bucket) -> None:
    assert [v["version"] for v in cli.json("log", bucket, "-n", 2)["versions"]] == [2, 1]
    assert len(cli.json("log", bucket, "-n", 0)["versions"]) == 3


def test_a_broken_chain_is_not_shown_as_history(cli, bucket) -> None:
    path = bucket / keys.commit_key(1)
    commit = Commit.decode(path.read_bytes())
    path.write_bytes(Commit(**{**commit.__dict__, "step": 99}).encode())
    assert "does not continue" in cli.fails("log", bucket, status=5)


def test_a_damaged_commit(cli, bucket) -> None:
    path = bucket / keys.commit_key(1)
    path.write_bytes(path.read_bytes().replace(b'"step":10', b'"step":11'))
    assert "thinwire verify" in cli.fails("log", bucket, status=4)


def test_a_run_without_a_version(cli, bucket) -> None:
    for path in (bucket / "commits").iterdir():
        path.unlink()
    assert "no version yet" in cli("log", bucket).stdout
    assert cli.json("log", bucket)["versions"] == []


def test_no_run(cli, tmp_path) -> None:
    cli.fails("log", tmp_path, status=2)
    cli.fails("log", tmp_path / "nowhere", status=2)
    assert "unknown bucket scheme" in cli.fails("log", "gopher://x", status=2)
