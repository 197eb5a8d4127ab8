from __future__ import annotations

import numpy as np
import pytest

from thinwire.dtypes import DTYPES
from thinwire.errors import CorruptPayload
from thinwire.patch import Patch, apply_patch, position_dtype
from thinwire.schema import TensorSpec

SPEC = TensorSpec("w", DTYPES["BF16"], (2, 5))


def patch(positions: list[int], *, index: str = "<i4", bits: str = "<u2", extra: int = 0) -> Patch:
    return Patch(
        0, SPEC, np.array(positions, index), np.arange(len(positions) + extra).astype(bits)
    )


@pytest.mark.parametrize("index", ["<i4", "<i8"])
@pytest.mark.parametrize("positions", [[], [0], [9], [0, 9], list(range(10))])
def test_good_patches(positions: list[int], index: str) -> None:
    good = patch(positions, index=index)
    assert good.check() is good
    assert (len(good), good.name) == (len(positions), "w")


@pytest.mark.parametrize("index", ["<i4", "<i8"])
@pytest.mark.parametrize(
    "positions", [[-1], [10], [3, 3], [4, 3], [0, 5, 4, 9], [-(2**31), 1], [0, 2**31 - 1], [9, 10]]
)
def test_bad_positions(positions: list[int], index: str) -> None:
    with pytest.raises(CorruptPayload, match="not increasing or not in the tensor"):
        patch(positions, index=index).check()


def test_positions_beyond_32_bits() -> None:
    with pytest.raises(CorruptPayload, match="not in the tensor"):
        patch([2**32 + 1], index="<i8").check()


def test_bad_arrays() -> None:
    with pytest.raises(CorruptPayload, match="1 positions for 2 bits"):
        patch([1], extra=1).check()
    with pytest.raises(CorruptPayload, match="elements are uint32"):
        patch([1], bits="<u4").check()


def test_applying_overwrites_and_may_be_repeated() -> None:
    target = np.full(10, 7, np.uint16)
    for _ in range(2):
        apply_patch(target, patch([1, 4, 9]))
        assert target.tolist() == [7, 0, 7, 7, 1, 7, 7, 7, 7, 2]


def test_applying_to_unaligned_memory() -> None:
    target = np.zeros(21, np.uint8)[1:].view(np.uint16)
    apply_patch(target, Patch(0, SPEC, np.array([3], np.int32), np.array([0xABCD], np.uint16)))
    assert target.tolist() == [0, 0, 0, 0xABCD, 0, 0, 0, 0, 0, 0]


def test_position_dtype_switches_above_int32() -> None:
    assert position_dtype(1 << 31).str == "<i4"
    assert position_dtype((1 << 31) + 1).str == "<i8"
