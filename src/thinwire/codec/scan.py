"""Ranks of changes among the elements of their class, and back: the two scans over the base.

Both walk a piece of a tensor in blocks of 64 elements. A block without a change needs only its
class counts, a dozen vector instructions; only changed elements are looked at one by one.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from thinwire.codec.simd import (
    BLOCK,
    CLASSES,
    class_masks,
    count_block,
    low_bit,
    pass_block,
    popcount,
)
from thinwire.ulp import step_from, step_to

__all__ = ["NEVER", "locate_changes", "rank_changes"]

Array = npt.NDArray[Any]
_ONE = np.uint64(1)

NEVER = 0x7FFFFFFF
"""More elements than a segment has."""


@numba.njit(nogil=True, inline="always")
def _cut(masks: Array, size: int) -> None:
    """Leave only the first ``size`` elements of a block in any class."""
    valid = (_ONE << np.uint64(size)) - _ONE
    for k in range(CLASSES):
        masks[k] &= valid


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
        base: ``(n,)`` elements, n a multiple of 64, of which the first ``size`` count.
        shift, field, thresholds: the class map; ``class_of``: ``(256,)`` uint8, the same by key.
        positions: ``(k,)`` increasing; ``origin`` is the first element's.
        bits: ``(k,)`` the new elements.
        signed: whether elements are ordered as floats with a sign.
        counts: ``(17,)`` int32, carried through a segment: elements of class k or higher so far.
        last: ``(16,)`` int32, carried as well: the rank behind the last change of class k.
        classes, gaps, sizes, outward: ``(k,)`` filled.
    """
    masks = np.zeros(CLASSES + 1, np.uint64)
    change = 0
    following = np.int64(positions[0]) - origin if positions.size else np.int64(size)
    for at in range(0, size, BLOCK):
        whole = at + BLOCK <= size
        if following >= at + BLOCK and whole:
            count_block(base, at, shift, field, thresholds, counts)
            continue
        class_masks(base, at, shift, field, thresholds, masks)
        if not whole:
            _cut(masks, size - at)
        while change < positions.size and following < at + BLOCK:
            old = np.uint64(base[following])
            k = np.int64(class_of[np.int64(old >> np.uint64(shift)) & field])
            below = (_ONE << np.uint64(following - at)) - _ONE
            rank = counts[k] - counts[k + 1] + popcount(masks[k] & ~masks[k + 1] & below)
            classes[change] = k
            gaps[change] = rank - last[k]
            last[k] = rank + 1
            step, out = step_to(old, np.uint64(bits[change]), 8 * base.itemsize, signed)
            sizes[change] = step
            outward[change] = out
            change += 1
            if change < positions.size:
                following = np.int64(positions[change]) - origin
        for k in range(CLASSES):
            counts[k] += popcount(masks[k])


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
    masks = np.zeros(CLASSES + 1, np.uint64)
    which = np.zeros(BLOCK, np.int64)
    count = 0
    for at in range(0, size, BLOCK):
        whole = at + BLOCK <= size
        due = np.uint64(0)
        if whole:
            due = pass_block(base, at, shift, field, thresholds, left)
            if due == 0:
                continue
            class_masks(base, at, shift, field, thresholds, masks)
        else:
            class_masks(base, at, shift, field, thresholds, masks)
            _cut(masks, size - at)
            for k in range(CLASSES):
                left[k] -= popcount(masks[k] & ~masks[k + 1])
                if left[k] < 0:
                    due |= _ONE << np.uint64(k)
        changed = np.uint64(0)
        while due != 0:
            k = low_bit(due)
            due &= due - _ONE
            own = masks[k] & ~masks[k + 1]
            members = popcount(own)
            ahead = np.int64(left[k]) + members
            passed = 0
            cursor = cursors[k]
            while ahead < members:
                while passed < ahead:
                    own &= own - _ONE
                    passed += 1
                lane = low_bit(own)
                changed |= _ONE << np.uint64(lane)
                which[lane] = cursor
                cursor += 1
                ahead += 1 + np.int64(gaps[cursor]) if cursor < ends[k] else NEVER
            cursors[k] = cursor
            left[k] = min(ahead - members, NEVER)
        if count + popcount(changed) > positions.size:
            return -1
        while changed != 0:
            lane = low_bit(changed)
            changed &= changed - _ONE
            i = which[lane]
            positions[count] = origin + at + lane
            bits[count] = step_from(
                np.uint64(base[at + lane]),
                np.uint64(sizes[i]),
                outward[i] != 0,
                8 * base.itemsize,
                signed,
            )
            count += 1
    return count
