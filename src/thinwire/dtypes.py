"""What an element is: its width, its kind, and the integer view it is compared through.

Names are those of the safetensors format. Everything in thinwire compares and stores elements
through the unsigned integer of their width, so ±0, subnormals, infinities and every NaN payload
are distinct values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.errors import UnsupportedDtype

__all__ = ["DTYPES", "DType", "dtype"]


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: the safetensors name, such as ``"BF16"``.
        width: bits per element: 8, 16, 32 or 64.
        exponent_bits: width of the exponent field; 0 for integers and booleans.
        mantissa_bits: width of the stored fraction; 0 for integers and booleans.
        torch_name: the attribute of ``torch`` that names the same dtype.
    """

    name: str
    width: int
    exponent_bits: int
    mantissa_bits: int
    torch_name: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.width // 8

    @property
    def is_float(self) -> bool:
        """Whether elements have a sign, an exponent and a fraction."""
        return self.exponent_bits > 0

    @property
    def bits(self) -> np.dtype[Any]:
        """The little-endian unsigned numpy dtype of the element's width."""
        return np.dtype(f"<u{self.itemsize}")

    def __str__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("BOOL", 8, 0, 0, "bool"),
        DType("U8", 8, 0, 0, "uint8"),
        DType("I8", 8, 0, 0, "int8"),
        DType("F8_E4M3", 8, 4, 3, "float8_e4m3fn"),
        DType("F8_E5M2", 8, 5, 2, "float8_e5m2"),
        DType("F8_E8M0", 8, 8, 0, "float8_e8m0fnu"),
        DType("I16", 16, 0, 0, "int16"),
        DType("U16", 16, 0, 0, "uint16"),
        DType("F16", 16, 5, 10, "float16"),
        DType("BF16", 16, 8, 7, "bfloat16"),
        DType("I32", 32, 0, 0, "int32"),
        DType("U32", 32, 0, 0, "uint32"),
        DType("F32", 32, 8, 23, "float32"),
        DType("I64", 64, 0, 0, "int64"),
        DType("U64", 64, 0, 0, "uint64"),
        DType("F64", 64, 11, 52, "float64"),
    )
}

_ALIASES: dict[str, DType] = {
    **{name.lower(): d for name, d in DTYPES.items()},
    **{d.torch_name: d for d in DTYPES.values()},
    # numpy and ml_dtypes spell some of them their own way
    "float8_e8m0": DTYPES["F8_E8M0"],
    "fp16": DTYPES["F16"],
    "fp32": DTYPES["F32"],
    "fp64": DTYPES["F64"],
}


def dtype(spec: object) -> DType:
    """The element type that ``spec`` names.

    Args:
        spec: a :class:`DType`, a safetensors name, or anything whose string is a torch, numpy or
            ml_dtypes name (``torch.bfloat16``, ``np.dtype("float32")``, ``"bf16"``).

    Raises:
        UnsupportedDtype: no such element type is known.
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, type) and issubclass(spec, np.generic):
        spec = np.dtype(spec)
    if isinstance(spec, np.dtype):
        spec = spec.name  # its string depends on the byte order
    found = _ALIASES.get(str(spec).removeprefix("torch.").lower())
    if found is None:
        raise UnsupportedDtype(f"unknown dtype {spec!s}", hint=f"known dtypes: {', '.join(DTYPES)}")
    return found
