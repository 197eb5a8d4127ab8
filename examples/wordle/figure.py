"""A chart with its title: for a page, or as an SVG file that needs nothing around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from thinwire.demo.charts import Series, bars, lines

__all__ = ["Figure"]

_TITLE, _KEYS, _MARGIN = 30, 20, 10
_MARKS = (".grid", ".tick", ".line", ".dot", ".base")


@dataclass(frozen=True)
class Figure:
    """A chart with a title and what it shows.

    Attributes:
        name: of its file.
        stacked: bars rather than lines.
    """

    name: str
    title: str
    says: str
    xs: Sequence[int]
    series: Sequence[Series]
    show: Callable[[float], str]
    x_name: str = "version"
    stacked: bool = False

    def html(self) -> str:
        """For a page with the style of thinwire's reports."""
        says = f"<b>{escape(self.title)}</b> {escape(self.says)}"
        return f"<figure><figcaption>{says}</figcaption>{self._chart()}</figure>"

    def svg(self) -> str:
        """A whole file, with its title, its colours for light and dark, and no hover targets."""
        found = re.search(r'<svg viewBox="0 0 (\d+) (\d+)"[^>]*>(.*)</svg>', self._chart(), re.S)
        if found is None:
            raise ValueError("a chart is not drawn as it used to be")
        width, height = int(found[1]), int(found[2])
        marks = re.sub(r'<rect class="hover".*?</rect>', "", found[3], flags=re.S)
        keys = self._keys() if len(self.series) > 1 else ""
        top = _TITLE + (_KEYS if keys else 0)
        whole = f"0 0 {width} {height + top + _MARGIN}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{whole}" width="{width}" '
            f'role="img" aria-label="{escape(self.title)}"><style>{_style()}</style>'
            f'<rect class="card" width="100%" height="100%" rx="8"/>'
            f'<text class="title" x="14" y="23">{escape(self.title)}</text>{keys}'
            f'<g transform="translate(0 {top})">{marks}</g></svg>\n'
        )

    def _chart(self) -> str:
        draw = bars if self.stacked else lines
        return draw(self.xs, self.series, self.show, x_name=self.x_name)

    def _keys(self) -> str:
        parts, x = [], 14.0
        for s in self.series:
            parts.append(
                f'<rect class="bar s{s.colour}" x="{x:.0f}" y="{_TITLE + 8}" width="12" '
                f'height="4"/><text class="tick" x="{x + 18:.0f}" y="{_TITLE + 14}">'
                f"{escape(s.name)}</text>"
            )
            x += 40 + 6.4 * len(s.name)
        return "".join(parts)


def _style() -> str:
    """The palette and the marks' rules of the reports' stylesheet, where a line is whole rules."""
    sheet = files("thinwire.demo").joinpath("report.css").read_text(encoding="utf-8")
    palette, _, rules = sheet.partition("\n* ")
    marks = [line for line in rules.splitlines() if line.startswith(_MARKS)]
    own = (
        "svg { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }",
        ".card { fill: var(--card); stroke: var(--edge); }",
        ".title { fill: var(--ink); font-size: 15px; font-weight: 600; }",
    )
    return "\n".join((palette, *marks, *own))
