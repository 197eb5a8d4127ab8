"""Showing a run as it goes: a live table on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console

from thinwire.demo.display import Screen
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
weights that played were behind when a game was taken from the queue, mean and most; the next step
is trained on it. ``tok/s``: until the next version."""

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


class Display(Screen):
    """Say what begins, show versions as they come.

    Without a terminal, a version is a line once every server has it or there is a newer one.
    """

    def __init__(self, ledger: Ledger, console: Console | None = None) -> None:
        # a thread that redraws would read what this one changes
        super().__init__(HEADERS, _WIDTHS, min_width=_MIN_WIDTH, console=console, redraws=None)
        self._ledger = ledger
        self._doing = ""
        self._last = ""
        self._printed = -1
        self._drawn = 0.0
        self._won: dict[int, str] = {}
        self._counted = (0, 0)
        self._speeds: dict[int, float | None] = {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._count_games()
        if self._live is None:
            self._print_versions(sorted(self._ledger.rows))
        super().__exit__(kind, error, trace)

    def say(self, text: str, source: str = "") -> None:
        """One line about what happens, with the time since the start."""
        if source:
            self._last = text
        super().say(text, source)

    def status(self, text: str) -> None:
        """What is being done, under the table; elsewhere a line, until versions tell enough."""
        if self._live is None and self._printed < 0 and text != self._doing:
            self._print(f"[{self._clock():5.1f} s] {text}")
        self._doing = text
        self._draw()

    def refresh(self) -> None:
        """The ledger may have changed. Call it often: nothing else has the clock go on."""
        self._count_games()
        if self._live is None:
            versions = sorted(self._ledger.rows)
            servers = len(self._ledger.servers)
            whole = [v for v in versions if len(self._ledger.rows[v].arrivals) == servers]
            reached = max([*whole, *versions[:-1]], default=-1)
            self._print_versions([version for version in versions if version <= reached])
        elif time.monotonic() - self._drawn > _REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        last = f" · last: {self._last}" if self._last else ""
        super().status(self._doing + last)
        super()._draw()

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

    def _print_versions(self, versions: Sequence[int]) -> None:
        for version in versions:
            if version > self._printed:
                if self._printed < 0:
                    self._print_row(HEADERS)
                self._printed = version
                self._print_row(self._cells(version))

    def _rows(self) -> Iterable[tuple[Sequence[str], bool]]:
        for version in sorted(self._ledger.rows):
            served = len(self._ledger.rows[version].arrivals) == len(self._ledger.servers)
            yield self._cells(version), served

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
