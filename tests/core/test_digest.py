"""Digests against a second implementation, in plain Python, of what the format page says."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.diff import diff
from thinwire.digest import (
    ZERO,
    TensorDigest,
    digest_change,
    digest_tensor,
    digest_tensors,
    state_digest,
)
from thinwire.dtypes import DTYPES, DType
from thinwire.patch import Bits, Patch
from thinwire.schema import Schema, TensorSpec, schema_of
from thinwire.testing.strategies import (
    StatePair,
    changed_bits,
    flat_tensors,
    random_bits,
    state_pairs,
)
from thinwire.weights import Weights

MOD = 2**64
KINDS = [DTYPES[name] for name in ("U8", "BF16", "F32", "F64")]


def finalised(x: int, seed: int, shifts: tuple[int, int, int], factors: tuple[int, int]) -> int:
    x ^= seed
    x = (x ^ (x >> shifts[0])) * factors[0] % MOD
    x = (x ^ (x >> shifts[1])) * factors[1] % MOD
    return x ^ (x >> shifts[2])


def plain_digest(elements: list[int], width: int, start: int = 0) -> tuple[int, int]:
    if width == 64:
        words = [word for bits in elements for word in (bits % 2**32, bits >> 32)]
        return plain_digest(words, 32, 2 * start)
    lo = hi = 0
    for index, bits in enumerate(elements, start):
        x = (index * 2**width + bits) % MOD
        splitmix = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
        murmur = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
        lo += finalised(x, 0x9E3779B97F4A7C15, (30, 27, 31), splitmix)
        hi += finalised(x, 0xD6E8FEB86659FD93, (33, 33, 33), murmur)
    return lo % MOD, hi % MOD


def plain_state_digest(rows: list[tuple[str, str, list[int], tuple[int, int]]]) -> str:
    def integer(value: int, size: int) -> bytes:
        return value.to_bytes(size, "little")

    data = b"thinwire-state-v1\0" + integer(len(rows), 8)
    for name, code, shape, (lo, hi) in rows:
        for text in (name.encode("utf-8"), code.encode("ascii")):
            data += integer(len(text), 4) + text
        data += integer(len(shape), 4) + b"".join(integer(n, 8) for n in shape)
        data += integer(lo, 8) + integer(hi, 8)
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("start", [0, 1, 12345, 2**31 - 300])
def test_digest_of_every_width(kind: DType, start: int) -> None:
    bits = random_bits(kind, 500, start)
    assert digest_tensor(bits, start=start) == plain_digest(bits.tolist(), kind.width, start)


def test_large_indices_wrap_nowhere() -> None:
    bits = random_bits(DTYPES["BF16"], 9, 0)
    assert digest_tensor(bits, start=2**48 - 9) == plain_digest(bits.tolist(), 16, 2**48 - 9)


def test_digest_of_nothing_is_zero() -> None:
    assert digest_tensor(np.empty(0, np.uint16), start=7) == ZERO == (0, 0)


def test_known_finalisers() -> None:
    """First outputs of the published generators, so that the reference is not just our twin."""
    # SplitMix64 seeded with 0 returns this first; its state is then the constant we XOR with
    assert finalised(
        0, 0x9E3779B97F4A7C15, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
    ) == (0xE220A8397B1DCDAF)
    # fmix64(1) of MurmurHash3
    assert finalised(1, 0, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)) == (
        0xB456BCFC34C2CB2C
    )


@given(
    st.sampled_from(KINDS),
    st.integers(0, 600),
    st.lists(st.floats(0, 1), max_size=6),
    st.randoms(use_true_random=False),
)
def test_additive_over_any_split_in_any_order(
    kind: DType, size: int, cuts: list[float], random: Any
) -> None:
    bits = random_bits(kind, size, size)
    edges = [0, *sorted(int(cut * size) for cut in cuts), size]
    runs = list(itertools.pairwise(edges))
    random.shuffle(runs)
    total = ZERO
    for start, stop in runs:
        total += digest_tensor(bits[start:stop], start=start)
    assert total == digest_tensor(bits)


@given(state_pairs())
def test_a_change_is_the_difference_of_full_digests(pair: StatePair) -> None:
    weights = Weights.matching(flat_tensors(pair.schema, pair.new), pair.schema)
    digests = digest_tensors(pair.old)
    for patch in diff(pair.old, weights):
        digests[patch.ordinal] += digest_change(pair.old[patch.ordinal], patch)
    assert digests == digest_tensors(pair.new)
    assert digests == [digest_tensor(bits) for bits in pair.new]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_change_with_wide_positions_and_unaligned_base(kind: DType) -> None:
    spec = TensorSpec("w", kind, (100,))
    old = np.frombuffer(b"\0" + random_bits(kind, 100, 0).tobytes(), np.uint8)[1:].view(kind.bits)
    new = changed_bits(old, 0.5, 1)
    positions = np.flatnonzero(old != new).astype(np.int64)
    change = digest_change(old, Patch(0, spec, positions, new[positions]))
    assert digest_tensor(old) + change == plain_digest(new.tolist(), kind.width)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_tensors_on_several_threads(threads: int) -> None:
    sizes = [5_000_001, 0, 3, 2_097_152, 2_097_153]
    tensors: list[Bits] = [random_bits(DTYPES["BF16"], n, n) for n in sizes]
    assert digest_tensors(tensors, threads=threads) == [digest_tensor(bits) for bits in tensors]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_single_bit_and_the_order_show(kind: DType) -> None:
    bits = random_bits(kind, 16, 3)
    seen = {digest_tensor(bits)}
    for position in range(bits.size):
        for bit in range(kind.width):
            flipped = bits.copy()
            flipped[position] ^= bits.dtype.type(1 << bit)
            seen.add(digest_tensor(flipped))
    assert len(seen) == 1 + bits.size * kind.width
    assert len({lo for lo, _ in seen}) == len({hi for _, hi in seen}) == len(seen)
    assert digest_tensor(bits[::-1].copy()) not in seen


def test_digests_add_only_to_digests() -> None:
    assert TensorDigest(MOD - 1, 2) + TensorDigest(2, MOD - 2) == TensorDigest(1, 0)
    with pytest.raises(TypeError):
        operator.add(TensorDigest(1, 2), (1, 2))


@given(state_pairs())
def test_state_digest_encoding(pair: StatePair) -> None:
    digests = digest_tensors(pair.new)
    rows = [
        (t.name, t.dtype.name, list(t.shape), (d.lo, d.hi)) for t, d in zip(pair.schema, digests)
    ]
    assert state_digest(pair.schema, digests) == plain_state_digest(rows)


def test_state_digest_needs_every_tensor() -> None:
    with pytest.raises(ValueError, match="zip"):
        state_digest(schema_of([("a", "U8", ())]), [])


def test_frozen_vectors(vectors: Path) -> None:
    frozen = json.loads((vectors / "digest.json").read_text())
    rows = frozen["tensors"]
    schema = schema_of([(row["name"], row["dtype"], row["shape"]) for row in rows])
    assert [spec.name for spec in schema] == [row["name"] for row in rows]
    assert {spec.dtype.width for spec in schema} == {8, 16, 32, 64}
    tensors = [
        np.frombuffer(bytes.fromhex(row["bytes"]), spec.dtype.bits)
        for row, spec in zip(rows, schema)
    ]
    digests = digest_tensors(tensors)
    assert [[f"{d.lo:016x}", f"{d.hi:016x}"] for d in digests] == [row["digest"] for row in rows]
    assert state_digest(Schema(schema.tensors), digests) == frozen["state"]
