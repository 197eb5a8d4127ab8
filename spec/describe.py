"""Vectors and what is said of them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from assemble import Group

F8, BF16, I64 = 3, 9, 13
SEGMENT = 1 << 22
Vector = tuple[bytes, dict[str, Any]]
"""A payload and its description."""
Tensors = Sequence[tuple[str, str, Sequence[int]]]


@dataclass
class State:
    """Tensors in schema order, their base (bytes to repeat), and new bits by position."""

    tensors: Tensors
    base: Mapping[str, bytes]
    changes: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(self, name: str, dtype: str, old: Any, new: Any, shape: Sequence[int] = ()) -> None:
        """A tensor as it was and as it is."""
        self.tensors = [*self.tensors, (name, dtype, shape or [old.size])]
        self.base = {**self.base, name: old.tobytes()}
        where = np.flatnonzero(old != new).tolist()
        if where:
            self.changes[name] = {p: int(new[p]) for p in where}


def hash_of(changes: Mapping[int, int]) -> str:
    """SHA-256 of u64 position, u64 bits, for each change by position."""
    pairs = b"".join(struct.pack("<QQ", *pair) for pair in sorted(changes.items()))
    return hashlib.sha256(pairs).hexdigest()


def description(state: State, file: bytes, about: str) -> dict[str, Any]:
    """What both kinds of vectors say."""
    return {
        "about": about,
        "tensors": [[name, dtype, list(shape)] for name, dtype, shape in state.tensors],
        "base": {name: data.hex() for name, data in state.base.items()},
        "sha256": hashlib.sha256(file).hexdigest(),
    }


def accepted(state: State, file: bytes, about: str) -> Vector:
    """A vector that holds the state's changes."""
    changes = {
        name: {"count": len(some), "sha256": hash_of(some)}
        for name, some in sorted(state.changes.items())
    }
    return file, {**description(state, file, about), "changes": changes}


def refused(state: State, file: bytes, about: str, kind: str = "corrupt") -> Vector:
    """A vector that a reader must refuse."""
    return file, {**description(state, file, about), "refused": kind}


def meta(name: str, **other: str) -> dict[str, str]:
    """The ``__metadata__`` of a payload."""
    return {"format": "thinwire-delta", "major": "1", "codec": name, **other}


def simple() -> tuple[State, Group]:
    """100 bf16 elements of exponent 127, every tenth one a step up, and an I64 tensor beside it."""
    old = np.arange(100, dtype="<u2") + np.uint16(0x3F80)
    new = old.copy()
    new[9::10] += 1
    state = State([], {})
    state.add("a", "BF16", old, new)
    state.add("b", "I64", old.astype("<u8"), old.astype("<u8"))
    return state, Group(BF16, 16, [0], {0: [(9, 0, 1)] * 10})
