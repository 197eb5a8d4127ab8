"""What a measurement ran on, as it stands beside the figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["machine"]


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """Cores, architecture, Python, and the releases of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "packages": found,
    }
