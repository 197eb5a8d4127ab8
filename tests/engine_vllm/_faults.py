"""Faults in a real worker: a vLLM plugin of the tests', installed in a folder for one server.

While ``<folder>/fault`` holds a word, writing goes wrong: ``half`` writes, or loads, some of the
elements and raises, ``hang`` takes as many seconds as follow the word. If it does so at the start:
``packed`` lets vLLM pack linear weights on the CPU, ``kernels`` lets it keep its experts' kernels.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

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
    flag = Path(__file__).with_name("fault")
    if flag.exists() and flag.read_text() == "packed":
        import vllm._custom_ops as ops

        versions.keep_plain_weights = lambda backend: None
        if isinstance(ops._supports_onednn, versions._Unless):
            ops._supports_onednn = ops._supports_onednn._value


def _break() -> None:
    from thinwire.engines.scatter import Staged
    from thinwire.engines.vllm import reloader

    whole = Staged.write
    load = reloader.LayerwiseReloader.load
    flag = Path(__file__).with_name("fault")
    if flag.exists() and flag.read_text() == "kernels":
        reloader._forget_packed_experts = lambda model: None

    def load_some(
        self: reloader.LayerwiseReloader, weights: Any, filled: set[str] | None = None
    ) -> None:
        def some() -> Any:
            for count, pair in enumerate(weights):
                if count == 9:
                    raise RuntimeError("the device is gone")
                yield pair

        load(self, some() if flag.exists() and flag.read_text() == "half" else weights, filled)

    reloader.LayerwiseReloader.load = load_some  # type: ignore[method-assign]

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
