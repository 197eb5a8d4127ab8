"""Showing a run as it goes: a live table on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thinwire.demo.ledger import Ledger, Row
from thinwire.demo.table import HEADERS, WIDTHS, cells

__all__ = ["Display"]

_MIN_WIDTH = 84


class Display:
    """Say what begins, show versions as they come.

    On a terminal the table is redrawn in place, as many of its last rows as fit, and printed whole
    at the end; without one, each version is a line once both servers have it.
    """

    def __init__(self, ledger: Ledger, console: Console | None = None) -> None:
        self._ledger = ledger
        self._console = console or Console(stderr=True, highlight=False, markup=False)
        self._started = time.monotonic()
        self._live: Live | None = None
        self._status = ""
        self._header_shown = False

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, transient=True, get_renderable=self._picture,
                refresh_per_second=4,
            )  # fmt: skip
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        if self._ledger.rows:
            self._console.print(self._table(len(self._ledger.rows)))

    def say(self, text: str, source: str = "") -> None:
        """One line about what happens, with the time since the start."""
        prefix = f"[{time.monotonic() - self._started:5.1f} s] {source:<9}"
        self._console.print(f"{prefix}{text}" if source else text, soft_wrap=True)

    def status(self, text: str) -> None:
        """What is being waited for, under the table."""
        self._status = text

    def completed(self, row: Row) -> None:
        """A version has been applied everywhere."""
        if self._live is not None:
            return
        if not self._header_shown:
            self._header_shown = True
            self._console.print(_line(HEADERS), soft_wrap=True)
        self._console.print(_line(cells(self._ledger, row)), soft_wrap=True)

    def _picture(self) -> Group:
        shown = max(3, self._console.height - 8)
        clock = f"{time.monotonic() - self._started:.0f} s  {self._status}"
        parts = [self._table(shown)] if self._ledger.rows else []
        return Group(*parts, Text(clock, style="dim"))

    def _table(self, last: int) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
        for header, width in zip(HEADERS, WIDTHS):
            wide = self._console.width >= _MIN_WIDTH
            table.add_column(header, justify="right", no_wrap=True, min_width=width if wide else 1)
        for version in sorted(self._ledger.rows)[-last:]:
            row = self._ledger.rows[version]
            done = row.complete(len(self._ledger.servers))
            table.add_row(*cells(self._ledger, row), style="" if done else "dim")
        return table


def _line(texts: tuple[str, ...]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, WIDTHS))
