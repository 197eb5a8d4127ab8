"""Classes of elements: intervals of the old value's exponent that share statistics.

Whether an element changes depends almost only on its exponent, which both sides hold. An element's
*key* is its exponent field (at most 8 bits of it), 0 where a dtype has none; its *class* is the
number of thresholds that the key reaches. The encoder picks the thresholds; at most 16 classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.codec.bits import ONE_BIT, surprise
from thinwire.codec.simd import CLASSES
from thinwire.dtypes import DType
from thinwire.ulp import signed_float

__all__ = ["ClassMap", "choose_thresholds", "key_field"]

Array = npt.NDArray[Any]
UNREACHED = 255

_IMPOSSIBLE = 1 << 61

_CLASS_COST = (
    320 * ONE_BIT
)  # what a class costs by itself: its tables, and a count in every segment


def key_field(kind: DType) -> tuple[int, int]:
    """(shift, mask) that give an element's key from its bits."""
    if not signed_float(kind):
        return 0, 0
    dropped = max(0, kind.exponent_bits - 8)
    return kind.mantissa_bits + dropped, (1 << (kind.exponent_bits - dropped)) - 1


@dataclass(frozen=True)
class ClassMap:
    """How elements of one dtype fall into classes.

    Attributes:
        shift, mask: see :func:`key_field`.
        thresholds: ``(15,)`` uint8, ascending; those not used are 255.
    """

    shift: int
    mask: int
    thresholds: Array

    @classmethod
    def of(cls, kind: DType, thresholds: Sequence[int]) -> ClassMap:
        """The map with the given thresholds, at most 15."""
        padded = [*thresholds, *[UNREACHED] * (CLASSES - 1 - len(thresholds))]
        return cls(*key_field(kind), np.array(padded, np.uint8))

    @property
    def by_key(self) -> Array:
        """``(256,)`` uint8: the class of every key."""
        keys = np.arange(256)
        return np.searchsorted(self.thresholds, keys, side="right").astype(np.uint8)

    @property
    def used(self) -> list[int]:
        """The thresholds in use."""
        return [int(t) for t in self.thresholds if t != UNREACHED]

    def keys(self, bits: Array) -> Array:
        """The keys of elements."""
        return ((bits >> self.shift) & self.mask).astype(np.uint8)


def choose_thresholds(population: Array, tokens: Array) -> list[int]:
    """Thresholds that make the estimated size smallest.

    Args:
        population: ``(256,)`` estimated number of elements of each key.
        tokens: ``(256, 256)`` changes by key and step symbol.
    """
    changed = tokens.sum(1)
    keys = np.flatnonzero(changed)
    if keys.size < 2:
        return []
    # keys without changes join the interval below: borders only matter where changes are
    borders = [0, *keys[1:].tolist(), 256]
    elements = np.add.reduceat(population, borders[:-1]).astype(np.int64)
    steps = np.add.reduceat(tokens, borders[:-1], axis=0).astype(np.int64)
    elements = np.maximum(elements, steps.sum(1))
    elements_to, steps_to = _running_sums(elements), _running_sums(steps)
    size = len(borders) - 1
    best = np.full((CLASSES + 1, size + 1), _IMPOSSIBLE)
    best[0, 0] = 0
    origin = np.zeros((CLASSES + 1, size + 1), np.int64)
    for end in range(1, size + 1):
        costs = _interval_costs(
            elements_to[end] - elements_to[:end], steps_to[end] - steps_to[:end]
        )
        for count in range(1, CLASSES + 1):
            total = best[count - 1, :end] + costs
            origin[count, end] = np.argmin(total)
            best[count, end] = total[origin[count, end]]
    count, end = int(np.argmin(best[:, size])), size
    thresholds: list[int] = []
    while count > 1:
        end = int(origin[count, end])
        thresholds.append(borders[end])
        count -= 1
    return thresholds[::-1]


def _running_sums(values: Array) -> Array:
    return np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, 0)])


def _interval_costs(elements: Array, steps: Array) -> Array:
    """Cost of the changes in intervals: positions, step symbols, and the class itself."""
    changed = steps.sum(1)
    positions = surprise(np.stack([changed, elements - changed], 1), axis=1)
    cost: Array = positions + surprise(steps, axis=1) + _CLASS_COST
    return cost
