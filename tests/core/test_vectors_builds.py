"""The coded codecs as other compilers' settings make them: checked bounds, no vector extensions."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent


def run_pytest(cache: Path, *arguments: str, **environment: str) -> str:
    """Run tests in a process of their own, with an empty cache of compiled kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment},
        cwd=TESTS.parents[1],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_checked_bounds_and_no_vector_extensions(tmp_path: Path) -> None:
    """In one run, since compiling takes most of it: both concern every kernel alike."""
    settings = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    chosen = (
        "the_library or every_dtype or all_bf16 or many_segments or without_its_base"
        " or wrong_base or damage"
    )
    files = [str(TESTS / name) for name in ("test_coded.py", "test_vectors.py")]
    out = run_pytest(tmp_path, *files, "-k", chosen, **settings)
    assert " passed" in out
    assert any(tmp_path.rglob("*.nbc")), "nothing was compiled anew"


def test_the_settings_reach_the_compiler() -> None:
    """Without this, the test above could pass for want of checks."""
    script = """
        import numba, numpy as np
        @numba.njit
        def beyond(a):
            return a[a.size]
        try:
            beyond(np.zeros(3))
        except IndexError:
            print("checked")
        from numba.core import config
        print(config.CPU_NAME, repr(config.CPU_FEATURES))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={
            **os.environ,
            "NUMBA_BOUNDSCHECK": "1",
            "NUMBA_CPU_NAME": "generic",
            "NUMBA_CPU_FEATURES": "",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["checked", "generic", "''"], done.stderr
