"""Compiled kernels where none can be kept: containers with a read-only system and no home."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire

SCRIPT = """
import numba.core.config as config
import numpy as np
import thinwire
from thinwire.codec import CODECS
from thinwire.digest import digest_tensor
digest_tensor(np.arange(10, dtype="u2"))
print(thinwire.__file__)
print(config.CACHE_DIR)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package in which nothing can be cached, by root neither."""
    there = tmp_path / "site" / "thinwire"
    source = Path(thinwire.__file__).parent
    shutil.copytree(source, there, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (there, *(path for path in there.iterdir() if path.is_dir())):
        (folder / "__pycache__").touch()
    return there


def run(package: Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    nowhere = "/dev/null/home"
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            "PYTHONPATH": str(package.parent),
            "HOME": nowhere,
            "XDG_CACHE_HOME": nowhere,
            "TMPDIR": str(temporary),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_kernels_live_as_long_as_the_process(package: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run(package, temporary)
    assert done.returncode == 0, done.stderr
    used, folder = map(Path, done.stdout.split())
    assert used.parent == package
    assert folder.parent == temporary
    assert not folder.exists()


def test_kernels_are_kept_beside_the_package_as_a_rule(package: Path, tmp_path: Path) -> None:
    (package / "__pycache__").unlink()
    (package / "codec" / "__pycache__").unlink()
    done = run(package, tmp_path)
    assert done.stdout.split() == [str(package / "__init__.py")], done.stderr
    assert list((package / "__pycache__").glob("digest.*.nbi"))
