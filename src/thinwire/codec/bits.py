"""Costs in fractions of a bit, in integers: the same decisions on every machine.

Vectorised floating-point logarithms differ in the last place between processors, and an encoder
that decides by them would not write the same bytes everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ONE_BIT", "log2", "surprise"]

ONE_BIT = 1 << 16
"""Costs are counted in 2⁻¹⁶ bits."""

_TABLE_BITS = 12
_TABLE = np.array(
    [round(math.log2(1 + i / (1 << _TABLE_BITS)) * ONE_BIT) for i in range(1 << _TABLE_BITS)],
    np.int64,
)

Integers = npt.NDArray[np.int64]


def log2(values: npt.ArrayLike) -> Integers:
    """log₂ of positive integers below 2⁵⁰, in units of 2⁻¹⁶, to about 2⁻¹²; 0 for 0."""
    x = np.maximum(np.asarray(values, np.int64), 1)
    exponent = np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1
    below = np.maximum(exponent - _TABLE_BITS, 0)
    above = np.maximum(_TABLE_BITS - exponent, 0)
    fraction = ((x >> below) << above) - (1 << _TABLE_BITS)
    result: Integers = exponent * ONE_BIT + _TABLE[fraction]
    return result


def surprise(counts: npt.NDArray[Any], axis: int | None = None) -> Any:
    """Total cost of symbols with these counts under their own shares: Σ c · log₂(Σc / c)."""
    counts = np.asarray(counts, np.int64)
    total = counts.sum(axis=axis)
    return total * log2(total) - (counts * log2(counts)).sum(axis=axis)
