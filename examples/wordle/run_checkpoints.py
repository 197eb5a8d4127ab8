"""The trainer's own checkpoints: which of them a killed trainer can go on from.

A checkpoint's ``trainer_state.json`` is written last. One without it, or with half of it, was being
written when the trainer was killed.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

__all__ = ["steps_done", "whole_checkpoint"]

_FOLDER = re.compile(r"checkpoint-(\d+)")
_MODELS = ("model.safetensors", "model.safetensors.index.json")


def whole_checkpoint(output: Path) -> Path | None:
    """The newest checkpoint in the trainer's output folder that is whole; None without one.

    Newer ones, which are torn, are removed.
    """
    numbers = {
        int(found[1]): path
        for path in (output.iterdir() if output.is_dir() else ())
        if (found := _FOLDER.fullmatch(path.name)) and path.is_dir()
    }
    for _, folder in sorted(numbers.items(), reverse=True):
        if steps_done(folder) is not None:
            return folder
        shutil.rmtree(folder)
    return None


def steps_done(checkpoint: Path) -> int | None:
    """Optimizer steps that it comes after; None if it is torn."""
    if not any((checkpoint / name).is_file() for name in _MODELS):
        return None
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return int(state["global_step"])
