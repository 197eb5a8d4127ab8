"""Showing a run as it goes: a live table on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thinwire.demo.ledger import Ledger, Row
from thinwire.demo.table import HEADERS, WIDTHS, cells

__all__ = ["Display", "Screen"]

_MIN_WIDTH = 84

_Own = TypeVar("_Own", bound="Screen")


class Screen:
    """A table that grows: redrawn in place on a terminal, as many of its last rows as fit.

    At the end it is printed whole. A subclass says what the rows are (:meth:`_rows`), and prints
    lines of its own where there is no terminal (:attr:`_live` is None).

    Args:
        headers: of the table.
        widths: of its columns, in characters.
        min_width: of a terminal that has room for these widths.
        console: to print on; None: stderr, and text is taken as it is.
        redraws: per second, by a thread of its own; None: whenever :meth:`_draw` is called.
    """

    def __init__(
        self,
        headers: Sequence[str],
        widths: Sequence[int],
        *,
        min_width: int,
        console: Console | None = None,
        redraws: int | None = None,
    ) -> None:
        self._headers, self._widths, self._min_width = headers, widths, min_width
        self._redraws = redraws
        self._console = console or Console(stderr=True, highlight=False, markup=False)
        self._started = time.monotonic()
        self._live: Live | None = None
        self._status = ""

    def __enter__(self: _Own) -> _Own:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, transient=True, get_renderable=self._picture,
                auto_refresh=self._redraws is not None, refresh_per_second=self._redraws or 1,
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
        if rows := list(self._rows()):
            self._console.print(self._table(rows))

    def say(self, text: str, source: str = "") -> None:
        """One line about what happens, with the time since the start."""
        prefix = f"[{self._clock():5.1f} s] {source:<9}" if source else ""
        self._print(prefix + text)

    def status(self, text: str) -> None:
        """What is being waited for, under the table."""
        self._status = text

    def _rows(self) -> Iterable[tuple[Sequence[str], bool]]:
        """Cells of every row, and whether it is complete."""
        raise NotImplementedError

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _print_row(self, texts: Sequence[str]) -> None:
        self._print("  ".join(text.rjust(width) for text, width in zip(texts, self._widths)))

    def _draw(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _picture(self) -> Group:
        rows = list(self._rows())[-max(3, self._console.height - 8) :]
        clock = Text(f"{self._clock():.0f} s  {self._status}", style="dim")
        return Group(*([self._table(rows)] if rows else []), clock)

    def _table(self, rows: Iterable[tuple[Sequence[str], bool]]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
        wide = self._console.width >= self._min_width
        for header, width in zip(self._headers, self._widths):
            table.add_column(header, justify="right", no_wrap=True, min_width=width if wide else 1)
        for texts, complete in rows:
            table.add_row(*texts, style="" if complete else "dim")
        return table

    def _clock(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started


class Display(Screen):
    """Say what begins, show versions as they come; without a terminal, once both servers have one.

    Args:
        ledger: what is shown; others may write to it.
        console: to print on; None: stderr.
    """

    def __init__(self, ledger: Ledger, console: Console | None = None) -> None:
        super().__init__(HEADERS, WIDTHS, min_width=_MIN_WIDTH, console=console, redraws=4)
        self._ledger = ledger
        self._header_shown = False

    def completed(self, row: Row) -> None:
        """A version has been applied everywhere."""
        if self._live is not None:
            return
        if not self._header_shown:
            self._header_shown = True
            self._print_row(HEADERS)
        self._print_row(cells(self._ledger, row))

    def _rows(self) -> Iterable[tuple[Sequence[str], bool]]:
        servers = len(self._ledger.servers)
        for version in sorted(self._ledger.rows):
            row = self._ledger.rows[version]
            yield cells(self._ledger, row), row.complete(servers)
