"""Casts from the trainer's dtype to the serving dtype, bit-exact and the same everywhere.

Round to nearest, ties to even (IEEE 754), in integer arithmetic, with one canonical NaN per
target: torch's own casts give NaN payloads that depend on the code path taken.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from thinwire.dtypes import DType
from thinwire.errors import UnsupportedDtype
from thinwire.patch import Bits

__all__ = ["BF16_NAN", "F16_NAN", "Cast", "cast_between"]

Cast = Callable[[Bits, Bits], None]
"""Fills its second argument with the cast of its first; both ``(n,)`` unsigned views."""

BF16_NAN = 0x7FC0
F16_NAN = 0x7E00


@numba.njit(nogil=True, cache=True)
def _f32_to_bf16(source: Bits, target: Bits) -> None:
    for i in range(source.size):
        x = np.uint32(source[i])
        rounded = np.uint32(x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1)))
        is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        target[i] = np.uint16(BF16_NAN) if is_nan else np.uint16(rounded >> np.uint32(16))


@numba.njit(nogil=True, cache=True)
def _f32_to_f16(source: Bits, target: Bits) -> None:
    for i in range(source.size):
        x = np.uint32(source[i])
        sign = np.uint32((x >> np.uint32(16)) & np.uint32(0x8000))
        magnitude = np.uint32(x & np.uint32(0x7FFFFFFF))
        if magnitude > np.uint32(0x7F800000):
            target[i] = np.uint16(F16_NAN)
        elif magnitude >= np.uint32(0x477FF000):  # rounds past the largest finite, 65504
            target[i] = np.uint16(sign | np.uint32(0x7C00))
        elif magnitude >= np.uint32(0x38800000):  # normal in f16
            rebased = np.uint32(magnitude - np.uint32(0x38000000))
            odd = np.uint32((rebased >> np.uint32(13)) & np.uint32(1))
            rounded = np.uint32(rebased + np.uint32(0xFFF) + odd) >> np.uint32(13)
            target[i] = np.uint16(sign | np.uint32(rounded))
        elif magnitude <= np.uint32(0x33000000):  # at most half the smallest subnormal
            target[i] = np.uint16(sign)
        else:  # subnormal in f16: shift the full fraction into place, then round
            shift = np.uint32(np.uint32(126) - (magnitude >> np.uint32(23)))
            full = np.uint32((magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000))
            kept = np.uint32(full >> shift)
            rest = np.uint32(full & np.uint32((np.uint32(1) << shift) - np.uint32(1)))
            half = np.uint32(np.uint32(1) << np.uint32(shift - np.uint32(1)))
            up = rest > half or (rest == half and (kept & np.uint32(1)) == np.uint32(1))
            target[i] = np.uint16(sign | np.uint32(kept + np.uint32(1 if up else 0)))


_CASTS: dict[tuple[str, str], Cast] = {
    ("F32", "BF16"): _f32_to_bf16,
    ("F32", "F16"): _f32_to_f16,
}


def cast_between(source: DType, target: DType) -> Cast | None:
    """The cast from ``source`` to ``target``; None when they are the same and bits are kept.

    Raises:
        UnsupportedDtype: there is no such cast.
    """
    if source == target:
        return None
    try:
        return _CASTS[source.name, target.name]
    except KeyError:
        known = ", ".join(f"{a} -> {b}" for a, b in _CASTS)
        raise UnsupportedDtype(
            f"no cast from {source} to {target}",
            hint=f"cast the tensor yourself before publishing; built-in casts: {known}",
        ) from None
