"""Additive 128-bit digests of tensors, and the digest of a whole state.

For every element with row-major *global* index i and bits b of width w, join ``x = (i << w) | b``
(64-bit elements are two 32-bit words, low word first, with indices 2i and 2i + 1). A tensor's
digest is the pair of sums mod 2⁶⁴

    lo = Σ splitmix64_finaliser(x ^ 0x9E3779B97F4A7C15)
    hi = Σ murmur3_fmix64(x ^ 0xD6E8FEB86659FD93)

so it can be computed in any order, added up over shards, and updated from the changed elements
alone. The finalisers are those of Steele, Lea and Flood (SplitMix, OOPSLA 2014) and of Appleby's
MurmurHash3. Such sums stop accidents, not adversaries: SHA-256 guards bytes in the bucket.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from thinwire.patch import Bits, Patch, Positions
from thinwire.prefetch import AHEAD, prefetch
from thinwire.schema import Schema
from thinwire.workers import parallel_map

__all__ = [
    "ZERO",
    "TensorDigest",
    "digest_change",
    "digest_replaced",
    "digest_tensor",
    "digest_tensors",
    "state_digest",
]

_MASK = (1 << 64) - 1
_CHUNK = 1 << 21

_LO_SEED = np.uint64(0x9E3779B97F4A7C15)
_LO_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_LO_MUL2 = np.uint64(0x94D049BB133111EB)
_HI_SEED = np.uint64(0xD6E8FEB86659FD93)
_HI_MUL1 = np.uint64(0xFF51AFD7ED558CCD)
_HI_MUL2 = np.uint64(0xC4CEB9FE1A85EC53)
_U27, _U30, _U31, _U32, _U33 = (np.uint64(n) for n in (27, 30, 31, 32, 33))


class TensorDigest(NamedTuple):
    """Two sums mod 2⁶⁴. Adding digests of disjoint parts gives the digest of the whole."""

    lo: int
    hi: int

    def __add__(self, other: tuple[object, ...]) -> TensorDigest:
        if not isinstance(other, TensorDigest):
            return NotImplemented
        return TensorDigest((self.lo + other.lo) & _MASK, (self.hi + other.hi) & _MASK)


ZERO = TensorDigest(0, 0)


@numba.njit(inline="always")
def _mix_lo(x: np.uint64) -> np.uint64:
    x ^= _LO_SEED
    x = (x ^ (x >> _U30)) * _LO_MUL1
    x = (x ^ (x >> _U27)) * _LO_MUL2
    mixed: np.uint64 = x ^ (x >> _U31)
    return mixed


@numba.njit(inline="always")
def _mix_hi(x: np.uint64) -> np.uint64:
    x ^= _HI_SEED
    x = (x ^ (x >> _U33)) * _HI_MUL1
    x = (x ^ (x >> _U33)) * _HI_MUL2
    mixed: np.uint64 = x ^ (x >> _U33)
    return mixed


@numba.njit(nogil=True, cache=True)
def _digest_run(bits: Bits, start: np.uint64, width: np.uint64) -> tuple[np.uint64, np.uint64]:
    lo = np.uint64(0)
    hi = np.uint64(0)
    for i in range(bits.size):
        x = ((start + np.uint64(i)) << width) | np.uint64(bits[i])
        lo += _mix_lo(x)
        hi += _mix_hi(x)
    return lo, hi


@numba.njit(nogil=True, cache=True)
def _digest_change(
    base: Bits, positions: Positions, bits: Bits, width: np.uint64
) -> tuple[np.uint64, np.uint64]:
    lo = np.uint64(0)
    hi = np.uint64(0)
    for i in range(positions.size):
        prefetch(base, np.int64(positions[min(i + AHEAD, positions.size - 1)]))
        index = np.uint64(positions[i]) << width
        old = index | np.uint64(base[positions[i]])
        new = index | np.uint64(bits[i])
        lo += _mix_lo(new) - _mix_lo(old)
        hi += _mix_hi(new) - _mix_hi(old)
    return lo, hi


@numba.njit(nogil=True, cache=True)
def _digest_change_64(base: Bits, positions: Positions, bits: Bits) -> tuple[np.uint64, np.uint64]:
    lo = np.uint64(0)
    hi = np.uint64(0)
    low_word = np.uint64(0xFFFFFFFF)
    for i in range(positions.size):
        index = np.uint64(2 * positions[i]) << _U32
        next_index = np.uint64(2 * positions[i] + 1) << _U32
        old, new = np.uint64(base[positions[i]]), np.uint64(bits[i])
        for a, b in (
            (index | (old & low_word), index | (new & low_word)),
            (next_index | (old >> _U32), next_index | (new >> _U32)),
        ):
            lo += _mix_lo(b) - _mix_lo(a)
            hi += _mix_hi(b) - _mix_hi(a)
    return lo, hi


def digest_tensor(bits: Bits, *, start: int = 0) -> TensorDigest:
    """Digest of a run of elements.

    Args:
        bits: ``(n,)`` contiguous unsigned view of the elements.
        start: global index of the first one.
    """
    if bits.dtype.itemsize == 8:
        bits, start = bits.view("<u4"), 2 * start
    width = np.uint64(8 * bits.dtype.itemsize)
    lo, hi = _digest_run(bits, np.uint64(start), width)
    return TensorDigest(int(lo), int(hi))


def digest_change(base: Bits, patch: Patch) -> TensorDigest:
    """What applying ``patch`` to ``base`` adds to the tensor's digest. Reads changed elements only.

    Args:
        base: ``(numel,)`` the tensor's elements before the change.
    """
    if base.dtype.itemsize == 8:
        lo, hi = _digest_change_64(base, patch.positions, patch.bits)
    else:
        width = np.uint64(8 * base.dtype.itemsize)
        lo, hi = _digest_change(base, patch.positions, patch.bits, width)
    return TensorDigest(int(lo), int(hi))


@numba.njit(nogil=True, cache=True)
def _digest_at(positions: Positions, bits: Bits, width: np.uint64) -> tuple[np.uint64, np.uint64]:
    lo = np.uint64(0)
    hi = np.uint64(0)
    for i in range(positions.size):
        x = (np.uint64(positions[i]) << width) | np.uint64(bits[i])
        lo += _mix_lo(x)
        hi += _mix_hi(x)
    return lo, hi


def digest_replaced(patch: Patch, old: Bits) -> TensorDigest:
    """Like :func:`digest_change`, given ``(n,)`` the old elements at the patch's positions only."""
    positions, new = patch.positions, patch.bits
    if old.dtype.itemsize == 8:
        low = 2 * positions.astype(np.int64)
        positions = np.stack([low, low + 1], 1).ravel()
        old, new = old.view("<u4"), new.view("<u4")
    width = np.uint64(8 * old.dtype.itemsize)
    before, after = _digest_at(positions, old, width), _digest_at(positions, new, width)
    return TensorDigest(*((int(b) - int(a)) & _MASK for a, b in zip(before, after)))


def digest_tensors(tensors: Sequence[Bits], *, threads: int | None = None) -> list[TensorDigest]:
    """Digests of whole tensors (each a contiguous unsigned 1-D view), on several threads."""
    runs = [(k, i) for k, bits in enumerate(tensors) for i in range(0, bits.size, _CHUNK)]
    parts = parallel_map(
        lambda run: digest_tensor(tensors[run[0]][run[1] : run[1] + _CHUNK], start=run[1]),
        runs,
        threads=threads,
    )
    digests = [ZERO] * len(tensors)
    for (k, _), part in zip(runs, parts):
        digests[k] += part
    return digests


def state_digest(schema: Schema, digests: Sequence[TensorDigest]) -> str:
    """SHA-256, in hex, over the schema-ordered (name, dtype, shape, digest) of every tensor.

    The byte encoding is fixed in ``docs/format.md``.
    """
    state = hashlib.sha256(b"thinwire-state-v1\0" + struct.pack("<Q", len(schema)))
    for spec, digest in zip(schema, digests, strict=True):
        name, code = spec.name.encode(), spec.dtype.name.encode()
        state.update(struct.pack("<I", len(name)) + name + struct.pack("<I", len(code)) + code)
        state.update(struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape))
        state.update(struct.pack("<QQ", *digest))
    return state.hexdigest()
