"""``thinwire bench bucket``: the report's shape and its counts, not its times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_json(cli: Any, tmp_path: Path, where: str) -> None:
    url = str(tmp_path) if where == "folder" else "memory://"
    document = cli.json("bench", "bucket", url, "--size", "1MB", "--versions", 3)
    assert document["bytes"] == 1_000_000
    assert (document["repeat"], document["versions"]) == (3, 3)
    for way in ("put", "get"):
        row = document[way]
        assert row["mb_per_s"] == pytest.approx(1 / row["seconds"])
        assert row["obstore_mb_per_s"] is row["ratio"] is None
    publish, pull = document["publish"], document["pull"]
    assert publish["requests"] == {"create": 2, "head": 1, "stream": 1}
    assert pull["requests"] == {"head": 2, "stream": 2}
    assert publish["ms"] > 0
    assert pull["ms"] > 0
    # one payload and one commit each: what goes up comes down
    assert publish["bytes_out"] == pytest.approx(pull["bytes_in"])
    assert pull["bytes_out"] == 0
    assert 5_000 < publish["bytes_out"] < 30_000
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_text(cli: Any, tmp_path: Path) -> None:
    out = cli("bench", "bucket", tmp_path, "--size", "1MB", "--versions", 1).stdout
    for what in ("an object of 1 MB, median of 3", "put", "get", "publish", "2 create"):
        assert what in out
    assert "obstore" not in out


def test_a_url_that_is_none_is_refused(cli: Any) -> None:
    said = cli.fails("bench", "bucket", "gopher://x", status=2)
    assert "unknown bucket scheme" in said


@pytest.mark.parametrize("option", [("--size", "big"), ("--versions", 0), ("--repeat", 2)])
def test_wrong_usage(cli: Any, tmp_path: Path, option: tuple[object, ...]) -> None:
    assert "Invalid value" in cli("bench", "bucket", tmp_path, *option, status=2).stderr
