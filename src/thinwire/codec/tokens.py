"""Counts as tokens: a symbol for the octave and the bits next to its top, and raw bits below.

A value v < 2^s is the symbol v. A larger one, of bit length n, is the symbol
``(n - s) · 2^s + (the s bits below its leading one)``, and its n - 1 - s lowest bits follow raw.
Raw bits are packed from the lowest bit of each byte up.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from thinwire.codec.simd import high_bit, load64, store64

__all__ = ["read_values", "symbols_of", "write_raw", "write_raw_runs", "write_symbols"]

Array = npt.NDArray[Any]
_ONE = np.uint64(1)


_FIELD = 56
"""Raw bits that fit into one unaligned 64-bit access wherever in a byte they start."""
_FIELD_MASK = (_ONE << np.uint64(_FIELD)) - _ONE


@numba.njit(nogil=True, inline="always")
def _merge(data: Array, bit: int, value: np.uint64) -> None:
    at = bit >> 3
    store64(data, at, load64(data, at) | (value << np.uint64(bit & 7)))


@numba.njit(nogil=True, inline="always")
def _field(data: Array, bit: int, size: int) -> np.uint64:
    mask = (_ONE << np.uint64(size)) - _ONE
    field: np.uint64 = (load64(data, bit >> 3) >> np.uint64(bit & 7)) & mask
    return field


@numba.njit(nogil=True, cache=True)
def symbols_of(values: Array, sub: int, symbols: Array) -> int:
    """Fill ``symbols`` (uint8) with the symbols of ``values`` (unsigned, same length).

    Returns:
        How many raw bits go with them.
    """
    total = 0
    for i in range(values.size):
        v = np.uint64(values[i])
        length = high_bit(v | _ONE) + 1
        shift = max(length - 1 - sub, 0)
        symbols[i] = np.int64(v >> np.uint64(shift)) + (shift << sub)
        total += shift
    return total


@numba.njit(nogil=True, cache=True)
def write_raw(values: Array, sub: int, data: Array, bit: int) -> int:
    """Append the raw bits of ``values`` to ``data`` from ``bit`` on; return where they end.

    Args:
        data: uint8, zeros, with 8 bytes to spare beyond the last raw bit.
    """
    for i in range(values.size):
        v = np.uint64(values[i])
        shift = max(high_bit(v | _ONE) - sub, 0)
        rest = v & ((_ONE << np.uint64(shift)) - _ONE)
        if shift > _FIELD:
            _merge(data, bit, rest & _FIELD_MASK)
            rest >>= np.uint64(_FIELD)
            bit += _FIELD
            shift -= _FIELD
        _merge(data, bit, rest)
        bit += shift
    return bit


@numba.njit(nogil=True, cache=True)
def write_symbols(
    counts: Array,
    gaps: Array,
    sizes: Array,
    outward: Array,
    gap_sub: int,
    step_sub: int,
    symbols: Array,
    histograms: Array,
) -> int:
    """Symbols of a segment's changes in runs: for each class its gaps, then its steps.

    Args:
        counts: ``(m,)`` int64, changes in each class; gaps, sizes and outward are ordered by class.
        gap_sub, step_sub: bits below the leading one in a symbol. A step's has the direction below.
        symbols: ``(2n,)`` uint8, filled.
        histograms: ``(2m, 256)`` int64, to which the symbols of each run are added.

    Returns:
        How many raw bits go with them.
    """
    total = 0
    at = 0
    for k in range(counts.size):
        count = counts[k]
        run = symbols[2 * at : 2 * at + count]
        total += symbols_of(gaps[at : at + count], gap_sub, run)
        for i in range(count):
            histograms[2 * k, run[i]] += 1
        run = symbols[2 * at + count : 2 * (at + count)]
        total += symbols_of(sizes[at : at + count], step_sub, run)
        for i in range(count):
            run[i] = run[i] << np.uint8(1) | outward[at + i]
            histograms[2 * k + 1, run[i]] += 1
        at += count
    return total


@numba.njit(nogil=True, cache=True)
def write_raw_runs(
    counts: Array, gaps: Array, sizes: Array, gap_sub: int, step_sub: int, data: Array
) -> None:
    """The raw bits of the same runs, in the same order; ``data`` as for :func:`write_raw`."""
    at = 0
    bit = 0
    for k in range(counts.size):
        end = at + counts[k]
        bit = write_raw(gaps[at:end], gap_sub, data, bit)
        bit = write_raw(sizes[at:end], step_sub, data, bit)
        at = end


@numba.njit(nogil=True, cache=True)
def read_values(
    symbols: Array, sub: int, longest: int, data: Array, bit: int, values: Array
) -> int:
    """Fill ``values`` (unsigned) from their symbols and the raw bits from ``bit`` on.

    Args:
        longest: bits that a value may have, at most those of an element of ``values``.
        data: uint8, with 8 bytes to spare beyond the last raw bit.

    Returns:
        Where the raw bits end; -1 if a symbol stands for a longer value, or the data ends too soon.
    """
    limit = 8 * (data.size - 8)
    for i in range(symbols.size):
        symbol = np.int64(symbols[i])
        octave = symbol >> sub
        shift = max(octave - 1, 0)
        if shift and shift + sub + 1 > longest:
            return -1
        top = np.uint64(symbol - (shift << sub))
        if bit + shift > limit:
            return -1
        rest = np.uint64(0)
        done = 0
        if shift > _FIELD:
            rest = _field(data, bit, _FIELD)
            done = _FIELD
        rest |= _field(data, bit + done, shift - done) << np.uint64(done)
        bit += shift
        values[i] = (top << np.uint64(shift)) | rest
    return bit
