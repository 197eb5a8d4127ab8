"""Showing a run as it goes: a live table on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thinwire.demo.table import percent, size
from wordle.facts import UNKNOWN, held, rate, shown, times
from wordle.ledger import Ledger, Row
from wordle.speed import tokens_per_s

__all__ = ["HEADERS", "Display", "cells"]

HEADERS = (
    "ver", "step", "reward", "won", "changed", "payload", "full/", "pause", "stale", "tok/s"
)  # fmt: skip
"""``won``: of the games that ended since the version before. ``full/``: a full checkpoint over the
payload. ``pause``: of the server that held its requests longest. ``stale``: versions by which the
weights that played were behind, mean and most. ``tok/s``: until the next version."""

_WIDTHS = (3, 4, 6, 7, 7, 8, 5, 7, 7, 6)
_MIN_WIDTH = 74
_REDRAW_S = 0.25


def cells(ledger: Ledger, row: Row, won: str = UNKNOWN, speed: float | None = None) -> list[str]:
    """A version's cells under :data:`HEADERS`; what is not known yet shows as ``…``."""
    stale = (row.logs.get("sample/staleness_mean"), row.logs.get("sample/staleness_max"))
    return [
        str(row.version),
        str(row.step),
        shown(row.logs.get("reward"), lambda r: f"{r:.3f}"),
        won,
        percent(row.changed_share),
        shown(row.payload_bytes, size),
        shown(row.payload_bytes, lambda b: times(ledger.full_bytes, b) + "x"),
        held(row.worst_pause_s),
        UNKNOWN if None in stale else f"{stale[0]:.1f}, {stale[1]:.0f}",
        rate(speed),
    ]


class Display:
    """Say what begins, show versions as they come.

    On a terminal the table is redrawn in place, as many of its last rows as fit, and printed whole
    at the end. Elsewhere a version is a line, once every server has it or there is a newer one.
    """

    def __init__(self, ledger: Ledger, console: Console | None = None) -> None:
        self._ledger = ledger
        self._console = console or Console(stderr=True, highlight=False, markup=False)
        self._started = time.monotonic()
        self._live: Live | None = None
        self._status = ""
        self._last = ""
        self._printed = -1
        self._drawn = 0.0
        self._won: dict[int, str] = {}
        self._counted = (0, 0)
        self._speeds: dict[int, float | None] = {}

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, transient=True, get_renderable=self._picture,
                auto_refresh=False,  # its thread would read what this one changes
            )  # fmt: skip
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._count_games()
        if self._live is None:
            self._print(sorted(self._ledger.rows))
            return
        self._live.stop()
        self._live = None
        if self._ledger.rows:
            self._console.print(self._table(len(self._ledger.rows)))

    def say(self, text: str, source: str = "") -> None:
        """One line about what happens, with the time since the start."""
        if source:
            self._last = text
            text = f"[{self._clock():6.1f} s] {source:<9}{text}"
        self._console.print(text, soft_wrap=True)

    def status(self, text: str) -> None:
        """What is being done, under the table; elsewhere a line, until versions tell enough."""
        if self._live is None and self._printed < 0 and text != self._status:
            self._console.print(f"[{self._clock():6.1f} s] {text}", soft_wrap=True)
        self._status = text
        self._draw()

    def refresh(self) -> None:
        """The ledger may have changed. Call it often: nothing else has the clock go on."""
        self._count_games()
        if self._live is None:
            versions = sorted(self._ledger.rows)
            servers = len(self._ledger.servers)
            whole = [v for v in versions if len(self._ledger.rows[v].arrivals) == servers]
            reached = max([*whole, *versions[:-1]], default=-1)
            self._print([version for version in versions if version <= reached])
        elif time.monotonic() - self._drawn > _REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        if self._live is not None:
            self._drawn = time.monotonic()
            self._live.refresh()

    def _count_games(self) -> None:
        """How many games ended since the version before, for each version that is new."""
        new = [version for version in self._ledger.rows if version not in self._won]
        if not new:
            return
        games = self._ledger.games
        played, won = len(games), sum(bool(game["won"]) for game in games)
        before = self._counted
        self._won.update(dict.fromkeys(new, UNKNOWN))
        if played > before[0]:
            self._won[max(new)] = f"{won - before[1]}/{played - before[0]}"
        self._counted = (played, won)

    def _print(self, versions: Sequence[int]) -> None:
        for version in versions:
            if version > self._printed:
                if self._printed < 0:
                    self._console.print(_line(HEADERS), soft_wrap=True)
                self._printed = version
                self._console.print(_line(self._cells(version)), soft_wrap=True)

    def _cells(self, version: int) -> list[str]:
        row = self._ledger.rows[version]
        return cells(self._ledger, row, self._won.get(version, UNKNOWN), self._speed(row))

    def _speed(self, row: Row) -> float | None:
        """Until the next version, or until now."""
        if row.version in self._speeds:
            return self._speeds[row.version]
        after = [other.at for v, other in self._ledger.rows.items() if v > row.version]
        samples = self._ledger.samples
        if not samples:
            return None
        end = min(after, default=samples[-1].at)
        found = tokens_per_s(samples, row.at, end)
        if after and samples[-1].at >= end:
            self._speeds[row.version] = found
        return found

    def _picture(self) -> Group:
        shown_rows = max(3, self._console.height - 8)
        last = f" · last: {self._last}" if self._last else ""
        parts = [self._table(shown_rows)] if self._ledger.rows else []
        return Group(*parts, Text(f"{self._clock():.0f} s  {self._status}{last}", style="dim"))

    def _table(self, last: int) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
        wide = self._console.width >= _MIN_WIDTH
        for header, width in zip(HEADERS, _WIDTHS):
            table.add_column(header, justify="right", no_wrap=True, min_width=width if wide else 1)
        for version in sorted(self._ledger.rows)[-last:]:
            served = len(self._ledger.rows[version].arrivals) == len(self._ledger.servers)
            table.add_row(*self._cells(version), style="" if served else "dim")
        return table

    def _clock(self) -> float:
        return time.monotonic() - self._started


def _line(texts: Sequence[str]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, _WIDTHS))
