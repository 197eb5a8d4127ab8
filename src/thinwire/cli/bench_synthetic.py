"""States that stand for what no real pair here covers: other dtypes, and every density."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.cli.bench_rivals import Delta
from thinwire.cli.bench_state import QUICK, QWEN3_06B, Shape
from thinwire.dtypes import DType, dtype
from thinwire.patch import Bits, Patch, apply_patch, position_dtype
from thinwire.schema import Schema, TensorSpec

__all__ = ["CASES", "TINY", "Shape", "full_shape", "quick_shape", "synthetic"]

TINY = Shape(512, 64, 1, 128, heads=2, kv_heads=1, head_dim=32)
"""For tests."""

CASES = (
    *(("BF16", density) for density in (0.0005, 0.01, 0.1, 0.5, 1.0)),
    *((name, 0.01) for name in ("F8_E4M3", "F8_E5M2", "F16", "F32")),
)
"""(dtype, share of elements that change)."""

_BLOCK = 1_000_003
_STEPS = np.array([1, 1, 1, 2, 3, -1, -1, -1, -2, -3], np.int8)


def quick_shape() -> Shape:
    """20 M parameters."""
    return QUICK


def full_shape() -> Shape:
    """596 M parameters."""
    return QWEN3_06B


def synthetic(shape: Shape, name: str, density: float) -> Delta:
    """Normally distributed weights, and changes of 1 to 3 ULP at random positions.

    Changes are equally likely everywhere, so the old exponents tell nothing: this shows what a
    codec does at a density, not how small real deltas are.
    """
    kind = dtype(name)
    schema = Schema(tuple(TensorSpec(s.name, kind, s.shape) for s in shape.schema()))
    random = np.random.default_rng(0)
    block = _values(random.standard_normal(_BLOCK, np.float32), kind)
    old = [np.resize(np.roll(block, -7919 * k), spec.numel) for k, spec in enumerate(schema)]
    patches = list(_changes(random, schema, old, density))
    new = [bits.copy() for bits in old]
    for patch in patches:
        apply_patch(new[patch.ordinal], patch)
    return Delta(schema, old, new, patches)


def _values(values: npt.NDArray[Any], kind: DType) -> npt.NDArray[Any]:
    """Standard normal values scaled as weights of the dtype are, in its bits (truncated)."""
    if kind.name.startswith("F8"):  # fp8 comes with a scale of its own
        half = (values * np.float32(64)).astype("<f2").view("<u2")
        bits = half >> 8 if kind.name == "F8_E5M2" else _e4m3(half)
    else:
        single = values * np.float32(0.02)
        if kind.name == "F16":
            bits = single.astype("<f2").view("<u2")
        else:  # bf16 is the upper half of fp32
            bits = single.view("<u4") >> (32 - kind.width)
    return bits.astype(kind.bits)


def _e4m3(half: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """From fp16: 3 of 10 fraction bits stay, and the exponent's bias of 15 becomes 7."""
    magnitude = np.clip(((half & 0x7FFF) >> 7).astype(np.int16) - (8 << 3), 0, 0x7E)
    return ((half >> 8) & 0x80) | magnitude.astype(np.uint16)


def _changes(
    random: np.random.Generator, schema: Schema, old: list[Bits], density: float
) -> Iterator[Patch]:
    for ordinal, spec in enumerate(schema):
        hit = np.flatnonzero(random.random(spec.numel, np.float32) < density)
        if not hit.size:
            continue
        steps = random.choice(_STEPS, hit.size).astype(f"<i{spec.dtype.itemsize}")
        bits = old[ordinal][hit] + steps.view(spec.dtype.bits)
        yield Patch(ordinal, spec, hit.astype(position_dtype(spec.numel)), bits)
