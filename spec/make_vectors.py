"""Writes the frozen vectors of the payload format: once.

``python spec/make_vectors.py FOLDER`` writes every vector that FOLDER does not have, and refuses to
touch one that it has: vectors of a format version are never changed or removed, only added to.

``spec/README.md`` says what a vector is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from assembled import assembled
from describe import SEGMENT, State, Vector, accepted
from refusals import refusals

from thinwire import __version__, codec
from thinwire.dtypes import DTYPES
from thinwire.patch import Patch, position_dtype
from thinwire.schema import Schema, TensorSpec
from thinwire.testing.strategies import changed_bits, random_bits


def encoded(state: State, name: str) -> bytes:
    """The state's changes as the library writes them."""
    schema = Schema(tuple(TensorSpec(n, DTYPES[d], tuple(s)) for n, d, s in state.tensors))
    base, patches = [], []
    for k, spec in enumerate(schema):
        pattern = state.base[spec.name]
        whole = (pattern * (-(-spec.nbytes // len(pattern))))[: spec.nbytes] if pattern else b""
        base.append(np.frombuffer(bytearray(whole), spec.dtype.bits))
        some = sorted(state.changes.get(spec.name, {}).items())
        if some:
            positions = np.array([p for p, _ in some], position_dtype(spec.numel))
            bits = np.array([b for _, b in some], spec.dtype.bits)
            patches.append(Patch(k, spec, positions, bits).check())
    return b"".join(codec.encode(patches, codec=name, base=base, metadata={"version": "7"}))


# What the library writes


def weights(count: int, seed: int) -> Any:
    """bf16 elements with exponents as weights have them."""
    rng = random.Random(seed)
    bits = [
        rng.getrandbits(1) << 15 | (121 - _octave(rng)) << 7 | rng.getrandbits(7)
        for _ in range(count)
    ]
    return np.array(bits, "<u2")


def _octave(rng: random.Random) -> int:
    octave = 0
    while octave < 20 and rng.getrandbits(1):
        octave += 1
    return octave


def nudged(old: Any, seed: int) -> Any:
    """Neighbouring bits, the more often the smaller the weight."""
    rng = random.Random(seed)
    new = old.copy()
    for i, bits in enumerate(old.tolist()):
        octave = 121 - (bits >> 7 & 255)
        if rng.random() < min(0.9, 0.004 * 4**octave):
            step = rng.choice([1, 1, 1, 2, 9])
            new[i] = bits + step if rng.random() < 0.5 else bits - step
    return new


def dtypes() -> State:
    state = State([], {})
    for k, kind in enumerate(DTYPES.values()):
        old = random_bits(kind, 150 + k, seed=k)
        state.add(f"t{k:02}", kind.name, old, changed_bits(old, 0.1, seed=100 + k))
    return state


def several_classes() -> State:
    state = State([], {})
    old = weights(8000, 1)
    state.add("w", "BF16", old, nudged(old, 2), [100, 80])
    return state


def one_class() -> State:
    state = State([], {})
    old = np.arange(128, dtype="<u2") + np.uint16(0x3F80)
    state.add("w", "BF16", old, changed_bits(old, 0.1, seed=1))
    return state


def infinities() -> State:
    state = State([], {})
    old = weights(500, 3)
    old[::7] = 0x7F80
    old[1::50] = 0xFF81
    new = old.copy()
    new[::21] = 0x7F7F
    new[2::30] ^= 0x8000
    state.add("w", "BF16", old, new)
    old = random_bits(DTYPES["F64"], 300, seed=4)
    state.add("x", "F64", old, changed_bits(old, 0.2, seed=5))
    return state


def dense() -> State:
    state = State([], {})
    for k, (kind, density) in enumerate([("BF16", 1.0), ("BF16", 0.02), ("U8", 1.0), ("F32", 0.9)]):
        old = random_bits(DTYPES[kind], 200, seed=k)
        state.add(f"t{k}", kind, old, changed_bits(old, density, seed=10 + k))
    return state


def wide_steps() -> State:
    state = State([], {})
    edges = [0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**62, 0x7FF0 << 48]
    old = np.array([a for a in edges for _ in edges] + [5] * 500, "<u8")
    new = np.array([b for _ in edges for b in edges] + [5] * 500, "<u8")
    for kind in ("F64", "I64", "U64"):
        state.add(kind.lower(), kind, old, new)
    return state


def sizes() -> State:
    state = State([], {})
    shapes = {"scalar": [], "one": [1], "empty": [0, 3], "63": [63], "64": [8, 8], "65": [65]}
    for k, (name, shape) in enumerate(shapes.items()):
        old = np.full(int(np.prod(shape)), 0x3F80 + k, "<u2")
        new = old.copy()
        new[-1:] += 1
        state.add(f"t{name}", "BF16", old, new)
        state.tensors = [*state.tensors[:-1], (f"t{name}", "BF16", shape)]
    state.add("wide", "BF16", old := weights(777, 5), old)
    return state


def several_segments() -> State:
    pattern = weights(1009, 6)
    shapes = {"a": SEGMENT - 100, "b": 300, "c": SEGMENT - 250, "d": 51, "e": 40}
    state = State(
        [(name, "BF16", [size]) for name, size in shapes.items()],
        dict.fromkeys(shapes, pattern.tobytes()),
    )
    # the first segment, with its first and last elements; nothing in the second; the third's first
    # and last; c and d meet at the border
    where = {
        "a": [0, 5, 63, 64, 1000, *range(5000, 9000, 37), SEGMENT - 101],
        "b": [0, 98, 99],
        "d": [50],
        "e": [0, 7, 39],
    }
    for name, positions in where.items():
        state.changes[name] = {p: int(pattern[p % 1009]) + 1 + p % 3 for p in positions}
    return state


def nothing() -> State:
    state = State([], {})
    state.add("w", "BF16", old := weights(10, 7), old)
    return state


WRITTEN: dict[str, tuple[Callable[[], State], str]] = {
    "dtypes": (dtypes, "a tensor of every dtype, all patterns of bits"),
    "several-classes": (several_classes, "weights whose changes depend on their exponents"),
    "one-class": (one_class, "elements of one exponent"),
    "infinities": (infinities, "key 255: class 15 whatever the thresholds"),
    "dense": (dense, "tensors that are stored whole among others that are coded"),
    "wide-steps": (wide_steps, "64-bit steps with up to 61 raw bits"),
    "sizes": (sizes, "0-d, empty, and tensors around a multiple of 64 elements"),
    "several-segments": (several_segments, "three segments, the second without a change"),
    "nothing": (nothing, "no tensor changes"),
}


def vectors() -> dict[str, Vector]:
    """Every vector, by name."""
    found = {}
    for case, (make, about) in WRITTEN.items():
        for name in ("raw", "packed", "compact"):
            state = make()
            file = accepted(state, encoded(state, name), about)
            found[f"{name}-1-thinwire-{__version__}-{case}"] = file
    return {**found, **assembled(), **refusals()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    require_unchanged(folder)
    for name, (file, described) in vectors().items():
        paths = folder / f"{name}.safetensors", folder / f"{name}.json"
        if any(path.exists() for path in paths):
            print(f"kept     {name}")
            continue
        with paths[0].open("xb") as out:
            out.write(file)
        with paths[1].open("x") as out:
            json.dump(described, out, indent=1)
            out.write("\n")
        print(f"written  {name}")
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in listed(folder)]
    (folder / "SHA256SUMS").write_text("".join(sums))


def require_unchanged(folder: Path) -> None:
    """Stop if a vector that was ever written is gone or is not what it was."""
    sums = folder / "SHA256SUMS"
    for line in sums.read_text().splitlines() if sums.exists() else []:
        digest, name = line.split()
        path = folder / name
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise SystemExit(f"{path} is gone or changed: vectors are frozen")


def listed(folder: Path) -> list[Path]:
    """The vectors, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))


if __name__ == "__main__":
    main()
