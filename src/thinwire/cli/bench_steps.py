"""The timed steps of ``thinwire bench diff``, side by side in one process."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thinwire import codec
from thinwire.anchor import Progress
from thinwire.cli.bench_state import QUICK, QWEN3_06B, changes, make_weights, named
from thinwire.diff import diff
from thinwire.digest import digest_change, digest_tensors
from thinwire.patch import Bits, Patch, apply_patch
from thinwire.weights import PIECE, Weights
from thinwire.workers import parallel_map

__all__ = ["measure"]

_TARGETS = {"copy": None, "diff": 2.0, "digest": 4.0, "apply": None, "encode": None}


def measure(
    *, quick: bool, threads: int, repeat: int, density: float, progress: Progress
) -> dict[str, Any]:
    """Medians of every step; keys as ``thinwire bench diff --help`` says, less ``memory``."""
    schema = (QUICK if quick else QWEN3_06B).schema()
    old = make_weights(schema)
    new = [bits.copy() for bits in old]
    target = [bits.copy() for bits in old]  # touched: no page of it is new to the copy
    patches = changes(schema, old, density)
    for patch in patches:
        apply_patch(new[patch.ordinal], patch)
    weights = Weights.of(named(schema, new))
    steps: dict[str, Callable[[], object]] = {
        "copy": lambda: _copy(old, target, threads),
        "diff": lambda: diff(old, weights, threads=threads),
        "digest": lambda: digest_tensors(old, threads=threads),
        "apply": lambda: _apply(target, patches, threads),
        "encode": lambda: _encode(patches),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    total = (repeat + 1) * len(steps)
    for round_ in range(repeat + 1):  # the first one compiles and warms up
        for number, (name, step) in enumerate(steps.items()):
            started = time.perf_counter()
            result = step()
            if round_:
                seconds[name].append(time.perf_counter() - started)
            del result
            progress("measuring", round_ * len(steps) + number + 1, total)
    copy = statistics.median(seconds["copy"])
    return {
        "parameters": schema.numel,
        "bytes": schema.nbytes,
        "changed": sum(map(len, patches)),
        "density": density,
        "threads": threads,
        "repeat": repeat,
        **{name: _row(seconds[name], schema.nbytes, copy, _TARGETS[name]) for name in steps},
    }


def _row(seconds: list[float], size: int, copy: float, target: float | None) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "gb_per_s": size / median / 1e9,
        "ratio": median / copy,
        "target": target,
    }


def _copy(source: Sequence[Bits], target: Sequence[Bits], threads: int) -> None:
    pieces = [(k, at) for k, bits in enumerate(source) for at in range(0, bits.size, PIECE)]

    def copy_piece(piece: tuple[int, int]) -> None:
        k, at = piece
        np.copyto(target[k][at : at + PIECE], source[k][at : at + PIECE])

    parallel_map(copy_piece, pieces, threads=threads)


def _apply(tensors: Sequence[Bits], patches: Sequence[Patch], threads: int) -> None:
    parallel_map(lambda p: digest_change(tensors[p.ordinal], p), patches, threads=threads)
    parallel_map(lambda p: apply_patch(tensors[p.ordinal], p), patches, threads=threads)


def _encode(patches: Sequence[Patch]) -> str:
    digest = hashlib.sha256()
    for buffer in codec.encode(patches):
        digest.update(buffer)
    return digest.hexdigest()
