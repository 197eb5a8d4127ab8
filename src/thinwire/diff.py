"""One pass over two states: which elements changed, and their new bits.

The trainer's weights are read once, cast on the fly where they are served in another dtype, and
compared with the last committed bits as integers. Nothing of a tensor's size is allocated: every
thread works in scratch of one piece, and only changes are copied out.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numba
import numpy as np

from thinwire.casts import Cast, cast_between
from thinwire.dtypes import DType
from thinwire.patch import Bits, Patch, Positions, position_dtype
from thinwire.weights import PIECE, Tensor, Weights
from thinwire.workers import parallel_imap

__all__ = ["copy_out", "diff", "diff_bits"]

_WORDS = 512

Changes = tuple[Positions, Bits]
Visit = Callable[[int, int, Bits], "Changes | None"]


@numba.njit(nogil=True, cache=True)
def _find_changes(
    old: Bits,
    new: Bits,
    old_words: Bits,
    new_words: Bits,
    words: Positions,
    positions: Positions,
    bits: Bits,
) -> int:
    """Fill positions and bits with the changed elements; return how many there are.

    Two passes without a branch on the data: list the 64-bit words that differ, then the elements
    in them that do. At 1 % of changes a branch per word or block is mispredicted too often to pay.
    """
    lanes = 8 // old.itemsize
    count = 0
    full = old_words.size
    for block in range(0, full, _WORDS):
        found = 0
        for i in range(block, min(block + _WORDS, full)):
            words[found] = i
            found += old_words[i] != new_words[i]
        for k in range(found):
            first = np.int64(words[k]) * lanes
            for i in range(first, first + lanes):
                positions[count] = i
                bits[count] = new[i]
                count += old[i] != new[i]
    for i in range(full * lanes, old.size):
        if old[i] != new[i]:
            positions[count] = i
            bits[count] = new[i]
            count += 1
    return count


class _Scratch(threading.local):
    """Buffers of one piece per thread, grown to the widest element seen."""

    def __init__(self) -> None:
        self.words = np.empty(_WORDS, np.int32)
        # a word with any change is written lane by lane before the count moves on
        self.positions = np.empty(PIECE + 8, np.int32)
        self._buffers: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}

    def take(self, what: str, kind: DType, size: int) -> Bits:
        buffer = self._buffers.get(what)
        if buffer is None or buffer.nbytes < size * kind.itemsize:
            buffer = self._buffers[what] = np.empty(size * kind.itemsize, np.uint8)
        return buffer[: size * kind.itemsize].view(kind.bits)


_scratch = _Scratch()


def _aligned(bits: Bits, kind: DType, what: str) -> Bits:
    """``bits``, or a copy in scratch where 64-bit words of it would not be aligned."""
    if bits.ctypes.data % 8 == 0:
        return bits
    copy = _scratch.take(what, kind, bits.size)
    copy[:] = bits
    return copy


def diff_bits(old: Bits, new: Bits, kind: DType) -> tuple[Positions, Bits]:
    """Changed elements of one piece.

    Args:
        old, new: ``(n,)`` unsigned views, n at most :data:`~thinwire.weights.PIECE`.
        kind: their element type.

    Returns:
        ``(k,)`` int32 positions within the piece and ``(k,)`` new bits, both owned by the caller.
    """
    old, new = _aligned(old, kind, "old"), _aligned(new, kind, "new")
    positions, bits = _scratch.positions, _scratch.take("bits", kind, PIECE + 8)
    whole = old.nbytes // 8 * 8 // kind.itemsize
    count = _find_changes(
        old,
        new,
        old[:whole].view("<u8"),
        new[:whole].view("<u8"),
        _scratch.words,
        positions,
        bits,
    )
    return positions[:count].copy(), bits[:count].copy()


def _cast_piece(piece: Bits, cast: Cast | None, kind: DType) -> Bits:
    if cast is None:
        return piece
    target = _scratch.take("cast", kind, piece.size)
    cast(piece, target)
    return target


def _visit_pieces(
    weights: Weights, visit: Visit, threads: int | None
) -> Iterator[tuple[int, list[tuple[int, Changes]]]]:
    """Call ``visit(ordinal, start, bits)`` for every piece, in the serving dtype.

    Yields each tensor's ordinal and (start, result) list once all its pieces are done, so that
    their buffers can be joined and dropped tensor by tensor.

    Pieces of in-place tensors are spread over threads; a strided or device tensor is walked by
    one thread, since each of its pieces has to be brought over first.
    """
    casts = [cast_between(t.dtype, s.dtype) for s, t in zip(weights.schema, weights.tensors)]

    def run(task: tuple[int, Tensor, int | None]) -> list[tuple[int, Changes]]:
        ordinal, tensor, start = task
        kind, cast = weights.schema[ordinal].dtype, casts[ordinal]
        pieces = (
            tensor.pieces() if start is None else [(start, flats[ordinal][start : start + PIECE])]
        )
        return [
            (at, found)
            for at, piece in pieces
            if (found := visit(ordinal, at, _cast_piece(piece, cast, kind))) is not None
        ]

    flats = {k: t.flat() for k, t in enumerate(weights.tensors) if t.in_place}
    tasks: list[tuple[int, Tensor, int | None]] = []
    for ordinal, tensor in enumerate(weights.tensors):
        if ordinal in flats:
            tasks += [(ordinal, tensor, at) for at in range(0, tensor.numel, PIECE)]
        else:
            tasks.append((ordinal, tensor, None))
    done = zip(tasks, parallel_imap(run, tasks, threads=threads))
    for ordinal, group in itertools.groupby(done, key=lambda pair: pair[0][0]):
        yield ordinal, [found for _, some in group for found in some]


def diff(baseline: Sequence[Bits], weights: Weights, *, threads: int | None = None) -> list[Patch]:
    """What changed since ``baseline``: patches of the changed tensors, in schema order.

    Args:
        baseline: per tensor ``(numel,)`` the last committed bits, in the serving dtype.
        weights: the trainer's current weights.
        threads: default :func:`~thinwire.workers.available_threads`.

    The trainer may go on changing its weights as soon as this returns.
    """

    def visit(ordinal: int, start: int, piece: Bits) -> Changes | None:
        kind = weights.schema[ordinal].dtype
        found = diff_bits(baseline[ordinal][start : start + piece.size], piece, kind)
        return found if found[0].size else None

    patches = []
    for ordinal, found in _visit_pieces(weights, visit, threads):
        if found:
            spec = weights.schema[ordinal]
            patches.append(Patch(ordinal, spec, *_joined(found, spec.numel)))
    return patches


def _joined(found: list[tuple[int, Changes]], numel: int) -> Changes:
    index = position_dtype(numel)
    if len(found) == 1 and found[0][0] == 0:
        positions, bits = found[0][1]
        return positions.astype(index, copy=False), bits
    total = sum(positions.size for _, (positions, _) in found)
    positions = np.empty(total, index)
    bits = np.empty(total, found[0][1][1].dtype)
    at = 0
    for start, (some, values) in found:
        end = at + some.size
        np.add(some, start, out=positions[at:end], dtype=index, casting="unsafe")
        bits[at:end] = values
        at = end
    return positions, bits


def copy_out(weights: Weights, *, threads: int | None = None) -> list[Bits]:
    """A copy of the weights in the serving dtype: per tensor ``(numel,)`` unsigned bits."""
    copies: list[Bits] = [np.empty(spec.numel, spec.dtype.bits) for spec in weights.schema]

    def visit(ordinal: int, start: int, piece: Bits) -> None:
        copies[ordinal][start : start + piece.size] = piece

    collections.deque(_visit_pieces(weights, visit, threads), maxlen=0)
    return copies
