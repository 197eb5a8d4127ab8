"""Tables in a page of documentation, between the comments that mark their places.

A place is what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

__all__ = ["insert", "rewrite", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def insert(page: str, parts: Mapping[str, str]) -> str:
    """The page with the places of the parts rewritten; other places stay as they are.

    Raises:
        ValueError: there is no place for any of the parts, or a place is not one.
    """
    wanted = [name for name in parts if f"<!-- begin {name} -->" in page]
    if not wanted:
        raise ValueError(f"the page has no place for any of {', '.join(parts)}")
    for name in wanted:
        between = rf"(?<=<!-- begin {name} -->\n).*?(?=<!-- end {name} -->)"
        made = f"{parts[name]}\n".replace("\\", r"\\")
        page, count = re.subn(between, made, page, flags=re.S)
        if count != 1:
            raise ValueError(f"the place for {name} does not end, or there are several")
    return page


def rewrite(path: Path, parts: Mapping[str, str]) -> None:
    """The same for a file.

    Raises:
        SystemExit: it has no such places.
    """
    try:
        made = insert(path.read_text(encoding="utf-8"), parts)
    except ValueError as error:
        raise SystemExit(f"{path}: {error}") from None
    path.write_text(made, encoding="utf-8")
