"""Line and stacked bar charts as SVG text. Colours and fonts come from the page's stylesheet.

Values that are None are gaps. Every x has a hover target that names all values there, so that a
chart can be read exactly without a script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Baseline", "Series", "bars", "lines", "ticks"]

Format = Callable[[float], str]

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 30


@dataclass(frozen=True)
class Series:
    """Named values, one per x. ``colour`` is the number of one of the page's series colours."""

    name: str
    values: Sequence[float | None]
    colour: int = 1
    dots: bool = False


@dataclass(frozen=True)
class Baseline:
    """A horizontal line to hold a series against."""

    name: str
    value: float


def ticks(high: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to at least ``high``, about ``count`` of them above 0."""
    if not high > 0 or not math.isfinite(high):
        return [0.0, 1.0]
    raw = high / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    return [k * step for k in range(math.ceil(high / step - 1e-9) + 1)]


def lines(
    xs: Sequence[int],
    series: Sequence[Series],
    show: Format,
    *,
    x_name: str = "version",
    baseline: Baseline | None = None,
) -> str:
    """A line per series over ``xs``; ``dots`` series are dots without a line."""
    highest = [v for s in series for v in s.values if v is not None]
    highest += [baseline.value] if baseline else []
    frame = _Frame(xs, ticks(max(highest, default=0.0)), show, x_name)
    marks = []
    if baseline:
        y = frame.y(baseline.value)
        marks.append(
            f'<line class="base" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    for s in series:
        points = [(frame.x(k), frame.y(v)) for k, v in enumerate(s.values) if v is not None]
        if not s.dots and len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            marks.append(f'<polyline class="line s{s.colour}" points="{path}"/>')
        if s.dots or len(points) < 2:
            marks += [
                f'<circle class="dot s{s.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
                for x, y in points
            ]
    return frame.svg(marks, series, baseline)


def bars(
    xs: Sequence[int], series: Sequence[Series], show: Format, *, x_name: str = "version"
) -> str:
    """One bar per x, the series stacked in it from the bottom up."""
    sums = [sum(s.values[k] or 0.0 for s in series) for k in range(len(xs))]
    frame = _Frame(xs, ticks(max(sums, default=0.0)), show, x_name)
    width = max(1.5, min(26.0, 0.72 * frame.pitch))
    marks = []
    for k in range(len(xs)):
        below = 0.0
        for s in series:
            value = s.values[k] or 0.0
            top, bottom = frame.y(below + value), frame.y(below)
            below += value
            if bottom > top:
                marks.append(
                    f'<rect class="bar s{s.colour}" x="{frame.x(k) - width / 2:.1f}" '
                    f'y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}"/>'
                )
    return frame.svg(marks, series, None)


class _Frame:
    """Axes: where values lie, and everything around the marks."""

    def __init__(self, xs: Sequence[int], grid: list[float], show: Format, x_name: str) -> None:
        self._xs, self._grid, self._show, self._x_name = xs, grid, show, x_name
        self.pitch = (_WIDTH - _LEFT - _RIGHT) / max(1, len(xs))

    def x(self, index: int) -> float:
        return _LEFT + (index + 0.5) * self.pitch

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self._grid[-1] * (_HEIGHT - _TOP - _BOTTOM)

    def svg(self, marks: list[str], series: Sequence[Series], baseline: Baseline | None) -> str:
        parts = [*self._axes(), *marks, *self._hover(series)]
        legend = [f'<span class="key s{s.colour}">{escape(s.name)}</span>' for s in series]
        if baseline:
            text = f"{baseline.name}: {self._show(baseline.value)}"
            legend.append(f'<span class="key base">{escape(text)}</span>')
        keys = f'<div class="keys">{"".join(legend)}</div>' if len(legend) > 1 else ""
        names = ", ".join(s.name for s in series)
        return (
            f'{keys}<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(names)} by {escape(self._x_name)}">{"".join(parts)}</svg>'
        )

    def _axes(self) -> list[str]:
        parts = []
        for value in self._grid:
            y = self.y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/><text class="tick" x="{_LEFT - 7}" '
                f'y="{y + 4:.1f}" text-anchor="end">{escape(self._show(value))}</text>'
            )
        every = max(1, math.ceil(len(self._xs) / 16))
        for k, x in enumerate(self._xs):
            if k % every == 0:
                parts.append(
                    f'<text class="tick" x="{self.x(k):.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
                    f'text-anchor="middle">{x}</text>'
                )
        parts.append(
            f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" '
            f'text-anchor="end">{escape(self._x_name)}</text>'
        )
        return parts

    def _hover(self, series: Sequence[Series]) -> list[str]:
        parts = []
        for k, x in enumerate(self._xs):
            told = [f"{self._x_name} {x}"]
            for s in series:
                value = s.values[k]
                if value is not None:
                    told.append(f"{s.name}: {self._show(value)}")
            parts.append(
                f'<rect class="hover" x="{self.x(k) - self.pitch / 2:.1f}" y="{_TOP}" '
                f'width="{self.pitch:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}">'
                f"<title>{escape(chr(10).join(told))}</title></rect>"
            )
        return parts
