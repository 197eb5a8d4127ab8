"""The integer casts against those of torch and numpy, which differ from ours for NaN alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from thinwire.casts import BF16_NAN, F16_NAN, cast_between
from thinwire.dtypes import DTYPES
from thinwire.errors import UnsupportedDtype

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

# around every place where a rounding decision changes: half of bf16's, of f16's, of subnormals'
LOWER_HALVES = sorted(
    {
        (1 << bit) * odd + offset & 0xFFFF
        for bit in range(17)
        for odd in (1, 3, 5, 7)
        for offset in (-1, 0, 1)
    }
)


def cast(source: U32, name: str) -> U16:
    target = np.empty(source.size, np.uint16)
    kernel = cast_between(DTYPES["F32"], DTYPES[name])
    assert kernel is not None
    kernel(source, target)
    return target


def is_nan(source: U32) -> npt.NDArray[Any]:
    return (source & 0x7FFFFFFF) > 0x7F800000


def bf16_reference(source: U32) -> U16:
    bits = torch.from_numpy(source.view(np.float32)).to(torch.bfloat16).view(torch.int16)
    return np.where(is_nan(source), BF16_NAN, bits.numpy().view(np.uint16)).astype(np.uint16)


def f16_reference(source: U32) -> U16:
    with np.errstate(over="ignore", invalid="ignore"):
        bits = source.view(np.float32).astype(np.float16).view(np.uint16)
    return np.where(is_nan(source), F16_NAN, bits).astype(np.uint16)


REFERENCES = {"BF16": bf16_reference, "F16": f16_reference}


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_every_upper_half_at_every_rounding_border(name: str) -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in LOWER_HALVES:
        source = upper | np.uint32(lower)
        np.testing.assert_array_equal(cast(source, name), REFERENCES[name](source))


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_four_million_patterns_over_the_whole_range(name: str) -> None:
    # an odd stride visits every lower half; 2**32 / 1021 samples
    source = np.arange(0, 1 << 32, 1021, dtype=np.uint64).astype(np.uint32)
    np.testing.assert_array_equal(cast(source, name), REFERENCES[name](source))


@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_ties_between_all_neighbours_of_f16(sign: int) -> None:
    """Midpoints are found in exact arithmetic, so the expectation needs no other cast."""
    patterns = np.arange(0x7C00, dtype=np.uint16)  # 0 … the largest finite value
    below = patterns.view(np.float16).astype(np.float64)
    above = np.append(below[1:], 65536.0)
    middle = ((below + above) / 2).astype(np.float32)
    np.testing.assert_array_equal(middle.astype(np.float64), (below + above) / 2)
    bits = middle.view(np.uint32) | np.uint32(sign)
    top = np.uint16(sign >> 16)
    np.testing.assert_array_equal(cast(bits, "F16"), (patterns + (patterns & 1)) | top)
    np.testing.assert_array_equal(cast(bits - 1, "F16"), patterns | top)
    np.testing.assert_array_equal(cast(bits + 1, "F16"), (patterns + 1) | top)


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_what_both_dtypes_hold_is_kept(name: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = torch.from_numpy(patterns.view(np.int16)).view(getattr(torch, DTYPES[name].torch_name))
    wide = values.float().view(torch.int32).numpy().view(np.uint32)
    canonical = {"BF16": BF16_NAN, "F16": F16_NAN}[name]
    expected = np.where(values.isnan().numpy(), canonical, patterns)
    np.testing.assert_array_equal(cast(wide, name), expected)


@pytest.mark.parametrize(("name", "canonical"), [("BF16", 0x7FC0), ("F16", 0x7E00)])
def test_every_nan_becomes_the_canonical_one(name: str, canonical: int) -> None:
    payloads = np.unique(
        np.concatenate([[1 << b for b in range(23)], [0x7FFFFF, 0x400001, 0x3FFFFF, 0x7FFF]])
    ).astype(np.uint32)
    nans = np.concatenate([0x7F800000 | payloads, 0xFF800000 | payloads]).astype(np.uint32)
    assert set(cast(nans, name).tolist()) == {canonical}


def test_f16_borders() -> None:
    def f16(value: float) -> int:
        return int(cast(np.array([value], np.float32).view(np.uint32), "F16")[0])

    assert f16(65504.0) == 0x7BFF
    assert f16(np.nextafter(np.float32(65520), np.float32(0))) == 0x7BFF
    assert f16(65520.0) == 0x7C00
    assert f16(-np.inf) == 0xFC00
    assert f16(2.0**-24) == 1
    assert f16(2.0**-25) == 0
    assert f16(np.nextafter(np.float32(2.0**-25), np.float32(1))) == 1
    assert f16(-(2.0**-26)) == 0x8000
    assert f16(2.0**-14) == 0x0400
    assert f16(2.0**-149) == 0


def test_same_dtype_needs_no_cast() -> None:
    assert all(cast_between(kind, kind) is None for kind in DTYPES.values())


@pytest.mark.parametrize(
    ("source", "target"), [("BF16", "F32"), ("F64", "BF16"), ("F16", "BF16"), ("I32", "F16")]
)
def test_other_casts_are_refused(source: str, target: str) -> None:
    with pytest.raises(UnsupportedDtype, match=f"no cast from {source} to {target}") as caught:
        cast_between(DTYPES[source], DTYPES[target])
    assert "F32 -> BF16" in caught.value.hint
