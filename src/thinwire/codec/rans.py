"""Interleaved range asymmetric numeral systems (rANS) with static tables.

After J. Duda, "Asymmetric numeral systems" (arXiv:1311.2540), in the form of F. Giesen's ryg_rans:
32-bit states that renormalise by 16 bits, frequencies that add up to 2¹². Symbols come in runs,
each with a table of its own; number i of a run belongs to state i mod 4, so that four dependency
chains run side by side.

A stream is the four states the decoder starts from, u32 each, and 16-bit words in the order in
which it takes them. Decoding must end with every state at 2¹⁶ and every word taken. That, and a
bound on every read, is all a decoder needs to be safe from hostile input.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

__all__ = [
    "SCALE",
    "SCALE_BITS",
    "decode_run",
    "decode_table",
    "encode_runs",
    "encode_table",
    "normalise",
]

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
LANES = 4

_LOW = np.uint32(1 << 16)
_MASK = np.uint32(SCALE - 1)
_BITS = np.uint32(SCALE_BITS)
_U16 = np.uint32(16)

Array = npt.NDArray[Any]


def normalise(counts: Array) -> Array:
    """Frequencies that add up to 2¹², at least 1 for every symbol that occurs.

    Integers only, so that the same counts give the same table everywhere. Shares are rounded down;
    what is left over goes where a unit is worth most, what is lacking comes from where it is worth
    least.

    Args:
        counts: ``(n,)`` occurrences, n at most 256; at least one is positive.
    """
    exact = [int(c) for c in counts]
    total = sum(exact)
    scaled = [max(1, c * SCALE // total) if c else 0 for c in exact]
    missing = SCALE - sum(scaled)
    while missing:
        change = 1 if missing > 0 else -1
        usable = [k for k, f in enumerate(scaled) if f > (change < 0)]

        def worth(k: int) -> tuple[int, int]:
            return exact[k] * SCALE // scaled[k], -k

        chosen = max(usable, key=worth) if change > 0 else min(usable, key=worth)
        scaled[chosen] += change
        missing -= change
    return np.array(scaled, np.uint32)


def encode_table(frequencies: Array) -> Array:
    """``(256,)`` uint32: start << 16 | frequency, by symbol."""
    table = np.zeros(256, np.uint32)
    starts = np.cumsum(frequencies) - frequencies
    table[: frequencies.size] = (starts.astype(np.uint32) << 16) | frequencies.astype(np.uint32)
    return table


def decode_table(frequencies: Array) -> Array:
    """``(4096,)`` uint32, by slot: symbol << 24 | (frequency − 1) << 12 | place in the symbol."""
    symbols = np.repeat(np.arange(frequencies.size, dtype=np.uint32), frequencies)
    starts = np.cumsum(frequencies) - frequencies
    place = np.arange(SCALE, dtype=np.uint32) - starts[symbols].astype(np.uint32)
    return (symbols << 24) | ((frequencies[symbols].astype(np.uint32) - 1) << 12) | place


@numba.njit(nogil=True, cache=True)
def encode_runs(symbols: Array, ends: Array, tables: Array, words: Array) -> int:
    """Encode runs of symbols.

    Args:
        symbols: ``(n,)`` uint8, run after run.
        ends: ``(r,)`` int64, where each run ends.
        tables: ``(r, 256)`` uint32, the encode table of each run.
        words: ``(n + 8,)`` uint16, filled from its end.

    Returns:
        Where in ``words`` the stream starts.
    """
    states = np.full(LANES, _LOW, np.uint32)
    at = words.size
    for run in range(ends.size - 1, -1, -1):
        start = ends[run - 1] if run else 0
        for i in range(ends[run] - 1, start - 1, -1):
            lane = (i - start) & (LANES - 1)
            entry = tables[run, symbols[i]]
            frequency = entry & np.uint32(0xFFFF)
            x = states[lane]
            if np.uint64(x) >= np.uint64(frequency) << np.uint64(20):
                at -= 1
                words[at] = x & np.uint32(0xFFFF)
                x = x >> _U16
            quotient = np.uint32(x // frequency)
            states[lane] = (quotient << _BITS) + (x - quotient * frequency) + (entry >> _U16)
    for lane in range(LANES - 1, -1, -1):
        at -= 2
        words[at] = states[lane] & np.uint32(0xFFFF)
        words[at + 1] = states[lane] >> _U16
    return at


@numba.njit(nogil=True, cache=True)
def decode_run(words: Array, at: int, states: Array, table: Array, symbols: Array) -> int:
    """Decode one run.

    Args:
        words: ``(m,)`` uint16, the stream.
        at: the next word to take.
        states: ``(4,)`` uint32, carried from run to run.
        table: ``(4096,)`` uint32.
        symbols: ``(n,)`` uint8, filled.

    Returns:
        The next word to take, or -1 if the stream ended too soon.
    """
    a, b, c, d = states[0], states[1], states[2], states[3]
    whole = symbols.size // 4 * 4
    i = 0
    while i < whole:
        if at + 4 > words.size:
            break
        s, t, u, v = table[a & _MASK], table[b & _MASK], table[c & _MASK], table[d & _MASK]
        symbols[i] = s >> np.uint32(24)
        symbols[i + 1] = t >> np.uint32(24)
        symbols[i + 2] = u >> np.uint32(24)
        symbols[i + 3] = v >> np.uint32(24)
        a = (((s >> _BITS) & _MASK) + np.uint32(1)) * (a >> _BITS) + (s & _MASK)
        b = (((t >> _BITS) & _MASK) + np.uint32(1)) * (b >> _BITS) + (t & _MASK)
        c = (((u >> _BITS) & _MASK) + np.uint32(1)) * (c >> _BITS) + (u & _MASK)
        d = (((v >> _BITS) & _MASK) + np.uint32(1)) * (d >> _BITS) + (v & _MASK)
        if a < _LOW:
            a = (a << _U16) | np.uint32(words[at])
            at += 1
        if b < _LOW:
            b = (b << _U16) | np.uint32(words[at])
            at += 1
        if c < _LOW:
            c = (c << _U16) | np.uint32(words[at])
            at += 1
        if d < _LOW:
            d = (d << _U16) | np.uint32(words[at])
            at += 1
        i += 4
    states[0], states[1], states[2], states[3] = a, b, c, d
    while i < symbols.size:
        x = states[i & 3]
        entry = table[x & _MASK]
        symbols[i] = entry >> np.uint32(24)
        x = (((entry >> _BITS) & _MASK) + np.uint32(1)) * (x >> _BITS) + (entry & _MASK)
        if x < _LOW:
            if at >= words.size:
                return -1
            x = (x << _U16) | np.uint32(words[at])
            at += 1
        states[i & 3] = x
        i += 1
    return at
