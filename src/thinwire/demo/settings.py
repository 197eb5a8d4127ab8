"""What one demo run consists of: the recipe, and how the cores are shared among its processes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from thinwire.bucket import LocalBucket, innermost, open_bucket
from thinwire.demo.recipe import FULL, QUICK, Recipe

_POLL_S = 0.1
_REMOTE_POLL_S = 0.5  # stores count requests, and some limit them

SERVERS = ("server-0", "server-1")
TRAINER = "trainer"


@dataclass(frozen=True)
class Settings:
    """Everything the trainer and the servers are told before they start; survives JSON.

    Attributes:
        bucket: URL of the one thing that trainer and servers share.
        tiny: the tiny model and its task instead of SmolLM2 and word sorting.
        recipe: steps, batch sizes, learning rate.
        seed: of the problems, the draws, and the masters' places in their rounding cells.
        max_staleness: versions by which a completion may be behind the masters that learn from it.
        poll_s: seconds between a server's looks at the bucket.
        trainer_threads, server_threads: threads for the kernels of one such process.
    """

    bucket: str
    tiny: bool
    recipe: Recipe
    seed: int = 0
    max_staleness: int = 2
    poll_s: float = _POLL_S
    trainer_threads: int = 1
    server_threads: int = 1

    @classmethod
    def of(
        cls, *, bucket: str, quick: bool, steps: int | None, seed: int, cores: int | None = None
    ) -> Settings:
        """The settings of ``thinwire demo``'s options.

        Args:
            steps: None for the recipe's own.
            cores: None for those that this process may use.
        """
        recipe = QUICK if quick else FULL
        if steps is not None:
            recipe = Recipe(**{**asdict(recipe), "steps": steps})
        local = isinstance(innermost(open_bucket(bucket)), LocalBucket)
        trainer, server = split_threads(available_cores() if cores is None else cores, tiny=quick)
        return cls(
            bucket=bucket,
            tiny=quick,
            recipe=recipe,
            seed=seed,
            trainer_threads=trainer,
            server_threads=server,
            poll_s=_POLL_S if local else _REMOTE_POLL_S,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        """Inverse of :meth:`to_json`."""
        known = {field.name: data[field.name] for field in fields(cls)}
        return cls(**{**known, "recipe": Recipe(**data["recipe"])})


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def split_threads(cores: int, *, tiny: bool) -> tuple[int, int]:
    """Threads of the trainer and of each server.

    More threads than cores on purpose: the trainer waits for nobody and the servers work for half
    of the time, so whoever has work finds the cores. Eight steps on two cores, with another
    process busy beside them, took 38 s with 2 threads for everybody, 50 s with 1 for everybody and
    54 s with 2 and 1. Matrices of the tiny model gain nothing from threads.
    """
    if tiny:
        return 1, 1
    return max(1, min(cores, 16)), max(1, min(cores, max(2, cores // 2), 8))


def child_environment(threads: int, bucket: str) -> dict[str, str]:
    """Environment of a process of the demo: its thread count, and no model fetched from anywhere.

    Idle OpenMP threads sleep at once rather than spin: the processes share the cores.
    """
    count = str(threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "THINWIRE_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        # a bucket on the Hub is the one thing that is fetched from there
        **({} if bucket.startswith("hf://") else {"HF_HUB_OFFLINE": "1"}),
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "PYTHONUNBUFFERED": "1",
    }
