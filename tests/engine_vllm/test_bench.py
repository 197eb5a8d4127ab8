"""``thinwire bench vllm --quick``: the report's shape, not its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_the_report(tmp_path: Path) -> None:
    file = tmp_path / "reports" / "vllm.json"
    program = [sys.executable, "-c", "from thinwire.cli import main; main()"]
    arguments = ["bench", "vllm", "--quick", "--repeat", "2", "--folder", tmp_path, "--json", file]
    done = subprocess.run(
        [*program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_PLUGINS": "thinwire"},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["parameters"] > 19e6
    assert document["changed"] == pytest.approx(0.01 * document["parameters"], rel=0.05)
    assert (document["repeat"], document["attested"], document["target"]) == (2, True, 8.0)
    ways = ["thinwire", "vllm_patches", "load_from_memory", "load_from_disk"]
    assert list(document["held"]) == ways
    for row in document["held"].values():
        assert len(row["all"]) == 2
        assert min(row["all"]) > 0
    assert document["held"]["thinwire"]["times_thinwire"] == 1
    steps = ["fetch_s", "decode_s", "verify_s", "patch_s", "stage_s", "paused_s"]
    assert list(document["sync"]) == steps
    assert all(seconds > 0 for seconds in document["sync"].values())
    assert "vLLM: load_checkpoint_weight_patches" in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "reports"]  # the scratch folder is gone
