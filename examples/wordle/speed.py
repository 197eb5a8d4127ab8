"""Tokens per second, from counters that are read now and then. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Sample", "around", "reading_s", "tokens_between", "tokens_per_s"]


@dataclass(frozen=True)
class Sample:
    """Tokens that a server has generated since it started, at a clock time."""

    at: float
    server: str
    tokens: float


def tokens_between(samples: Sequence[Sample], edges: Sequence[float]) -> list[float]:
    """Tokens of all servers from each of the ascending ``edges`` to the next.

    Between two readings a server is taken to generate evenly; across a restart, which sets its
    counter back, to generate nothing.
    """
    found = [0.0] * (len(edges) - 1)
    for before, after in _steps(samples):
        length, made = after.at - before.at, after.tokens - before.tokens
        if made <= 0 or length <= 0 or after.at <= edges[0] or before.at >= edges[-1]:
            continue
        for k, (low, high) in enumerate(pairwise(edges)):
            inside = min(after.at, high) - max(before.at, low)
            found[k] += made * max(0.0, inside) / length
    return found


def tokens_per_s(samples: Sequence[Sample], start: float, end: float) -> float | None:
    """Of all servers together; None if nothing was read from before until after the start."""
    if end <= start or not any(b.at <= start < a.at for b, a in _steps(samples)):
        return None
    end = min(end, samples[-1].at)
    return tokens_between(samples, (start, end))[0] / (end - start)


def around(
    samples: Sequence[Sample], moments: Sequence[float], offsets: Sequence[float]
) -> list[float | None]:
    """Tokens per second of one server from each offset to the next, in the mean over the moments.

    Moments that the readings do not reach around are left out; None if there are no others.
    """
    sums, count = [0.0] * (len(offsets) - 1), 0
    for moment in moments:
        edges = [moment + offset for offset in offsets]
        if not samples or samples[0].at > edges[0] or samples[-1].at < edges[-1]:
            continue
        count += 1
        for k, made in enumerate(tokens_between(samples, edges)):
            sums[k] += made / (offsets[k + 1] - offsets[k])
    return [total / count if count else None for total in sums]


def reading_s(samples: Sequence[Sample]) -> float | None:
    """Seconds from one reading of a server's counter to the next, in the median."""
    lengths = sorted(after.at - before.at for before, after in _steps(samples))
    return lengths[len(lengths) // 2] if lengths else None


def _steps(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    own: dict[str, list[Sample]] = {}
    for sample in samples:
        own.setdefault(sample.server, []).append(sample)
    return [pair for of_server in own.values() for pair in pairwise(of_server)]
