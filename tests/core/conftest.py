"""What several of these files share: a bounded hypothesis profile and ways to run code apart."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "thinwire",
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("thinwire")


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Frozen files: never rewritten by a test, and a missing one is a failure."""
    return Path(__file__).parent / "vectors"


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Run a script in a fresh interpreter; its standard output, once it has ended well."""

    def run(script: str, *, timeout: float = 60) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
