"""``compact`` and ``packed``: the identity on bits, small, deterministic, safe from any input."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from thinwire import codec
from thinwire.codec import segments
from thinwire.codec.fields import Reader, varint
from thinwire.diff import diff
from thinwire.dtypes import DTYPES, dtype
from thinwire.errors import CorruptPayload, Misuse
from thinwire.patch import Bits, Patch, apply_patch
from thinwire.schema import Schema, TensorSpec
from thinwire.testing.strategies import (
    StatePair,
    changed_bits,
    flat_tensors,
    random_bits,
    state_pairs,
)
from thinwire.weights import Weights

CODED = ["compact", "packed"]


def patches_between(schema: Schema, old: Sequence[Bits], new: Sequence[Bits]) -> list[Patch]:
    return diff(list(old), Weights.matching(flat_tensors(schema, list(new)), schema))


def written(patches: Sequence[Patch], name: str, base: Sequence[Bits]) -> bytes:
    return b"".join(codec.encode(patches, codec=name, base=base))


def assert_same(have: Sequence[Patch], want: Sequence[Patch]) -> None:
    assert [p.ordinal for p in have] == [p.ordinal for p in want]
    for a, b in zip(have, want):
        a.check()
        assert a.positions.dtype == b.positions.dtype
        assert np.array_equal(a.positions, b.positions), a.name
        assert np.array_equal(a.bits, b.bits), a.name


def one_tensor(kind: str, old: Bits) -> Schema:
    return Schema((TensorSpec("w", dtype(kind), (old.size,)),))


def gaussian_bf16(size: int, seed: int = 0, scale: float = 0.02) -> Bits:
    """Weights as models have them."""
    values = np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * scale
    return (values.view(np.uint32) >> 16).astype("<u2")


def trained(old: Bits, density: float, seed: int = 1) -> Bits:
    """About ``density`` of the elements a ULP away."""
    rng = np.random.default_rng(seed)
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size) < density)
    new[at] += rng.choice(np.array([1, -1]).astype("<u2"), at.size)
    return new


@pytest.mark.parametrize("name", CODED)
@given(pair=state_pairs())
def test_decoding_gives_back_the_patches(name: str, pair: StatePair) -> None:
    patches = patches_between(pair.schema, pair.old, pair.new)
    data = written(patches, name, pair.old)
    decoded = codec.decode(data, pair.schema, pair.old)
    assert_same(decoded, patches)
    state = [bits.copy() for bits in pair.old]
    for patch in decoded:
        apply_patch(state[patch.ordinal], patch)
    assert all(np.array_equal(a, b) for a, b in zip(state, pair.new))


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("density", [0.001, 0.05, 0.5, 1.0])
def test_every_dtype_and_density(name: str, kind: str, density: float) -> None:
    old = random_bits(DTYPES[kind], 5003, seed=3)
    new = changed_bits(old, density, seed=4)
    schema = one_tensor(kind, old)
    patches = patches_between(schema, [old], [new])
    assert_same(codec.decode(written(patches, name, [old]), schema, [old]), patches)


@pytest.mark.parametrize("name", CODED)
def test_all_bf16_patterns_as_old_and_as_new(name: str) -> None:
    old = np.arange(65536, dtype="<u2")
    for seed in range(4):
        new = np.random.default_rng(seed).permutation(old).astype("<u2")
        schema = one_tensor("BF16", old)
        patches = patches_between(schema, [old], [new])
        assert_same(codec.decode(written(patches, name, [old]), schema, [old]), patches)


@pytest.mark.parametrize("name", CODED)
def test_many_segments_and_tensors_across_their_borders(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments.cut, "__defaults__", (1000,))
    sizes = [1, 63, 64, 65, 999, 1000, 1001, 0, 5000, 7]
    schema = Schema(tuple(TensorSpec(f"t{i}", dtype("bf16"), (n,)) for i, n in enumerate(sizes)))
    old = [gaussian_bf16(n, seed=i) for i, n in enumerate(sizes)]
    for density in (0.002, 0.2, 1.0):
        new = [trained(bits, density, seed=7) for bits in old]
        patches = patches_between(schema, old, new)
        data = written(patches, name, old)
        assert_same(codec.decode(data, schema, old), patches)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("kind", ["BF16", "F32", "F8_E4M3", "I64", "U8"])
@pytest.mark.parametrize("density", [0, 0.01, 0.1, 0.3, 0.6, 0.9, 1.0])
def test_no_density_costs_more_than_the_dense_tensor(name: str, kind: str, density: float) -> None:
    count, size = 6, 20_000
    schema = Schema(tuple(TensorSpec(f"t{i}", DTYPES[kind], (size,)) for i in range(count)))
    old = [random_bits(DTYPES[kind], size, seed=i) for i in range(count)]
    # one tensor changes as said, the others hardly: their tables must not spoil it
    for others in (density, 0.001):
        new = [changed_bits(b, density if i == 0 else others, seed=9) for i, b in enumerate(old)]
        patches = patches_between(schema, old, new)
        data = written(patches, name, old)
        changed = sum(schema[p.ordinal].nbytes for p in patches)
        head = 8 + int.from_bytes(data[:8], "little")
        assert len(data) - head <= changed + 32 * count
        assert_same(codec.decode(data, schema, old), patches)


def test_compact_beats_packed_beats_raw_on_trained_weights() -> None:
    old = gaussian_bf16(1 << 20)
    # small weights change more often, as under an optimizer
    rng = np.random.default_rng(5)
    magnitude = np.abs((old.astype(np.uint32) << 16).view(np.float32))
    chance = np.minimum(1, 2e-5 / np.maximum(magnitude, 1e-9))
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size) < chance)
    new[at] += rng.choice(np.array([1, -1]).astype("<u2"), at.size)
    schema = one_tensor("bf16", old)
    patches = patches_between(schema, [old], [new])
    sizes = {
        name: len(b"".join(codec.encode(patches, codec=name, base=[old])))
        for name in ("raw", "packed", "compact")
    }
    assert sizes["compact"] < 0.8 * sizes["packed"] < 0.8 * 0.4 * sizes["raw"]


@pytest.mark.parametrize("name", CODED)
def test_bytes_do_not_depend_on_threads(name: str) -> None:
    old = gaussian_bf16(9 << 20)
    new = trained(old, 0.01)
    schema = one_tensor("bf16", old)
    patches = patches_between(schema, [old], [new])
    one, three = (
        b"".join(codec.encode(patches, codec=name, base=[old], threads=n)) for n in (1, 3)
    )
    assert one == three
    for threads in (1, 3):
        decoded = codec.decode(memoryview(one), schema, [old], threads=threads)
        assert_same(decoded, patches)


def test_small_tensors_cost_next_to_nothing_in_headers() -> None:
    count, size = 3000, 4096
    schema = Schema(
        tuple(TensorSpec(f"experts.{i}.w", dtype("bf16"), (size,)) for i in range(count))
    )
    old = [gaussian_bf16(size, seed=i) for i in range(count)]
    new = [trained(bits, 0.01, seed=i) for i, bits in enumerate(old)]
    many = written(patches_between(schema, old, new), "compact", old)
    whole = one_tensor("bf16", np.concatenate(old))
    joined = [np.concatenate(old)], [np.concatenate(new)]
    single = written(patches_between(whole, *joined), "compact", joined[0])
    assert len(many) < 1.05 * len(single)


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    old = gaussian_bf16(1000)
    schema = one_tensor("bf16", old)
    patches = patches_between(schema, [old], [trained(old, 0.1)])
    (tmp_path / "delta.safetensors").write_bytes(written(patches, "compact", [old]))
    with safe_open(tmp_path / "delta.safetensors", "np") as file:
        assert list(file.keys()) == ["changes"]
        assert file.metadata()["codec"] == "compact"
        assert file.get_tensor("changes").dtype == np.uint8


@pytest.mark.parametrize("name", CODED)
def test_without_its_base_it_is_refused(name: str) -> None:
    old = gaussian_bf16(1000)
    schema = one_tensor("bf16", old)
    patches = patches_between(schema, [old], [trained(old, 0.1)])
    data = written(patches, name, [old])
    with pytest.raises(Misuse):
        codec.decode(data, schema)
    with pytest.raises(Misuse):
        codec.encode(patches, codec=name)


@pytest.mark.parametrize("name", CODED)
def test_a_wrong_base_gives_an_error_or_patches_within_bounds(name: str) -> None:
    old = gaussian_bf16(5000)
    schema = one_tensor("bf16", old)
    data = written(patches_between(schema, [old], [trained(old, 0.05)]), name, [old])
    for seed in range(20):
        other = gaussian_bf16(5000, seed=seed + 100, scale=0.02 * (1 + seed))
        try:
            for patch in codec.decode(data, schema, [other]):
                patch.check()
        except CorruptPayload:
            pass


@pytest.mark.parametrize("name", CODED)
def test_damage_gives_corrupt_payload_or_patches_within_bounds(name: str) -> None:
    sizes = [300, 64, 5000, 1]
    kinds = ["bf16", "f32", "bf16", "i64"]
    schema = Schema(
        tuple(TensorSpec(f"t{i}", dtype(k), (n,)) for i, (k, n) in enumerate(zip(kinds, sizes)))
    )
    old = [random_bits(spec.dtype, spec.numel, seed=i) for i, spec in enumerate(schema)]
    new = [changed_bits(bits, d, seed=5) for bits, d in zip(old, (0.1, 1.0, 0.03, 1.0))]
    data = written(patches_between(schema, old, new), name, old)
    start = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(0)
    outcomes = set()
    for trial in range(3000):
        spoiled = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(start, min(len(data), start + 400) if trial % 2 else len(data))
            spoiled[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        if trial % 5 == 0:
            spoiled = _resized(bytes(spoiled), rng.randrange(start, len(data)))
        before = [bits.copy() for bits in old]
        try:
            for patch in codec.decode(memoryview(spoiled), schema, old):
                patch.check()
            outcomes.add("decoded")
        except CorruptPayload:
            outcomes.add("refused")
        assert all(np.array_equal(a, b) for a, b in zip(before, old))
    assert outcomes == {"decoded", "refused"}


def _resized(data: bytes, size: int) -> bytearray:
    """The payload cut to ``size`` bytes under a header that says so."""
    head, start = codec.wire.parse_header(data, len(data)), 8 + int.from_bytes(data[:8], "little")
    body = data[start:size]
    kind = DTYPES["U8"]
    front, _ = codec.wire.build_header([("changes", kind, (len(body),))], head.metadata)
    return bytearray(front + body)


@given(value=st.integers(0, 2**63 - 1))
def test_varints(value: int) -> None:
    reader = Reader(memoryview(varint(value)))
    assert reader.varint(2**63) == value
    assert reader.left == 0
    if value:
        with pytest.raises(CorruptPayload):
            Reader(memoryview(varint(value))).varint(value - 1)
    longer = varint(value)[:-1] + bytes([varint(value)[-1] | 0x80, 0])
    with pytest.raises(CorruptPayload):
        Reader(memoryview(longer)).varint(2**63)
