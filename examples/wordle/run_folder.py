"""Where a run writes: one run at a time, and nothing removed that no run has made."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from thinwire.errors import Misuse

__all__ = ["drop", "fresh", "locked", "replace_text"]

_MARKER = ".made-by-wordle"


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep others out of a folder, which is made. The system lets go if this process is killed.

    Args:
        wait: until nobody else is in it.

    Raises:
        Misuse: somebody else is.
        OSError: it cannot be a folder, or be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Misuse(f"{folder} is in use by another run", hint="name another") from None
        yield


def fresh(folder: Path, files: Iterable[Path] = ()) -> None:
    """Make a folder, or empty one that was made here before; then remove these files.

    Raises:
        Misuse: it holds something, and was not made here.
        OSError: something cannot be removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / _MARKER
    if any(folder.iterdir()) and not marker.is_file():
        raise Misuse(
            f"{folder} was not made by a run, and is not empty", hint="name another report"
        )
    marker.touch()
    _empty(folder)
    for file in files:
        file.unlink(missing_ok=True)


def drop(folder: Path) -> None:
    """Remove a folder that :func:`fresh` has made; its marker is the last to go."""
    _empty(folder)
    (folder / _MARKER).unlink()
    folder.rmdir()


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there with all of its text, or as it was before."""
    writing = path.with_name(f".{path.name}.writing")
    writing.write_text(text, encoding="utf-8")
    os.replace(writing, path)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARKER:
            path.unlink()
