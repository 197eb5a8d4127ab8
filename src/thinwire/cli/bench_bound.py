"""How few bytes a delta could have: order-0 entropies of what changed, given the old exponents.

A reader of the delta holds the old weights. Given those, the cheapest description that looks at
nothing but each element's old exponent costs, per exponent, a binomial for the places of the
changes and the plug-in entropy of the ULP steps (direction relative to the weight's own sign).
All tensors of a dtype are pooled. Tables, headers and commits are not in it: it is a bound for
this kind of model, not a size that a file can have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.dtypes import DType
from thinwire.patch import Bits, Patch
from thinwire.ulp import signed_float, ulp_steps

__all__ = ["Bound", "Tally", "binomial_bits", "bound", "entropy_bits", "exponents", "tally"]

Array = npt.NDArray[Any]


def binomial_bits(elements: int, changed: int) -> float:
    """Bits for saying which ``changed`` of ``elements`` elements changed: n · H(k/n)."""
    return entropy_bits([changed, elements - changed])


def entropy_bits(counts: npt.ArrayLike) -> float:
    """Bits for a sequence of symbols with these counts under their own shares: Σ c · log₂(n/c)."""
    c = np.asarray(counts, np.float64)
    c = c[c > 0]
    return float((c * np.log2(c.sum() / c)).sum()) if c.size > 1 else 0.0


def exponents(bits: Bits, kind: DType) -> Array:
    """The exponent fields of elements; 0 where a dtype has none."""
    if not signed_float(kind):
        return np.zeros(bits.size, np.int64)
    return ((bits >> kind.mantissa_bits) & ((1 << kind.exponent_bits) - 1)).astype(np.int64)


def outward_steps(old: Bits, new: Bits, kind: DType) -> Array:
    """ULP steps, positive away from zero as judged by the old value's sign."""
    steps = ulp_steps(old, new, kind).astype(np.int64)
    if signed_float(kind):
        steps[(old >> (kind.width - 1)) != 0] *= -1
    return steps


@dataclass(frozen=True)
class Tally:
    """What happened to the elements of one dtype, by the exponent of their old values.

    Attributes:
        kind: the dtype.
        elements, changed: ``(2^exponent_bits,)`` how many there are, and how many changed.
        exponent, step, count: ``(n,)`` each distinct (exponent, outward step) and how often.
    """

    kind: DType
    elements: Array
    changed: Array
    exponent: Array
    step: Array
    count: Array


def tally(kind: DType, base: Iterable[Bits], patches: Sequence[tuple[Bits, Patch]]) -> Tally:
    """Count exponents and steps.

    Args:
        kind: at most 32 bits wide.
        base: old bits of all its tensors, those without changes too.
        patches: (old bits, patch) of those that changed.
    """
    size = 1 << kind.exponent_bits
    elements = np.zeros(size, np.int64)
    for bits in base:
        for at in range(0, bits.size, 1 << 22):
            part = bits[at : at + (1 << 22)]
            elements += np.bincount(exponents(part, kind), minlength=size)
    symbols, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for bits, patch in patches:
        old = bits[patch.positions]
        code = exponents(old, kind) << 34 | (outward_steps(old, patch.bits, kind) + (1 << 33))
        some, times = np.unique(code, return_counts=True)
        symbols.append(some)
        counts.append(times)
    found, place = np.unique(np.concatenate(symbols), return_inverse=True)
    count = np.bincount(place, np.concatenate(counts), found.size).astype(np.int64)
    exponent = found >> 34
    changed = np.bincount(exponent, count, size).astype(np.int64)
    step = (found & ((1 << 34) - 1)) - (1 << 33)
    return Tally(kind, elements, changed, exponent, step, count)


@dataclass(frozen=True)
class Bound:
    """Bytes, rounded up as a whole only.

    Attributes:
        positions: for where changes are.
        steps: for what they are.
    """

    positions: float
    steps: float

    @property
    def nbytes(self) -> int:
        """Of both together."""
        return math.ceil(self.positions + self.steps)


def bound(tallies: Iterable[Tally]) -> Bound:
    """The order-0 bound for a delta."""
    positions = steps = 0.0
    for t in tallies:
        present = np.flatnonzero(t.changed)
        positions += sum(binomial_bits(int(t.elements[e]), int(t.changed[e])) for e in present)
        steps += sum(entropy_bits(t.count[t.exponent == e]) for e in present)
    return Bound(positions / 8, steps / 8)
