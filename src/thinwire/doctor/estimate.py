"""What a version costs at a bucket, from its measured speed: seconds, requests and, given prices,
money. Pure arithmetic; every assumption is a constant here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BYTES_PER_CHANGE", "PUBLISH", "PULL", "Prices", "Speed", "estimate"]

SHARES = (0.005, 0.01)
"""Elements that change from one version to the next, as in reinforcement learning."""

BYTES_PER_CHANGE = 0.9
"""Of a payload; what the default codec needs for such updates."""

ELEMENT_BYTES = 2
COMMIT_BYTES = 1000

PUBLISH = {"create": 2, "head": 1, "get": 1}
"""Requests of one publish: payload, its presence, the last commit still there, the new commit."""

PULL = {"head": 2, "get": 2}
"""Requests of a follower per version: the next one and the one after, commit, payload. A look
that finds nothing new is one HEAD more."""

VERSIONS = 1000


@dataclass(frozen=True)
class Speed:
    """Medians of requests for 1 kB in seconds, and bytes per second of a large object."""

    latency: Mapping[str, float]
    up: float
    down: float


@dataclass(frozen=True)
class Prices:
    """In any currency; None is not counted.

    Attributes:
        put: per 1000 writing requests.
        get: per 1000 reading requests.
        egress_gb: per 10**9 bytes that leave the store.
    """

    put: float | None = None
    get: float | None = None
    egress_gb: float | None = None


def estimate(model_bytes: int, speed: Speed | None, prices: Prices) -> list[dict[str, Any]]:
    """One row per assumed share of changed elements.

    Returns:
        rows of ``changed`` (share), ``payload_bytes``, ``full_bytes``, ``publish_s`` and ``pull_s``
        (transfer only, without diff and decode; None where the speed is not known), ``requests``
        per version {``publish``, ``pull``}, ``cost`` (None without prices).
    """
    rows = []
    for share in SHARES:
        payload = round(model_bytes / ELEMENT_BYTES * share * BYTES_PER_CHANGE)
        moved = payload + COMMIT_BYTES
        rows.append(
            {
                "changed": share,
                "payload_bytes": payload,
                "full_bytes": model_bytes,
                "publish_s": None if speed is None else _seconds(PUBLISH, speed, moved / speed.up),
                "pull_s": None if speed is None else _seconds(PULL, speed, moved / speed.down),
                "requests": {"publish": sum(PUBLISH.values()), "pull": sum(PULL.values())},
                "cost": _cost(moved, prices),
            }
        )
    return rows


def _seconds(requests: Mapping[str, int], speed: Speed, transfer: float) -> float:
    return transfer + sum(n * speed.latency[operation] for operation, n in requests.items())


def _cost(moved: int, prices: Prices) -> dict[str, Any] | None:
    """Per 1000 versions: of the publisher, and of each replica. Looks for nothing are not in it."""
    if prices == Prices():
        return None
    put, get, egress = prices.put or 0.0, prices.get or 0.0, prices.egress_gb or 0.0
    reads = PUBLISH["head"] + PUBLISH["get"]
    thousands = VERSIONS / 1000
    return {
        "versions": VERSIONS,
        "publisher": thousands * (PUBLISH["create"] * put + reads * get),
        "replica": thousands * sum(PULL.values()) * get + VERSIONS * moved / 1e9 * egress,
        "without": [name for name in ("put", "get", "egress_gb") if getattr(prices, name) is None],
    }
