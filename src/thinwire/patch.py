"""A tensor's changes in memory, and writing them into its bits.

Positions are flat row-major element indices, strictly increasing; bits are the new elements seen
as unsigned integers. Applying overwrites, so applying twice is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from thinwire.errors import CorruptPayload
from thinwire.kernels import find_cache
from thinwire.prefetch import AHEAD, prefetch
from thinwire.schema import TensorSpec

__all__ = ["Bits", "Patch", "Positions", "StepPatch", "apply_patch", "bits_at", "position_dtype"]

find_cache()

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""Elements through the unsigned integer of their width."""

Positions = npt.NDArray[np.signedinteger[Any]]
"""Flat element indices: int32, or int64 for tensors of 2³¹ elements and more."""


def position_dtype(numel: int) -> np.dtype[Any]:
    """The integer type of positions in a tensor of ``numel`` elements."""
    return np.dtype("<i4") if numel <= 1 << 31 else np.dtype("<i8")


@dataclass(frozen=True, eq=False)
class Patch:
    """The changed elements of one tensor.

    Attributes:
        ordinal: the tensor's place in schema order.
        spec: the tensor.
        positions: ``(n,)`` int32 or int64, strictly increasing, ``0 <= p < spec.numel``.
        bits: ``(n,)`` unsigned, the new elements.
    """

    ordinal: int
    spec: TensorSpec
    positions: Positions
    bits: Bits

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def name(self) -> str:
        """The tensor's canonical name."""
        return self.spec.name

    def check(self) -> Patch:
        """Return self if positions and bits fit the tensor; for patches from outside.

        Raises:
            CorruptPayload: a length, dtype, order or range is wrong.
        """
        if self.positions.shape != self.bits.shape or self.positions.ndim != 1:
            raise CorruptPayload(
                f"{self.name}: {self.positions.size} positions for {self.bits.size} bits"
            )
        if self.bits.dtype != self.spec.dtype.bits:
            raise CorruptPayload(
                f"{self.name}: elements are {self.bits.dtype}, not {self.spec.dtype}"
            )
        if len(self) and not _increasing_below(self.positions, self.spec.numel):
            raise CorruptPayload(f"{self.name}: positions are not increasing or not in the tensor")
        return self


@dataclass(frozen=True, eq=False)
class StepPatch:
    """Changed elements as ULP steps from the old ones, which their owner holds.

    Attributes:
        ordinal, spec, positions: as in :class:`Patch`.
        sizes: ``(n,)`` unsigned of the element's width: magnitude − 1.
        outward: ``(n,)`` uint8: away from zero, judged by the old element's own sign, or not.
    """

    ordinal: int
    spec: TensorSpec
    positions: Positions
    sizes: Bits
    outward: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def name(self) -> str:
        """The tensor's canonical name."""
        return self.spec.name


@numba.njit(nogil=True, cache=True)
def _increasing_below(positions: Positions, numel: int) -> bool:
    last = np.int64(-1)
    good = True
    for p in positions:
        position = np.int64(p)
        good &= position > last
        last = position
    return good and last < numel


@numba.njit(nogil=True, cache=True)
def _scatter(target: Bits, positions: Positions, bits: Bits) -> None:
    for i in range(positions.size):
        target[positions[i]] = bits[i]


@numba.njit(nogil=True, cache=True)
def _gather(source: Bits, positions: Positions, bits: Bits) -> None:
    for i in range(positions.size):
        prefetch(source, np.int64(positions[min(i + AHEAD, positions.size - 1)]))
        bits[i] = source[positions[i]]


def bits_at(source: Bits, positions: Positions) -> Bits:
    """``(n,)`` elements of ``source`` at positions that have been checked."""
    bits = np.empty(positions.size, source.dtype)
    _gather(source, positions, bits)
    return bits


def apply_patch(target: Bits, patch: Patch) -> None:
    """Overwrite the changed elements of ``target``: ``(numel,)``, the unsigned view of the tensor.

    The patch must have been checked: positions are trusted here.
    """
    _scatter(target, patch.positions, patch.bits)
