"""A run that is published, and vLLM engines that follow it, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from engine_vllm import _models
from thinwire import Publisher, Replica, open_bucket

PROMPTS = ["hello there", "the quick brown fox jumps over the lazy dog", "0 1 2 3 4 5 6 7"]


class Run:
    """A trainer: a checkpoint, its publisher, and every version's state."""

    def __init__(
        self, root: Path, kind: str, *, folder: Path | None = None, **options: Any
    ) -> None:
        self.root = root
        self.base = root / "base"
        self.bucket = root / "bucket"
        self.state = _models.copy(folder, self.base) if folder else _models.make(kind, self.base)
        self.publisher = Publisher(
            open_bucket(self.bucket), self.state, assets=self.base, **options
        )
        self.version = 0

    def step(self, density: float = 0.05, *, keep: Mapping[str, torch.Tensor] | None = None) -> int:
        """Train a little, except the tensors to keep, and publish."""
        self.version += 1
        _models.step(self.state, self.version, density)
        for name, tensor in (keep or {}).items():
            self.state[name].copy_(tensor)
        self.publisher.publish(self.state, step=self.version).result()
        return self.version

    def pulled(self, version: int) -> Path:
        """A fresh mirror of a version: a checkpoint folder."""
        folder = self.root / f"pulled-{version}"
        with Replica(open_bucket(self.bucket), folder) as replica:
            replica.sync(version)
        return folder


class Engine:
    """An engine's process."""

    def __init__(self, pipe: subprocess.Popen[str]) -> None:
        self._pipe = pipe

    def __call__(self, do: str, **options: Any) -> Any:
        found = self.answer(do, **options)
        if isinstance(found, dict) and "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    def answer(self, do: str, **options: Any) -> Any:
        """What it says, failures included."""
        print(json.dumps({"do": do, **options}), file=_open(self._pipe.stdin), flush=True)
        return json.loads(_open(self._pipe.stdout).readline() or '{"failed": "it is gone"}')

    def generate(self, prompts: list[str] | None = None) -> Any:
        """Greedy tokens and their logprobs."""
        return self("generate", prompts=PROMPTS if prompts is None else prompts)


def _open(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("no pipe")
    return stream


def environment(**more: str) -> dict[str, str]:
    """What vLLM needs on a small machine without a network."""
    return {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "thinwire",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        **more,
    }


@contextmanager
def engine(
    model: Path, *, run: Run | None = None, mirror: Path | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine that has loaded ``model``; with a run, one that follows it.

    Raises:
        RuntimeError: it did not start; says why.
    """
    more = dict(options.pop("env", {}))
    options.setdefault("weight_transfer_config", {"backend": "thinwire"})
    if run is not None:
        more["THINWIRE_BUCKET"] = str(run.bucket)
        more["THINWIRE_MIRROR"] = str(mirror or run.root / "mirror")
    program = Path(__file__).with_name("_engine.py")
    arguments = json.dumps({"model": str(model), **options})
    with subprocess.Popen(
        [sys.executable, str(program), arguments],
        env=environment(**more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as pipe:
        try:
            first = json.loads(_open(pipe.stdout).readline() or '{"failed": "it is gone"}')
            if "failed" in first:
                raise RuntimeError(first["failed"])
            yield Engine(pipe)
        finally:
            _open(pipe.stdin).close()
            try:
                pipe.wait(30)
            except subprocess.TimeoutExpired:
                pipe.kill()
