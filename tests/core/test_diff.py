from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from thinwire import diff as diff_module
from thinwire.casts import cast_between
from thinwire.diff import copy_out, diff
from thinwire.dtypes import DTYPES, DType, dtype
from thinwire.patch import Bits, Patch, apply_patch
from thinwire.testing.strategies import (
    StatePair,
    changed_bits,
    flat_tensors,
    random_bits,
    special_bits,
    state_pairs,
)
from thinwire.weights import PIECE, FlatTensor, Weights

BF16 = DTYPES["BF16"]


def naive_diff(old: Bits, new: Bits) -> tuple[list[int], list[int]]:
    changed = np.flatnonzero(old != new)
    return changed.tolist(), new[changed].tolist()


def check(old: list[Bits], weights: Weights, new: list[Bits]) -> list[Patch]:
    """The diff is what numpy finds, whatever the threads, and leads from old to new."""
    patches = diff(old, weights)
    expected = [naive_diff(a, b) for a, b in zip(old, new)]
    assert [p.ordinal for p in patches] == [k for k, (p, _) in enumerate(expected) if p]
    for patch in patches:
        assert patch.check().spec == weights.schema[patch.ordinal]
        assert (patch.positions.tolist(), patch.bits.tolist()) == expected[patch.ordinal]
    for threads in (1, 2, 5):
        again = diff(old, weights, threads=threads)
        assert [p.ordinal for p in again] == [p.ordinal for p in patches]
        for a, b in zip(again, patches):
            np.testing.assert_array_equal(a.positions, b.positions)
            np.testing.assert_array_equal(a.bits, b.bits)
    state = [bits.copy() for bits in old]
    for patch in patches:
        apply_patch(state[patch.ordinal], patch)
    for k, bits in enumerate(new):
        np.testing.assert_array_equal(state[k], bits)
    for k, bits in enumerate(copy_out(weights)):
        np.testing.assert_array_equal(bits, new[k])
        assert bits.dtype == weights.schema[k].dtype.bits
    return patches


def in_torch(bits: Bits, kind: DType, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.from_numpy(bits.copy().view(f"i{kind.itemsize}" if kind.width > 8 else "u1"))
    return flat.view(getattr(torch, kind.torch_name)).reshape(shape)


@given(state_pairs())
def test_diff_then_apply_is_the_identity(pair: StatePair) -> None:
    weights = Weights.matching(flat_tensors(pair.schema, pair.new), pair.schema)
    check(pair.old, weights, pair.new)


@pytest.mark.parametrize("density", [0.0, 0.002, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", DTYPES.values(), ids=str)
def test_every_dtype_at_every_density(kind: DType, density: float) -> None:
    # 4099 elements: no width makes that whole 64-bit words
    shapes = [(4099,), (), (0,), (3, 0, 2), (7, 1, 9), (1,), (2, 3)]
    old, new, source = [], [], {}
    for k, shape in enumerate(shapes):
        size = int(np.prod(shape))
        old.append(random_bits(kind, size, k))
        new.append(changed_bits(old[k], density, k))
        source[f"t{k}"] = in_torch(new[k], kind, shape)
    patches = check(old, Weights.of(source), new)
    assert (len(patches) == 0) == (density == 0.0)


def test_all_bf16_patterns_against_the_special_ones() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    special = special_bits(BF16)
    nans = [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF, 0x7FA5]
    special = np.unique(np.concatenate([special, np.array(nans, np.uint16)]))
    assert {0, 0x8000, 1, 0x007F, 0x0080, 0x7F80, 0xFF80, 0x7F7F} <= set(special.tolist())
    all_new = np.tile(every, special.size)
    all_special = np.repeat(special, every.size)
    weights = Weights.of({"new": in_torch(all_new, BF16, all_new.shape)})
    check([all_special], weights, [all_new])
    weights = Weights.of({"new": in_torch(all_special, BF16, all_special.shape)})
    check([all_new], weights, [all_special])


def test_all_bf16_patterns_against_random_ones() -> None:
    every = np.tile(np.arange(1 << 16, dtype=np.uint16), 8)
    other = np.random.default_rng(0).permutation(every)
    weights = Weights.of({"new": in_torch(other, BF16, other.shape)})
    patches = check([every], weights, [other])
    assert len(patches[0]) > every.size - 100


LAYOUTS: dict[str, Any] = {
    "transposed": torch.arange(15.0).reshape(3, 5).t(),
    "sliced": torch.arange(60.0).reshape(3, 20)[:, 1::3],
    "offset": torch.arange(21.0)[1:20],
    "expanded": torch.arange(5.0).expand(4, 5),
    "expanded scalar": torch.tensor(3.0).expand(2, 3),
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "negated": torch._neg_view(torch.arange(6.0)),
    "parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
    "0-d": torch.tensor(7.0),
    "empty": torch.empty(0, 4),
    "empty strided": torch.empty(4, 0, 3).transpose(0, 2),
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "reversed": np.arange(10, dtype=np.float32)[::-1],
    "reversed rows": np.arange(12, dtype=np.float32).reshape(3, 4)[::-1, ::-1],
    "fortran": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "broadcast": np.broadcast_to(np.arange(4, dtype=np.float32), (3, 4)),
    "big-endian": np.arange(9, dtype=">f4"),
    "big-endian strided": np.arange(12, dtype=">f4").reshape(3, 4).T,
    "read-only": np.frombuffer(np.arange(5, dtype=np.float32).tobytes(), np.float32),
    "0-d array": np.array(3.0, np.float32),
    "unaligned": np.frombuffer(b"\0" + np.arange(7, dtype=np.float32).tobytes(), np.uint8)[1:].view(
        np.float32
    ),
}


@pytest.mark.parametrize("serving", ["F32", "BF16"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout(layout: str, serving: str) -> None:
    value = LAYOUTS[layout]
    if isinstance(value, torch.Tensor):
        values = np.array(value.tolist(), np.float32).reshape(-1)
    else:
        values = value.astype("<f4").reshape(-1)
    new = cast_reference(values.view(np.uint32), serving)
    weights = Weights.of({"w": value}, dtype=serving)
    assert weights.schema[0].shape == tuple(value.shape)
    check([changed_bits(new, 0.5, 1)], weights, [new])


def cast_reference(bits: Bits, serving: str) -> Bits:
    cast = cast_between(DTYPES["F32"], DTYPES[serving])
    if cast is None:
        return bits
    target = np.empty(bits.size, DTYPES[serving].bits)
    cast(bits, target)
    return target


@pytest.mark.parametrize("kind", [DTYPES[n] for n in ("BF16", "F32", "F64")], ids=str)
@pytest.mark.parametrize("offset", range(8))
def test_mapped_files_at_any_offset(tmp_path: Path, kind: DType, offset: int) -> None:
    """Foreign writers do not align tensors; neither side may rely on it."""
    old, size = random_bits(kind, 1003, 1), 1003 * kind.itemsize
    new = changed_bits(old, 0.2, 2)
    (tmp_path / "old").write_bytes(bytes(offset) + old.tobytes())
    (tmp_path / "new").write_bytes(bytes(7 - offset) + new.tobytes())
    mapped_old = np.memmap(tmp_path / "old", np.uint8, "r")[offset:].view(kind.bits)
    mapped_new = np.memmap(tmp_path / "new", np.uint8, "r")[7 - offset :].view(kind.bits)
    assert mapped_new.nbytes == size
    check([mapped_old], Weights.of({"w": FlatTensor(mapped_new, kind, (17, 59))}), [new])
    if kind.name == "F32":
        weights = Weights.of({"w": FlatTensor(mapped_new, kind, (1003,))}, dtype="BF16")
        served = cast_reference(new, "BF16")
        check([changed_bits(served, 0.1, 3)], weights, [served])


BORDERS = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 6]


@pytest.mark.parametrize("kind", [DTYPES[n] for n in ("U8", "BF16", "F64")], ids=str)
def test_changes_at_the_borders_of_pieces(kind: DType) -> None:
    old = random_bits(kind, 2 * PIECE + 7, 0)
    new = old.copy()
    new[BORDERS] ^= 1
    weights = Weights.of({"w": FlatTensor(new, kind, new.shape)})
    assert check([old], weights, [new])[0].positions.tolist() == BORDERS


@pytest.mark.parametrize(
    "shape",
    [(3, PIECE // 2 + 7), (PIECE // 2 + 7, 3), (2, PIECE + 5), (1, 2 * PIECE + 3), (2, 3, 400_009)],
)
def test_strided_tensors_larger_than_a_piece(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    new = np.arange(size, dtype=np.uint32).astype(np.uint8) ^ (np.arange(size) >> 16).astype(
        np.uint8
    )
    strided = np.empty((*shape[:-1], 2 * shape[-1]), np.uint8)[..., ::2]
    strided[...] = new.reshape(shape)
    old = new.copy()
    changed = [p for p in (*BORDERS, size // 2, size - 1) if p < size]
    old[changed] ^= 0x80
    for value in (strided, torch.from_numpy(strided.base)[..., ::2]):
        patches = diff([old], Weights.of({"w": value}))
        assert patches[0].positions.tolist() == sorted(set(changed))
        assert patches[0].bits.tolist() == new[sorted(set(changed))].tolist()


@pytest.mark.parametrize("serving", ["BF16", "F16"])
def test_masters_served_in_half_precision(serving: str) -> None:
    """A diff that casts on the way equals casting first, for every float there is to round."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    masters = np.concatenate([upper | low for low in (0, 0x0FFF, 0x1000, 0x7FFF, 0x8000, 0x8001)])
    served = cast_reference(masters, serving)
    weights = Weights.of({"w": in_torch(masters, DTYPES["F32"], masters.shape)}, dtype=serving)
    assert weights.schema[0].dtype is dtype(serving)
    check([changed_bits(served, 0.05, 1)], weights, [served])


def test_an_update_below_half_a_step_is_no_change() -> None:
    masters = torch.tensor([1.0, 1.0, -2.0, 0.0])
    weights = Weights.of({"w": masters}, dtype="bf16")
    baseline = copy_out(weights)
    masters += torch.tensor([2.0**-9, 2.0**-8 + 2.0**-20, 2.0**-8, -0.0])
    assert [p.positions.tolist() for p in diff(baseline, weights)] == [[1]]
    masters[3] = -0.0
    assert [p.positions.tolist() for p in diff(baseline, weights)] == [[1, 3]]


def test_the_result_belongs_to_the_caller() -> None:
    old = [random_bits(BF16, 5000, 0)]
    source = changed_bits(old[0], 0.3, 1)
    weights = Weights.of({"w": FlatTensor(source, BF16, source.shape)})
    first = diff(old, weights)[0]
    kept = (first.positions.copy(), first.bits.copy())
    source ^= 0xFFFF
    second = diff(old, weights)[0]
    np.testing.assert_array_equal(first.positions, kept[0])
    np.testing.assert_array_equal(first.bits, kept[1])
    assert len(second) != len(first)


@pytest.mark.parametrize("start", [0, PIECE])
def test_positions_are_wide_in_tensors_that_need_it(start: int) -> None:
    """Whatever pieces changed: a tensor of that size is too large to diff here for real."""
    found = [(start, (np.array([5], np.int32), np.array([1], np.uint8)))]
    for numel, index in ((1 << 31, np.int32), ((1 << 31) + 1, np.int64)):
        positions, _ = diff_module._joined(found, numel)
        assert positions.dtype == index
        assert positions.tolist() == [start + 5]
