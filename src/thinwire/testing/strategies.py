"""Hypothesis strategies for what thinwire ships: dtypes, schemas with ties, states, and changes.

Needs hypothesis. Bulk data comes from a drawn seed, so that large tensors shrink by their schema
and not element by element; special values (±0, subnormals, infinities, NaN payloads) are frequent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from thinwire.dtypes import DTYPES, DType
from thinwire.patch import Bits
from thinwire.schema import Schema, TensorSpec
from thinwire.weights import FlatTensor

__all__ = [
    "StatePair",
    "changed_bits",
    "dtypes",
    "flat_tensors",
    "names",
    "random_bits",
    "schemas",
    "shapes",
    "special_bits",
    "state_pairs",
    "states",
]


def special_bits(kind: DType) -> Bits:
    """Patterns of a dtype that casts, comparisons or sign tricks tend to get wrong."""
    top = 1 << (kind.width - 1)
    values = {0, 1, 2, top - 1, top, top + 1, 2 * top - 1}
    if kind.is_float:
        fraction = 1 << kind.mantissa_bits
        infinity = ((1 << kind.exponent_bits) - 1) * fraction
        # subnormal borders, one, largest finite, infinity, a quiet and two signalling NaNs
        edges = {fraction - 1, fraction, infinity // 2, infinity - 1, infinity}
        edges |= {infinity + fraction // 2, infinity + 1, infinity + fraction // 2 - 1}
        values |= edges | {edge + top for edge in edges}
    return np.array(sorted(v for v in values if 0 <= v < 2 * top), kind.bits)


def random_bits(kind: DType, count: int, seed: int) -> Bits:
    """``(count,)`` patterns of a dtype: uniform ones, and about one special value in eight."""
    rng = np.random.default_rng(seed)
    bits: Bits = rng.integers(0, 1 << kind.width, count, np.dtype(f"u{kind.itemsize}"))
    special = rng.random(count) < 0.125
    bits[special] = rng.choice(special_bits(kind), int(special.sum()))
    return bits.astype(kind.bits, copy=False)


def changed_bits(bits: Bits, density: float, seed: int) -> Bits:
    """A copy in which about ``density`` of the elements (exactly none at 0, all at 1) differ."""
    rng = np.random.default_rng(seed)
    chosen = rng.random(bits.size) < density
    flips = rng.integers(1, 1 << (8 * bits.itemsize), bits.size, np.dtype(f"u{bits.itemsize}"))
    return np.where(chosen, bits ^ flips, bits).astype(bits.dtype, copy=False)


def dtypes() -> st.SearchStrategy[DType]:
    """Any element type."""
    return st.sampled_from(list(DTYPES.values()))


def names() -> st.SearchStrategy[str]:
    """Tensor names: dotted paths, mostly like those of checkpoints, some with other letters."""
    plain = st.from_regex(r"(layers\.[0-9]\.)?[a-z]{1,4}\.(weight|bias)", fullmatch=True)
    odd = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1)
    return plain | odd.filter(lambda name: name != "__metadata__" and len(name.encode()) <= 1024)


def shapes(max_elements: int = 2000) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of up to four dimensions, 0-d and empty ones among them."""
    sides = st.lists(st.integers(0, max_elements), max_size=1) | st.lists(
        st.integers(0, round(max_elements**0.25)), min_size=2, max_size=4
    )
    return sides.map(tuple)


@st.composite
def schemas(
    draw: st.DrawFn, *, max_tensors: int = 5, max_elements: int = 2000, max_aliases: int = 2
) -> Schema:
    """Schemas, with tied names (of tensors that have elements: others share no storage)."""
    count, ties = draw(st.integers(0, max_tensors)), draw(st.integers(0, max_aliases))
    unique = draw(st.lists(names(), min_size=count + ties, max_size=count + ties, unique=True))
    specs = [TensorSpec(name, draw(dtypes()), draw(shapes(max_elements))) for name in unique[ties:]]
    stored = [spec.name for spec in specs if spec.numel]
    tied = unique[:ties] if stored else []
    return Schema(tuple(specs), {alias: draw(st.sampled_from(stored)) for alias in tied})


def states(schema: Schema) -> st.SearchStrategy[list[Bits]]:
    """Bits of every tensor of a schema."""
    return st.integers(0, 2**32 - 1).map(
        lambda seed: [random_bits(t.dtype, t.numel, seed + k) for k, t in enumerate(schema)]
    )


@dataclass(frozen=True, eq=False)
class StatePair:
    """Two states of one schema.

    Attributes:
        schema: what the states are made of.
        old, new: per tensor ``(numel,)`` unsigned bits.
        density: about the share of elements that differ.
    """

    schema: Schema
    old: list[Bits]
    new: list[Bits]
    density: float


@st.composite
def state_pairs(draw: st.DrawFn, *, max_tensors: int = 5, max_elements: int = 2000) -> StatePair:
    """Two states of one schema that differ in anything from no element to all of them."""
    schema = draw(schemas(max_tensors=max_tensors, max_elements=max_elements))
    old = draw(states(schema))
    density = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]))
    seed = draw(st.integers(0, 2**32 - 1))
    return StatePair(
        schema, old, [changed_bits(bits, density, seed + k) for k, bits in enumerate(old)], density
    )


def flat_tensors(schema: Schema, state: list[Bits]) -> dict[str, FlatTensor]:
    """A source for :class:`~thinwire.weights.Weights` (and so for a publisher), ties included."""
    found = {
        spec.name: FlatTensor(bits, spec.dtype, spec.shape) for spec, bits in zip(schema, state)
    }
    return {**found, **{alias: found[name] for alias, name in schema.aliases.items()}}
