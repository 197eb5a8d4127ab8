"""How far apart two elements are, in units in the last place.

Floats of one width are ordered like the integers ``s ^ ((s >> (w-1)) & (2^(w-1) - 1))`` of their
signed bits s (the two's complement of a sign and a magnitude), so a step to the next float up is
always +1, across zero and into infinities as well. The difference mod 2^w is a bijection for every
pattern, and steps of consecutive versions add up.

On the wire a step is a magnitude from 1 to 2^(w-1), less 1, and a direction: outward (away from
zero, judged by the old value's own sign; upward where there is no sign) or not.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from thinwire.dtypes import DType
from thinwire.patch import Bits, Patch, StepPatch

__all__ = [
    "apply_steps",
    "resolve",
    "signed_float",
    "step_from",
    "step_to",
    "steps_between",
    "ulp_steps",
]

Array = npt.NDArray[Any]
_ONE = np.uint64(1)


def signed_float(kind: DType) -> bool:
    """Whether elements have a sign bit, an exponent and a fraction, in this order."""
    return kind.is_float and 1 + kind.exponent_bits + kind.mantissa_bits == kind.width


def ulp_steps(old: Bits, new: Bits, kind: DType) -> npt.NDArray[np.signedinteger[Any]]:
    """Signed steps from old to new elements.

    Args:
        old, new: ``(n,)`` unsigned views.
        kind: their element type. Types without a sign (integers, ``F8_E8M0``) are ordered by
            their bits.

    Returns:
        ``(n,)`` signed integers of the element's width: steps mod 2^w.
    """
    steps = np.empty_like(old)
    _signed_steps(old, new, signed_float(kind), steps)
    return steps.view(f"<i{kind.itemsize}")


@numba.njit(nogil=True, inline="always")
def _place(bits: np.uint64, sign: np.uint64, signed: bool) -> np.uint64:
    """The element's place on the line, mod 2^w: negative values of a signed float run downward."""
    return bits ^ (sign - _ONE) if signed and bits & sign else bits


@numba.njit(nogil=True, inline="always")
def step_to(
    before: np.uint64, after: np.uint64, width: int, signed: bool
) -> tuple[np.uint64, bool]:
    """The step from an element to a different one: its magnitude − 1, and whether it is outward."""
    sign = _ONE << np.uint64(width - 1)
    mask = sign | (sign - _ONE)
    step = (_place(after, sign, signed) - _place(before, sign, signed)) & mask
    down = (step & sign) != 0
    size = ((_ONE + ~step) & mask if down else step) - _ONE
    return size, down == (signed and (before & sign) != 0)


@numba.njit(nogil=True, cache=True)
def _signed_steps(old: Array, new: Array, signed: bool, steps: Array) -> None:
    sign = _ONE << np.uint64(8 * old.itemsize - 1)
    for i in range(old.size):
        before, after = np.uint64(old[i]), np.uint64(new[i])
        steps[i] = _place(after, sign, signed) - _place(before, sign, signed)


@numba.njit(nogil=True, cache=True)
def steps_between(old: Array, new: Array, signed: bool, sizes: Array, outward: Array) -> None:
    """Fill ``sizes`` (unsigned, magnitude − 1) and ``outward`` (uint8, 0 or 1) of changes."""
    for i in range(old.size):
        size, out = step_to(np.uint64(old[i]), np.uint64(new[i]), 8 * old.itemsize, signed)
        sizes[i] = size
        outward[i] = out


@numba.njit(nogil=True, inline="always")
def step_from(
    before: np.uint64, size: np.uint64, outward: bool, width: int, signed: bool
) -> np.uint64:
    """The element that lies a step away; ``size`` is the magnitude − 1."""
    sign = _ONE << np.uint64(width - 1)
    mask = sign | (sign - _ONE)
    step = size + _ONE
    at = _place(before, sign, signed)
    if outward == (signed and (before & sign) != 0):
        step = _ONE + ~step
    after: np.uint64 = _place((at + step) & mask, sign, signed)
    return after


@numba.njit(nogil=True, cache=True)
def apply_steps(old: Array, sizes: Array, outward: Array, signed: bool, new: Array) -> None:
    """The inverse: fill ``new`` from ``old`` and the steps."""
    for i in range(old.size):
        new[i] = step_from(
            np.uint64(old[i]), np.uint64(sizes[i]), outward[i] != 0, 8 * old.itemsize, signed
        )


def resolve(patch: StepPatch, old: Bits) -> Patch:
    """The patch that the steps mean, given ``(n,)`` the old elements at its positions."""
    new = np.empty_like(patch.sizes)
    apply_steps(old, patch.sizes, patch.outward, signed_float(patch.spec.dtype), new)
    return Patch(patch.ordinal, patch.spec, patch.positions, new)
