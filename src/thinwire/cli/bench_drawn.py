"""A model that cannot be trained here, changed as a real one was: rates and steps by exponent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinwire.cli.bench_bound import Tally, exponents
from thinwire.cli.bench_rivals import Delta
from thinwire.cli.bench_state import Shape, make_weights
from thinwire.patch import Bits, Patch, apply_patch, position_dtype
from thinwire.ulp import apply_steps

__all__ = ["change_rates", "drawn", "scaled_rates"]

Rates = npt.NDArray[np.float64]
_PIECE = 1 << 22


def change_rates(measured: Tally) -> Rates:
    """Share of changes by exponent. Exponents that the model does not have take a neighbour's."""
    known = np.flatnonzero(measured.elements)
    rates = measured.changed[known] / measured.elements[known]
    return np.interp(np.arange(measured.elements.size), known, rates)


def scaled_rates(rates: Rates, elements: npt.NDArray[np.int64], share: float) -> Rates:
    """The rates times one factor, none above 1, so that ``share`` of all elements change."""
    low, high = 0.0, 1e9
    total = int(elements.sum())
    for _ in range(200):
        factor = (low + high) / 2
        if (np.minimum(1, rates * factor) * elements).sum() > share * total:
            high = factor
        else:
            low = factor
    scaled: Rates = np.minimum(1, rates * low)
    return scaled


def drawn(shape: Shape, measured: Tally, share: float, *, seed: int = 0) -> Delta:
    """Synthetic weights of a shape with changes drawn from what was measured on a real pair.

    Each element changes independently with its exponent's rate, scaled to ``share`` overall, by a
    step drawn from those that elements of its exponent made.
    """
    schema = shape.schema()
    old = make_weights(schema)
    kind = measured.kind
    elements = np.zeros(measured.elements.size, np.int64)
    for bits in old:
        for at in range(0, bits.size, _PIECE):
            some = np.bincount(exponents(bits[at : at + _PIECE], kind), minlength=elements.size)
            elements += some
    rates = scaled_rates(change_rates(measured), elements, share)
    by_bits = rates[exponents(np.arange(1 << kind.width, dtype=kind.bits), kind)].astype("f4")
    random = np.random.default_rng(seed)
    steps = _StepPool(measured)
    patches = []
    for ordinal, spec in enumerate(schema):
        found = [
            at + np.flatnonzero(random.random(part.size, np.float32) < by_bits[part])
            for at in range(0, spec.numel, _PIECE)
            if (part := old[ordinal][at : at + _PIECE]).size
        ]
        positions = np.concatenate(found).astype(position_dtype(spec.numel))
        if positions.size:
            bits = steps.changed(old[ordinal][positions], random)
            patches.append(Patch(ordinal, spec, positions, bits))
    new = [bits.copy() for bits in old]
    for patch in patches:
        apply_patch(new[patch.ordinal], patch)
    return Delta(schema, old, new, patches)


class _StepPool:
    """Steps to draw from, by exponent; one without any takes the nearest's."""

    def __init__(self, measured: Tally) -> None:
        self._kind = measured.kind
        present = np.unique(measured.exponent)
        every = np.arange(measured.elements.size)
        self._nearest = np.abs(every[:, None] - present).argmin(1)
        self._steps = [measured.step[measured.exponent == e] for e in present]
        self._shares = [np.cumsum(measured.count[measured.exponent == e]) for e in present]

    def changed(self, old: Bits, random: np.random.Generator) -> Bits:
        """New bits for old ones."""
        nearest = self._nearest[exponents(old, self._kind)]
        steps = np.empty(old.size, np.int64)
        for k in np.unique(nearest):
            mine = np.flatnonzero(nearest == k)
            draw = random.integers(0, self._shares[k][-1], mine.size)
            steps[mine] = self._steps[k][np.searchsorted(self._shares[k], draw, "right")]
        new = np.empty_like(old)
        sizes = (np.abs(steps) - 1).astype(self._kind.bits)
        apply_steps(old, sizes, (steps > 0).astype(np.uint8), True, new)
        return new
