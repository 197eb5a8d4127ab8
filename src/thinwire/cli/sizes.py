"""Sizes as people write them on a command line: ``20MB``, ``1.2 GB``, ``32MiB``, ``5000``."""

from __future__ import annotations

import math
import re

import click

__all__ = ["parse_size", "size_option"]

_PATTERN = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes. Decimal units (kB, MB, GB, TB), or binary ones with an i (KiB, MiB, GiB, TiB).

    Raises:
        ValueError: not a positive size. ``Mb`` is refused: it means bits.
    """
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size; write 20MB, 1.2GB or 32MiB")
    number, unit, binary, letter = found.groups()
    if letter == "b" and unit.isupper():
        raise ValueError(f"{text!r} means bits; write {number}{unit}{binary}B for bytes")
    if binary and not unit:
        raise ValueError(f"{text!r} is not a size; write 20MB, 1.2GB or 32MiB")
    size = float(number) * float((1024 if binary else 1000) ** _POWERS[unit.lower()])
    if not (math.isfinite(size) and size >= 1):
        raise ValueError(f"{text!r} is not a positive number of bytes")
    return round(size)


def size_option(text: str) -> int:
    """:func:`parse_size` as the ``type`` of a click option."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
