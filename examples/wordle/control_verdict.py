"""What the control experiment found: are both ways the same, and what does each cost? No I/O.

A way is a list of syncs, as ``wordle.control_train`` tells them, and an end. Sync 0 carries the
weights that training starts from, in both ways whole: it counts for the comparison of weights, not
for the costs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["TARGETS", "Way", "costs", "judge"]

TARGETS = {"held": 10.0, "bytes": 100.0}
"""How many times less than whole checkpoints deltas are to cost."""


@dataclass(frozen=True)
class Way:
    """A training run.

    Attributes:
        syncs: in order.
        end: of the trainer; None if it has not come to one.
    """

    syncs: tuple[Mapping[str, Any], ...]
    end: Mapping[str, Any] | None

    @classmethod
    def told(cls, events: Iterable[Mapping[str, Any]]) -> Way:
        """From the lines that the trainer wrote."""
        all_of_it = list(events)
        ends = [event for event in all_of_it if event["event"] == "end"]
        syncs = tuple(event for event in all_of_it if event["event"] == "sync")
        return cls(syncs, ends[-1] if ends else None)


def judge(ways: Mapping[str, Way], steps: int) -> dict[str, Any]:
    """Compare all ways, sync by sync, and what they cost.

    Args:
        ways: ``delta``, ``full`` and, if games were played, ``record``.
        steps: optimizer steps that each was to do.

    Returns:
        ``identical``, ``trainers_identical``, ``servers_identical``; ``differences``, in words;
        ``syncs``: of every sync the masters' SHA-256 and a SHA-256 over vLLM's checksums of every
        server; ``costs``, see :func:`costs`.
    """
    unlike: dict[str, list[str]] = {"trainers": [], "servers": []}
    for name, way in ways.items():
        unlike["trainers"] += _incomplete(name, way, steps)
    rows = []
    for k in range(steps + 1):
        there = {name: way.syncs[k] for name, way in ways.items() if k < len(way.syncs)}
        masters = {name: sync["masters"] for name, sync in there.items()}
        if len(set(masters.values())) > 1:
            unlike["trainers"].append(f"sync {k}: the trainers' masters differ: {masters}")
        sums = {
            f"{name}/server-{n}": found
            for name, sync in there.items()
            for n, found in enumerate(sync["checksums"])
        }
        unlike["servers"] += [f"sync {k}: {what}" for what in _unlike(sums)]
        rows.append(
            {"masters": masters, "served": {name: _sha256(found) for name, found in sums.items()}}
        )
    ends = {name: way.end["masters"] for name, way in ways.items() if way.end is not None}
    if len(set(ends.values())) > 1:
        unlike["trainers"].append(f"the trainers end with different masters: {ends}")
    return {
        "identical": not any(unlike.values()),
        "trainers_identical": not unlike["trainers"],
        "servers_identical": not unlike["servers"],
        "differences": [*unlike["trainers"], *unlike["servers"]],
        "masters": ends,
        "tensors": max((len(s) for s in _all_sums(ways)), default=0),
        "syncs": rows,
        "costs": costs(ways),
    }


def _incomplete(name: str, way: Way, steps: int) -> list[str]:
    found = []
    if way.end is None or len(way.syncs) != steps + 1:
        found.append(f"{name}: {len(way.syncs)} syncs instead of {steps + 1}, or no end")
    elif way.end.get("left", 0):
        found.append(f"{name}: {way.end['left']} samples of the record were not used")
    if way.end is not None and way.end.get("elsewhere", 0):
        found.append(f"{name}: {way.end['elsewhere']} samples were taken at another version")
    servers = {len(sync["checksums"]) for sync in way.syncs}
    if any(not sums for sync in way.syncs for sums in sync["checksums"]) or servers != {2}:
        found.append(f"{name}: not every server's checksums are known")
    return found


def _unlike(sums: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Servers whose tensors are not those of the first."""
    (first, expected), *others = sums.items() or [("", {})]
    found = []
    for name, own in others:
        names = sorted(k for k in expected.keys() | own.keys() if expected.get(k) != own.get(k))
        if names:
            found.append(f"{name} serves other weights than {first}: {', '.join(names)}")
    return found


def _all_sums(ways: Mapping[str, Way]) -> list[Mapping[str, str]]:
    return [sums for way in ways.values() for sync in way.syncs for sums in sync["checksums"]]


def _sha256(sums: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


# --- costs ---------------------------------------------------------------------------------


def costs(ways: Mapping[str, Way]) -> dict[str, Any]:
    """What a sync costs: medians over the syncs, or over syncs and servers.

    Returns:
        ``delta`` and ``full``, each ``bytes`` of a version; seconds: ``held_s``, for which a
        server cannot generate, ``wait_s``, for which the trainer waits; for full ``load_s``
        alone; for delta ``stage_s``. ``ratio``: full's by delta's. ``targets_met``. With a
        recording ``live_held_s``: while games were played.
    """
    delta, full = (_cost(ways[name]) for name in ("delta", "full"))
    ratio = {key: full[key] / delta[key] for key in ("bytes", "held_s", "wait_s") if delta[key]}
    ratio["load_s"] = full["load_s"] / delta["held_s"] if delta["held_s"] else 0.0
    met = {
        "held": ratio.get("held_s", 0.0) >= TARGETS["held"],
        "bytes": ratio.get("bytes", 0.0) >= TARGETS["bytes"],
    }
    found = {"delta": delta, "full": full, "ratio": ratio, "targets_met": met}
    if "record" in ways:
        found["live_held_s"] = _cost(ways["record"])["held_s"]
    return found


def _cost(way: Way) -> dict[str, float]:
    syncs = way.syncs[1:]
    held = _of_servers(syncs, "held_s")
    return {
        "bytes": _median([sync["bytes"] for sync in syncs]),
        "held_s": _median(held),
        "held_least_s": min(held, default=0.0),
        "held_most_s": max(held, default=0.0),
        "wait_s": _median([sync["wait_s"] for sync in syncs]),
        "load_s": _median(_of_servers(syncs, "load_s")),
        "write_s": _median([sync["write_s"] for sync in syncs if "write_s" in sync]),
        "stage_s": _median(_of_servers(syncs, "stage_s")),
    }


def _of_servers(syncs: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Seconds of every sync and server; a server need not have moved."""
    return [s for sync in syncs for s in sync.get(key, ()) if s is not None]


def _median(values: Sequence[float]) -> float:
    return float(median(values)) if values else 0.0
