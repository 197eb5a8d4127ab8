from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.dtypes import DTYPES, DType, dtype
from thinwire.errors import UnsupportedDtype


@pytest.mark.parametrize("kind", DTYPES.values(), ids=str)
def test_every_spelling_of_a_dtype(kind: DType) -> None:
    in_torch: torch.dtype = getattr(torch, kind.torch_name)
    spellings: list[Any] = [kind, kind.name, kind.name.lower(), kind.torch_name, in_torch]
    assert [dtype(spelling) for spelling in spellings] == [kind] * 5
    assert dtype(str(in_torch)) is kind
    assert in_torch.itemsize == kind.itemsize == kind.bits.itemsize


@pytest.mark.parametrize("kind", DTYPES.values(), ids=str)
def test_fields_of_floats_add_up(kind: DType) -> None:
    in_torch: torch.dtype = getattr(torch, kind.torch_name)
    assert kind.is_float == in_torch.is_floating_point
    if kind.is_float:
        sign = 0 if kind.name == "F8_E8M0" else 1
        assert sign + kind.exponent_bits + kind.mantissa_bits == kind.width
        assert torch.finfo(in_torch).eps == 2.0**-kind.mantissa_bits


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        (np.float32, "F32"),
        (np.dtype("float16"), "F16"),
        (np.dtype(">f4"), "F32"),
        (np.dtype(">u8"), "U64"),
        (np.bool_, "BOOL"),
        ("fp16", "F16"),
        ("fp32", "F32"),
        ("fp64", "F64"),
        ("float8_e8m0", "F8_E8M0"),
        ("torch.bfloat16", "BF16"),
    ],
)
def test_spellings_of_others(spelling: object, name: str) -> None:
    assert dtype(spelling) is DTYPES[name]


@pytest.mark.parametrize(
    "unknown",
    [
        "",
        "float",
        "bf17",
        "F8_E4M3FNUZ",
        None,
        16,
        float,
        torch.complex64,
        np.dtype("f4,i4"),
        "U24",
    ],
    ids=str,
)
def test_unknown_dtypes(unknown: object) -> None:
    with pytest.raises(UnsupportedDtype, match="unknown dtype") as caught:
        dtype(unknown)
    assert "BF16" in caught.value.hint
