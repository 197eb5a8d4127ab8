"""What a writer may do that the library's does not."""

from __future__ import annotations

import struct

import numpy as np
from assemble import Group, body, container, even_table, payload, with_header
from describe import BF16, F8, I64, State, Vector, accepted, meta, simple


def assembled() -> dict[str, Vector]:
    """All of them, by name."""
    found = {}

    def keep(name: str, state: State, file: bytes, about: str, kind: str = "compact") -> None:
        found[f"{kind}-1-assembled-{name}"] = accepted(state, file, about)

    state, group = simple()
    keep("plain", state, payload(body([group]), "compact"), "a segment with one-symbol tables")
    keep("plain", state, payload(body([group]), "packed"), "the same, packed", "packed")
    group = Group(BF16, 16, [0], {0: [(9, 0, 1)] * 10}, [128, 130, 255])
    keep("threshold-255", state, payload(body([group]), "compact"), "a threshold of 255, written")
    group = Group(BF16, 16, [0], {1: [(9, 0, 1)] * 10}, [127])
    group.tables[9] = (even_table([1]), even_table([0, 200]))
    keep("idle-class", state, payload(body([group]), "compact"), "a class without changes")

    state, group = simple()
    wide = Group(I64, 64, [1], {0: [(3, 2**63 - 1, 1), (0, 2**62 + 5, 0)]})
    state.changes["b"] = {3: 0x3F83 + 2**63, 4: (0x3F84 - 2**62 - 6) % 2**64}
    keep(
        "half-circle",
        state,
        payload(body([wide, group]), "compact"),
        "groups from the last dtype to the first; a step of 2^63 upward",
    )

    old = np.full(64, 0x38, "u1")
    state = State([], {})
    state.add("a", "F8_E4M3", old, old + np.uint8(1))
    state.add("b", "F8_E4M3", old, old + np.uint8(2))
    state.add("c", "F8_E4M3", old, np.where(np.arange(64) % 2, old, 0))
    groups = [Group(F8, 8, [k], {1: [(0, k, 1)] * 64}, [5]) for k in (1, 0)]
    data = bytes(np.where(np.arange(64) % 2, old, 0).astype("u1"))
    keep(
        "same-dtype-twice",
        state,
        payload(body(groups, [(2, data)]), "compact"),
        "two groups of one dtype, each element changed; a dense tensor that changes in part",
    )

    state, group = simple()
    header = payload(body([group]), "compact", unknown="key")
    length = struct.unpack("<Q", header[:8])[0]
    for shift in range(1, 4):
        file = with_header(header[8 : 8 + length] + b" " * shift, header[8 + length :])
        keep(
            f"alignment-{shift}", state, file, "data at another alignment; an unknown metadata key"
        )
    old = np.array([(100 + i * 7 % 32) << 7 | i << 15 & 0x8000 for i in range(400)], "<u2")
    thresholds = list(range(101, 131, 2))
    chosen = [i for i in range(400) if i % 5 == 2 or i > 396]
    changes: dict[int, list[tuple[int, int, int]]] = {k: [] for k in range(16)}
    passed = [0] * 16
    new = old.copy()
    for i, bits in enumerate(old.tolist()):
        k = sum((bits >> 7 & 255) >= t for t in thresholds)
        if i in chosen:
            changes[k].append((passed[k], i % 50, i >> 2 & 1))
            new[i] = bits + (i % 50 + 1) * (1 if i >> 2 & 1 else -1)  # outward: a larger magnitude
            passed[k] = -1
        passed[k] += 1
    many = State([], {})
    many.add("w", "BF16", old, new)
    group = Group(BF16, 16, [0], changes, thresholds)
    keep("sixteen-classes", many, payload(body([group]), "compact"), "changes in all classes")
    positions, values = struct.pack("<2i", 0, 99), struct.pack("<2Q", 2**64 - 1, 1)
    state.changes = {"b": {0: 2**64 - 1, 99: 1}}
    entries = [("b.values", "I64", [2], values), ("b.indices", "I32", [2], positions)]
    file = container(entries, meta("raw"))
    keep("order", state, file, "values before indices", "raw")
    length = struct.unpack("<Q", file[:8])[0]
    file = with_header(file[8 : 8 + length] + b" " * (1 - length % 2 + 2), file[8 + length :])
    keep("alignment", state, file, "data at an odd place", "raw")
    return found
