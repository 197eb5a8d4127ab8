"""What the codecs are meant to reach, judged from a benchmark's document. Nothing is measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["judge"]

Document = Mapping[str, Any]

_LARGE = 300_000
_OVER_BOUND_LARGE, _OVER_BOUND_SMALL = 1.03, 1.05
_BELOW_ARC_EACH, _BELOW_ARC_MEAN = 1.8, 2.0
_DRAWN_BYTES = 6_000_000
_COPIES = {"compact": 3.5, "packed": 2.5}
_TIMES_ARC = 20.0
_MB_PER_S = 200.0


def judge(document: Document) -> list[dict[str, Any]]:
    """Every target: what, value, limit, ``most`` or ``least``, and whether it is met."""
    return [*_sizes(document), *_drawn(document), *_speeds(document), *_floor(document)]


def _row(what: str, value: float, limit: float, *, most: bool) -> dict[str, Any]:
    met = value <= limit if most else value >= limit
    kind = "most" if most else "least"
    return {"what": what, "value": value, "limit": limit, "kind": kind, "met": met}


def _sizes(document: Document) -> Iterator[dict[str, Any]]:
    smaller: dict[str, list[float]] = {"arc_v3": [], "arc_v3_as_shipped": []}
    for row in document["pairs"]:
        compact = row["sizes"]["compact"]
        large = compact - row["commit_bytes"] > _LARGE
        limit = _OVER_BOUND_LARGE if large else _OVER_BOUND_SMALL
        ratio = compact / row["bound"]["bytes"]
        yield _row(f"{row['pair']}: compact / bound", ratio, limit, most=True)
        for name in [n for n in smaller if n in row["sizes"]]:
            smaller[name].append(row["sizes"][name] / compact)
            what = f"{row['pair']}: {name} / compact"
            yield _row(what, smaller[name][-1], _BELOW_ARC_EACH, most=False)
    for name, ratios in smaller.items():
        if ratios:
            mean = statistics.fmean(ratios)
            yield _row(f"all pairs: {name} / compact, mean", mean, _BELOW_ARC_MEAN, most=False)


def _drawn(document: Document) -> Iterator[dict[str, Any]]:
    drawn = document.get("drawn")
    if drawn:
        size = drawn["sizes"]["compact"]
        yield _row(f"{drawn['what']}: bytes per version", size, _DRAWN_BYTES, most=True)


def _speeds(document: Document) -> Iterator[dict[str, Any]]:
    speed = document.get("speed")
    if not speed:
        return
    for codec, limit in _COPIES.items():
        for way in ("encode", "decode"):
            value = speed["steps"][f"{codec}_{way}"]["copies"]
            yield _row(f"{codec} {way}: copies of the checkpoint", value, limit, most=True)
    for row in speed["arc_v3"]:
        for way, value in row["times_faster"].items():
            what = f"{row['on']}: compact {way}, times faster than arc_v3"
            yield _row(what, value, _TIMES_ARC, most=False)


def _floor(document: Document) -> Iterator[dict[str, Any]]:
    for row in document.get("synthetic", []):
        for step, speed in row.get("speed", {}).items():
            if step != "copy":
                what = f"{row['dtype']} {100 * row['density']:g} %: {step}, MB per s and core"
                yield _row(what, speed["mb_per_s"], _MB_PER_S, most=False)
