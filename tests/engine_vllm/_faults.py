"""Faults in a real worker: a vLLM plugin of the tests', installed in a folder for one server.

While ``<folder>/fault`` holds a word, writing goes wrong: ``half`` writes some of the elements and
raises, ``hang`` takes as many seconds as follow the word.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

NAME = "thinwire_test_faults"


def install(folder: Path) -> dict[str, str]:
    """Make a distribution with the plugin; return the environment that loads it."""
    folder.mkdir()
    shutil.copy(__file__, folder / f"{NAME}.py")
    info = folder / f"{NAME}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"VLLM_PLUGINS": f"thinwire,{NAME}", "PYTHONPATH": os.pathsep.join(paths)}


def register() -> None:
    """Called by vLLM in each of its processes, too early for numba: see ``_engine.py``."""
    from thinwire.engines.vllm import versions

    add = versions.add_worker_method

    def add_and_break(name: str) -> None:
        add(name)
        _break()

    if versions.add_worker_method.__name__ != "add_and_break":
        versions.add_worker_method = add_and_break


def _break() -> None:
    from thinwire.engines.scatter import Staged

    whole = Staged.write
    flag = Path(__file__).with_name("fault")

    def write(staged: Staged) -> None:
        fault, *more = flag.read_text().split() if flag.exists() else [""]
        if fault == "half":
            whole(Staged(staged._changes[::2]))
            raise RuntimeError("the device is gone")
        if fault == "hang":
            flag.unlink()
            time.sleep(float(more[0]))
        whole(staged)

    Staged.write = write  # type: ignore[method-assign]
