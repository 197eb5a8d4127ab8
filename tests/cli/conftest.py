"""Tiny checkpoints, and the command line called in this process or in one of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from safetensors.numpy import save_file

from thinwire.cli import main

SHAPES = {
    "model.embed_tokens.weight": (64, 16),
    "model.layers.0.mlp.weight": (48, 16),
    "model.norm.weight": (16,),
    "scale": (),
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype("f2") for name, shape in SHAPES.items()}


def stepped(tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """The tensors after ``number`` small updates: 7 elements of one matrix, one ULP each."""
    out = {name: np.array(value) for name, value in tensors.items()}
    bits = out["model.layers.0.mlp.weight"].reshape(-1).view("u2")
    for step in range(number):
        bits[step : 7 * 11 + step : 11] += 1
    return out


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint folder: ``checkpoint("a", step=2)``; other tensors on request."""

    def make(name: str, step: int = 0, tensors: dict[str, np.ndarray] | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        content = stepped(weights(), step) if tensors is None else tensors
        save_file(content, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text('{"model_type": "tiny"}\n')
        (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
        return folder

    return make


class Cli:
    """``thinwire …`` in this process."""

    def __call__(self, *args: object, status: int = 0) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(main, [str(arg) for arg in args])
        assert result.exit_code == status, (result.exit_code, result.stdout, result.stderr)
        assert "Traceback" not in result.output
        return result

    def json(self, *args: object, status: int = 0) -> Any:
        return json.loads(self(*args, "--json", status=status).stdout)

    def fails(self, *args: object, status: int) -> str:
        """Runs a command that must end with an error and a hint; returns what it says."""
        result = self(*args, status=status)
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert "\nhint: " in result.stderr
        return result.stderr


@pytest.fixture
def cli() -> Cli:
    return Cli()


@pytest.fixture
def bucket(tmp_path: Path, cli: Cli, checkpoint: Callable[..., Path]) -> Path:
    """A bucket with versions 0, 1 and 2."""
    folder = tmp_path / "bucket"
    for step in range(3):
        cli("publish", checkpoint(f"published-{step}", step), folder, "--step", 10 * step)
    return folder


@pytest.fixture
def process() -> Callable[..., subprocess.Popen[str]]:
    """Starts ``thinwire …`` as a process of its own."""

    def start(*args: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from thinwire.cli import main; main()"]
        return subprocess.Popen(
            [*command, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **options.pop("env", {})},
            # whoever runs the tests in the background may have them ignore Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **options,
        )

    return start
