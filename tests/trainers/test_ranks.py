"""Two real processes under torchrun: rank 0 publishes, and sharded weights are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from servers.ports import free_port
from trainers._training import history, require_same

TESTS = Path(__file__).parents[1]


def run_ranks(folder: Path, how: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command += [str(TESTS / "trainers" / "_ddp.py"), str(folder), how]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_rank_0_publishes(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, "plain")
    assert [rank["how"] for rank in ranks] == ["MULTI_CPU"] * 2
    steps, states = history(tmp_path / "bucket")
    assert steps == [0, 1, 2, 3]
    for rank in ranks:
        last = {name: np.array(bits, np.int16) for name, bits in rank["last"].items()}
        require_same(states[-1], last)


def test_fsdp_is_refused_on_every_rank(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, "fsdp")
    assert all("sharded by DTensor (FSDP2" in rank["told"] for rank in ranks)
    assert not (tmp_path / "bucket").exists()
