"""Where compiled kernels are kept: numba refuses to import them where it can write nowhere.

That is common in containers: packages installed by another user, no home, a read-only system.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import numba
import numba.core.config

from thinwire.errors import Misuse

__all__ = ["find_cache"]


def find_cache() -> None:
    """Let numba keep kernels beside the package or at home; if it cannot, for this process only.

    Called before the first kernel is declared.

    Raises:
        Misuse: there is no temporary folder either.
    """
    try:
        numba.njit(cache=True)(_probe)  # compiles nothing
    except RuntimeError:
        try:
            folder = tempfile.mkdtemp(prefix="thinwire-kernels-")
        except OSError as error:
            raise Misuse(
                f"compiled kernels can be kept nowhere: {error}",
                hint="set NUMBA_CACHE_DIR to a folder that can be written",
            ) from error
        atexit.register(_remove, folder, os.getpid())
        numba.core.config.CACHE_DIR = folder


def _probe() -> None:
    return


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # a fork has the same folder and may end first
        shutil.rmtree(folder, ignore_errors=True)
