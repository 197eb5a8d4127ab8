"""How long a version takes on both sides, against one copy of the checkpoint in memory.

Wall time is what counts, CPU time over all threads stands beside it: on a machine that does other
work too the two tell the difference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from thinwire import codec as codecs
from thinwire.anchor import Progress
from thinwire.cli.bench_rivals import Delta, arc_compress, arc_decompress, torch_states
from thinwire.cli.bench_state import named
from thinwire.diff import diff
from thinwire.digest import digest_change
from thinwire.patch import Bits, Patch, apply_patch
from thinwire.schema import Schema
from thinwire.weights import PIECE, Weights
from thinwire.workers import parallel_map

__all__ = ["arc_speed", "both_ways", "part_of", "timed"]

Step = Callable[[], object]


def timed(
    steps: Mapping[str, Step], size: int, repeat: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Medians of steps that take turns, after one round that warms up.

    Args:
        size: bytes of the checkpoint they work on.

    Returns:
        By step ``seconds``, ``cpu_seconds``, and ``mb_per_s`` and ``mb_per_cpu_s`` of checkpoint.
    """
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(repeat + 1):
        for number, (name, step) in enumerate(steps.items()):
            started, used = time.perf_counter(), time.process_time()
            result = step()
            used, ended = time.process_time() - used, time.perf_counter()
            del result
            if round_:
                wall[name].append(ended - started)
                cpu[name].append(used)
            progress("measuring", round_ * len(steps) + number + 1, (repeat + 1) * len(steps))
    rows = {}
    for name in steps:
        seconds, cpu_seconds = statistics.median(wall[name]), statistics.median(cpu[name])
        rows[name] = {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "mb_per_s": size / seconds / 1e6,
            "mb_per_cpu_s": size / max(cpu_seconds, 1e-9) / 1e6,
        }
    return rows


def both_ways(
    delta: Delta,
    names: Sequence[str],
    *,
    threads: int,
    repeat: int,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """Time ``copy``, and ``<codec>_encode`` and ``<codec>_decode`` for every codec named.

    Encoding is diff and encode; decoding is decode, digests of the changes, and apply. The state
    that changes are applied to is put back between rounds, outside of what is timed.
    """
    mirror = [bits.copy() for bits in delta.old]
    weights = Weights.of(named(delta.schema, list(delta.new)))
    back = [
        Patch(p.ordinal, p.spec, p.positions, delta.old[p.ordinal][p.positions])
        for p in delta.patches
    ]

    def encode(name: str) -> Step:
        def run() -> object:
            patches = diff(delta.old, weights, threads=threads)
            return codecs.encode(patches, codec=name, base=delta.old, threads=threads)

        return run

    def decode(name: str, payload: bytes) -> Step:
        def run() -> object:
            patches = codecs.decode(payload, delta.schema, mirror, threads=threads)
            _apply(mirror, patches, threads)
            return patches

        return run

    steps: dict[str, Step] = {"copy": lambda: _copy(delta.old, mirror, threads)}
    for name in names:
        payload = b"".join(codecs.encode(delta.patches, codec=name, base=delta.old))
        steps[f"{name}_encode"] = encode(name)
        steps[f"{name}_decode"] = decode(name, payload)
        steps[f"{name}_undo"] = lambda: _scatter(mirror, back, threads)
    rows = timed(steps, delta.schema.nbytes, repeat, progress)
    copy = rows["copy"]
    return {
        name: row
        | {
            "copies": row["seconds"] / copy["seconds"],
            "cpu_copies": row["cpu_seconds"] / max(copy["cpu_seconds"], 1e-9),
        }
        for name, row in rows.items()
        if not name.endswith("_undo")
    }


def _copy(source: Sequence[Bits], target: Sequence[Bits], threads: int) -> None:
    pieces = [(k, at) for k, bits in enumerate(source) for at in range(0, bits.size, PIECE)]

    def copy_piece(piece: tuple[int, int]) -> None:
        k, at = piece
        np.copyto(target[k][at : at + PIECE], source[k][at : at + PIECE])

    parallel_map(copy_piece, pieces, threads=threads)


def _apply(tensors: Sequence[Bits], patches: Sequence[Patch], threads: int) -> None:
    parallel_map(lambda p: digest_change(tensors[p.ordinal], p), patches, threads=threads)
    _scatter(tensors, patches, threads)


def _scatter(tensors: Sequence[Bits], patches: Sequence[Patch], threads: int) -> None:
    parallel_map(lambda p: apply_patch(tensors[p.ordinal], p), patches, threads=threads)


def part_of(delta: Delta, limit: int) -> Delta:
    """The first tensors of at most ``limit`` elements together, large ones passed over."""
    chosen: list[int] = []
    left = limit
    for ordinal, spec in enumerate(delta.schema):
        if spec.numel <= left:
            chosen.append(ordinal)
            left -= spec.numel
    place = {ordinal: k for k, ordinal in enumerate(chosen)}
    patches = [
        Patch(place[p.ordinal], p.spec, p.positions, p.bits)
        for p in delta.patches
        if p.ordinal in place
    ]
    old, new = ([state[k] for k in chosen] for state in (delta.old, delta.new))
    return Delta(Schema(tuple(delta.schema[k] for k in chosen)), old, new, patches)


def arc_speed(delta: Delta, threads: int, repeat: int, progress: Progress) -> dict[str, Any]:
    """``arc_v3`` and ``compact`` both ways on the same delta.

    The package runs with the threads and settings it comes with, and writes its file; decoding
    makes new tensors from the old ones.
    """
    old, new = torch_states(delta)
    made, size = arc_compress(old, new)
    nbytes = delta.schema.nbytes
    arc = timed(
        {"encode": lambda: arc_compress(old, new), "decode": lambda: arc_decompress(old, made)},
        nbytes,
        max(1, repeat // 2),
        progress,
    )
    ours = both_ways(delta, ["compact"], threads=threads, repeat=repeat, progress=progress)
    return {
        "bytes": nbytes,
        "changed": sum(map(len, delta.patches)),
        "arc_v3_file": size,
        "arc_v3": arc,
        "compact": {way: ours[f"compact_{way}"] for way in ("encode", "decode")},
        "times_faster": {
            way: arc[way]["seconds"] / ours[f"compact_{way}"]["seconds"]
            for way in ("encode", "decode")
        },
        "times_less_cpu": {
            way: arc[way]["cpu_seconds"] / ours[f"compact_{way}"]["cpu_seconds"]
            for way in ("encode", "decode")
        },
    }
