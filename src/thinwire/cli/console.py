"""What the commands share: JSON and tables on stdout, progress on stderr, numbers for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = [
    "Bar",
    "count",
    "emit",
    "json_option",
    "percent",
    "plain",
    "print_table",
    "share",
    "size",
    "when",
]

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """``--json`` as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(
        command
    )


def emit(document: object, *, line: bool = False) -> None:
    """Print a JSON document, on one line if it is one of several.

    In ASCII: what it holds may be no text in the terminal's encoding, or none at all (file names).
    """
    click.echo(json.dumps(document, indent=None if line else 2))


def plain(text: str) -> str:
    """``text`` without what a terminal would obey: names in a bucket are anybody's."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table whose first ``left`` columns are text; never cut short when piped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, header in enumerate(headers):
        text = number < left
        table.add_column(header, justify="left" if text else "right", no_wrap=not text)
    for row in rows:
        table.add_row(*map(plain, row))
    width = None if sys.stdout.isatty() else 10_000

    class Output(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with a status of its own
            raise BrokenPipeError

    Output(markup=False, highlight=False, emoji=False, width=width).print(table)


# --- numbers -------------------------------------------------------------------------------


def count(number: int) -> str:
    """``1234567`` -> ``1,234,567``."""
    return f"{number:,}"


def size(number: float | None) -> str:
    """Bytes in decimal units; ``?`` for None."""
    if number is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def share(part: float, whole: float) -> float:
    """``part / whole``, 0 for nothing of nothing."""
    return part / whole if whole else 0.0


def percent(fraction: float | None) -> str:
    """A fraction in percent, three significant digits; ``?`` for None."""
    if fraction is None:
        return "?"
    return f"{100 * fraction:.3g} %" if fraction < 0.9995 else f"{100 * fraction:.0f} %"


def when(time_ms: int) -> str:
    """Unix milliseconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ms / 1000))


# --- progress ------------------------------------------------------------------------------


class Bar:
    """A progress bar on stderr that appears with the first call, on a terminal only.

    An instance is a :data:`thinwire.anchor.Progress`: called with what is being done, how much of
    it is, and how much there is in all (0: not known).
    """

    def __init__(self, what: str = "") -> None:
        self._shown: Progress | None = None
        self._task: TaskID | None = None
        self._enabled = sys.stderr.isatty()
        if what:
            self(what, 0, 0)

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._enabled:
            return
        if self._shown is None or self._task is None:
            self._shown, self._task = _start()
        self._shown.update(self._task, description=what, completed=done, total=total or None)

    def clear(self) -> None:
        """Take the bar away, so that lines can be printed; the next call brings it back."""
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()


def _start() -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    progress.start()
    return progress, progress.add_task("", total=None)
