"""``thinwire warmup`` leaves nothing to compile for later processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def run(cache: Path, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", "from thinwire.cli import main; main()", *arguments],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def compiled(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*.nbc")}


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, "warmup", "--dtype", "bf16", "--json")
    assert first["dtypes"] == ["bf16"]
    kernels = compiled(tmp_path)
    assert kernels
    second = run(tmp_path, "warmup", "--dtype", "BF16", "--json")
    assert compiled(tmp_path) == kernels
    assert float(str(second["seconds"])) < float(str(first["seconds"]))
