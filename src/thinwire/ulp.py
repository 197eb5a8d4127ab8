"""How far apart two elements are, in units in the last place.

Floats of one width are ordered like the integers ``s ^ ((s >> (w-1)) & (2^(w-1) - 1))`` of their
signed bits s (the two's complement of a sign and a magnitude), so a step to the next float up is
always +1, across zero and into infinities as well. The difference mod 2^w is a bijection for every
pattern, and steps of consecutive versions add up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.dtypes import DType
from thinwire.patch import Bits

__all__ = ["ulp_steps"]


def ulp_steps(old: Bits, new: Bits, kind: DType) -> npt.NDArray[np.signedinteger[Any]]:
    """Signed steps from old to new elements.

    Args:
        old, new: ``(n,)`` unsigned views.
        kind: their element type. Types without a sign (integers, ``F8_E8M0``) are ordered by
            their bits.

    Returns:
        ``(n,)`` signed integers of the element's width: steps mod 2^w.
    """
    signed = np.dtype(f"<i{kind.itemsize}")
    step: npt.NDArray[np.signedinteger[Any]] = (_order(new, kind) - _order(old, kind)).view(signed)
    return step


def _order(bits: Bits, kind: DType) -> Bits:
    if not kind.is_float or 1 + kind.exponent_bits + kind.mantissa_bits != kind.width:
        return bits
    signed = bits.view(np.dtype(f"<i{kind.itemsize}"))
    magnitude = signed.dtype.type((1 << (kind.width - 1)) - 1)
    sign = signed >> signed.dtype.type(kind.width - 1)
    ordered: Bits = (signed ^ (sign & magnitude)).view(kind.bits)
    return ordered
