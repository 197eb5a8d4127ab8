"""Whatever the library writes, the reference decoder reads; what one refuses, both refuse."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import codec
from thinwire.diff import diff
from thinwire.testing.strategies import StatePair, flat_tensors, state_pairs
from thinwire.weights import Weights

NAMES = ["raw", "packed", "compact"]


def written(pair: StatePair, name: str) -> tuple[bytes, dict[str, list[tuple[int, int]]]]:
    """A payload, and the changes that it must hold."""
    weights = Weights.matching(flat_tensors(pair.schema, pair.new), pair.schema)
    patches = diff(pair.old, weights)
    file = b"".join(codec.encode(patches, codec=name, base=pair.old))
    return file, {p.name: list(zip(p.positions.tolist(), p.bits.tolist())) for p in patches}


def seed_of(mutations: ModuleType, pair: StatePair, file: bytes) -> object:
    base = {spec.name: bits.tobytes() for spec, bits in zip(pair.schema, pair.old)}
    return mutations.Seed(file, pair.schema, base)


@pytest.mark.parametrize("name", NAMES)
@given(pair=state_pairs(max_tensors=4, max_elements=400))
def test_the_reference_reads_what_the_library_writes(
    mutations: ModuleType, name: str, pair: StatePair
) -> None:
    file, changes = written(pair, name)
    assert mutations.second(file, seed_of(mutations, pair, file)) == changes


@pytest.mark.parametrize("name", NAMES)
@given(pair=state_pairs(max_tensors=3, max_elements=200), start=st.integers(0, 2**32 - 1))
def test_both_agree_on_what_is_spoiled(
    mutations: ModuleType, name: str, pair: StatePair, start: int
) -> None:
    rng = random.Random(start)
    file, _ = written(pair, name)
    seed = seed_of(mutations, pair, file)
    for _ in range(5):
        mutations.agree(mutations.mutate(rng, seed), seed)
        other = mutations.rebased(rng, seed)
        mutations.agree(file, other)
