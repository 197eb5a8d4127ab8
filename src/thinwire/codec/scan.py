"""Ranks of changes among the elements of their class, and back: the two scans over the base.

Both walk a piece of a tensor by 64 blocks of 64 elements. First the classes of all blocks are
counted, a few vector instructions each; then only the changed elements are looked at, one by one.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from thinwire.codec.simd import (
    BLOCK,
    BLOCKS,
    CLASSES,
    COLUMNS,
    between,
    count_block,
    low_bit,
    passed_blocks,
    popcount,
    select_bit,
)
from thinwire.prefetch import AHEAD, prefetch
from thinwire.ulp import step_from, step_to

__all__ = ["NEVER", "locate_changes", "rank_changes", "space_changes"]

Array = npt.NDArray[Any]
_ONE = np.uint64(1)
_STRETCH = BLOCK * BLOCKS
_BLOCK_BITS = np.uint64(BLOCK.bit_length() - 1)
_IN_BLOCK = np.uint64(BLOCK - 1)

NEVER = 0x7FFFFFFF
"""More elements than a segment has."""


@numba.njit(nogil=True, inline="always")
def _intervals(thresholds: Array) -> tuple[Array, Array]:
    """For each class its lowest key, and how many keys it has."""
    lows = np.zeros(CLASSES, np.int64)
    lows[1:] = thresholds
    spans = np.full(CLASSES, 256, np.int64)
    spans[:-1] = lows[1:]
    return lows, spans - lows


@numba.njit(nogil=True, inline="always")
def _count_stretch(
    base: Array, start: int, size: int, shift: int, field: int, thresholds: Array, tally: Array
) -> int:
    """Count the classes of up to 64 blocks; return how many blocks there are.

    ``tally[k, block]`` becomes the number of elements of class k in the blocks before.
    """
    blocks = (min(size - start, _STRETCH) + BLOCK - 1) // BLOCK
    for block in range(blocks):
        count_block(base, start + block * BLOCK, shift, field, thresholds, tally, block)
    if start + blocks * BLOCK > size:
        # what fills up the last block has key 0: it counts among elements of class 0 or higher
        tally[0, blocks] -= start + blocks * BLOCK - size
    for k in range(CLASSES):
        for column in range(COLUMNS):
            tally[k, column] -= tally[k + 1, column]
    return blocks


@numba.njit(nogil=True, cache=True)
def rank_changes(
    base: Array,
    size: int,
    shift: int,
    field: int,
    thresholds: Array,
    class_of: Array,
    positions: Array,
    origin: int,
    bits: Array,
    signed: bool,
    counts: Array,
    last: Array,
    classes: Array,
    gaps: Array,
    sizes: Array,
    outward: Array,
) -> None:
    """Class of every change, the elements of that class since the last change in it, and its step.

    Args:
        base: ``(n,)`` elements, n a multiple of 64, of which the first ``size`` count; what fills
            up the last 64 is 0.
        shift, field, thresholds: the class map; ``class_of``: ``(256,)`` uint8, the same by key.
        positions: ``(k,)`` increasing; ``origin`` is the first element's.
        bits: ``(k,)`` the new elements.
        signed: whether elements are ordered as floats with a sign.
        counts: ``(16,)`` int32, carried through a segment: elements of class k so far.
        last: ``(16,)`` int32, carried as well: the rank behind the last change of class k.
        classes, gaps, sizes, outward: ``(k,)`` filled.
    """
    tally = np.zeros((CLASSES + 1, COLUMNS), np.uint16)
    lows, spans = _intervals(thresholds)
    change = 0
    for start in range(0, size, _STRETCH):
        blocks = _count_stretch(base, start, size, shift, field, thresholds, tally)
        while change < positions.size:
            at = np.int64(positions[change]) - origin
            if at >= start + _STRETCH:
                break
            old = np.uint64(base[at])
            k = np.uint64(class_of[(old >> np.uint64(shift)) & np.uint64(field)])
            block = np.uint64(at - start) >> _BLOCK_BITS
            first = start + np.int64(block << _BLOCK_BITS)
            own = between(base, first, shift, field, lows[k], spans[k])
            before = own & ((_ONE << (np.uint64(at) & _IN_BLOCK)) - _ONE)
            rank = counts[k] + np.int64(tally[k, block]) + popcount(before)
            classes[change] = k
            gaps[change] = rank - last[k]
            last[k] = rank + 1
            step, out = step_to(old, np.uint64(bits[change]), 8 * base.itemsize, signed)
            sizes[change] = step
            outward[change] = out
            change += 1
        for k in range(CLASSES):
            counts[k] += tally[k, blocks]


@numba.njit(nogil=True, cache=True)
def space_changes(
    base: Array,
    positions: Array,
    bits: Array,
    signed: bool,
    following: int,
    gaps: Array,
    sizes: Array,
    outward: Array,
) -> int:
    """The same without classes: all elements passed since the last change, and the step.

    Args:
        base: ``(n,)`` elements of the tensor.
        positions: ``(k,)`` increasing.
        bits: ``(k,)`` the new elements.
        signed: whether elements are ordered as floats with a sign.
        following: position of the element behind the last change; below 0 if that lies in a
            tensor before.
        gaps, sizes, outward: ``(k,)`` filled.

    Returns:
        ``following`` after the last of these changes.
    """
    for i in range(positions.size):
        prefetch(base, np.int64(positions[min(i + AHEAD, positions.size - 1)]))
        at = np.int64(positions[i])
        step, out = step_to(np.uint64(base[at]), np.uint64(bits[i]), 8 * base.itemsize, signed)
        gaps[i] = at - following
        sizes[i] = step
        outward[i] = out
        following = at + 1
    return following


@numba.njit(nogil=True, cache=True)
def locate_changes(
    base: Array,
    size: int,
    shift: int,
    field: int,
    thresholds: Array,
    left: Array,
    cursors: Array,
    ends: Array,
    gaps: Array,
    sizes: Array,
    outward: Array,
    signed: bool,
    origin: int,
    positions: Array,
    bits: Array,
) -> int:
    """The inverse: positions and new bits of one piece's changes, in order.

    Args:
        base, size, shift, field, thresholds: as for :func:`rank_changes`.
        left: ``(16,)`` int32, carried: elements of class k before its next change, NEVER if none.
        cursors, ends: ``(16,)`` int64: the next change of class k, and where class k ends.
        gaps, sizes, outward: the segment's changes, class after class.
        signed: whether elements are ordered as floats with a sign.
        origin: what to add to positions in ``base``.
        positions, bits: filled from their start.

    Returns:
        How many; -1 if there are more than fit.
    """
    tally = np.zeros((CLASSES + 1, COLUMNS), np.uint16)
    lows, spans = _intervals(thresholds)
    changed = np.zeros(BLOCKS, np.uint64)
    fresh = np.zeros(_STRETCH, bits.dtype)
    count = 0
    for start in range(0, size, _STRETCH):
        blocks = _count_stretch(base, start, size, shift, field, thresholds, tally)
        lanes = ~np.uint64(0) >> np.uint64(BLOCKS - blocks)
        hit = np.uint64(0)
        found = 0
        for k in range(CLASSES):
            members = np.int64(tally[k, blocks])
            ahead = np.int64(left[k])
            cursor = cursors[k]
            block, own, first, behind = 0, np.uint64(0), 0, 0
            while ahead < members:
                if ahead >= behind:  # else it is in the same block as the one before
                    block = popcount(passed_blocks(tally, k, ahead) & lanes)
                    own = between(base, start + block * BLOCK, shift, field, lows[k], spans[k])
                    first, behind = np.int64(tally[k, block]), np.int64(tally[k, block + 1])
                lane = select_bit(own, ahead - first)
                changed[block] |= _ONE << np.uint64(lane)
                hit |= _ONE << np.uint64(block)
                found += 1
                at = block * BLOCK + lane
                fresh[at] = step_from(
                    np.uint64(base[start + at]),
                    np.uint64(sizes[cursor]),
                    outward[cursor] != 0,
                    8 * base.itemsize,
                    signed,
                )
                cursor += 1
                ahead += 1 + np.int64(gaps[cursor]) if cursor < ends[k] else NEVER
            cursors[k] = cursor
            left[k] = min(ahead - members, NEVER)
        if count + found > positions.size:
            return -1
        for _ in range(found):
            block = low_bit(hit)
            due = changed[block]
            at = block * BLOCK + low_bit(due)
            due &= due - _ONE
            changed[block] = due
            hit ^= np.uint64(due == 0) << np.uint64(block)
            positions[count] = origin + start + at
            bits[count] = fresh[at]
            count += 1
    return count
