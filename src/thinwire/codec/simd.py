"""The few vector instructions that numba cannot reach from Python, as LLVM IR.

LLVM lowers them to whatever the host has (AVX-512, AVX2, NEON, or scalar code), with the same
results everywhere.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = [
    "BLOCK",
    "BLOCKS",
    "CLASSES",
    "COLUMNS",
    "between",
    "count_block",
    "high_bit",
    "load64",
    "low_bit",
    "passed_blocks",
    "popcount",
    "select_bit",
    "store64",
]

BLOCK = 64
CLASSES = 16

BLOCKS = 64
"""Blocks that are counted before the changes in them are looked at.

Counting and looking in one loop would mispredict a branch at every other block. The counts and the
blocks fit the first cache together.
"""

COLUMNS = BLOCKS + 1

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


@intrinsic
def popcount(typing: Any, x: Any) -> Any:
    """Bits set in a uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic
def low_bit(typing: Any, x: Any) -> Any:
    """Index of the lowest bit set in a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def high_bit(typing: Any, x: Any) -> Any:
    """Index of the highest bit set in a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(_I64, 63), zeros)

    return types.int64(types.uint64), generate


@intrinsic
def load64(typing: Any, data: Any, at: Any) -> Any:
    """The little-endian uint64 in ``data[at:at + 8]`` (uint8), at any alignment, unchecked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.load(builder.bitcast(pointer, _I64.as_pointer()), align=1)

    return types.uint64(data, types.int64), generate


@intrinsic
def store64(typing: Any, data: Any, at: Any, value: Any) -> Any:
    """Write a uint64 to ``data[at:at + 8]`` (uint8), at any alignment, unchecked."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        builder.store(args[2], builder.bitcast(pointer, _I64.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


_SLOW_DEPOSIT = ("znver1", "znver2")
"""Processors that have the instruction, but take up to hundreds of cycles for it."""


@intrinsic
def select_bit(typing: Any, mask: Any, n: Any) -> Any:
    """Index of bit number ``n`` (from 0) of those set in a uint64; it has more than ``n``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask, n = args
        _, processor, features = context.codegen().magic_tuple()
        if "+bmi2" in features and processor not in _SLOW_DEPOSIT:
            deposit = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_I64, [_I64, _I64]), "llvm.x86.bmi.pdep.64"
            )
            left = builder.call(deposit, [builder.shl(ir.Constant(_I64, 1), n), mask])
        else:
            rest = cgutils.alloca_once_value(builder, mask)
            with cgutils.for_range(builder, n):
                now = builder.load(rest)
                below = builder.sub(now, ir.Constant(_I64, 1))
                builder.store(builder.and_(now, below), rest)
            left = builder.load(rest)
        return builder.cttz(left, ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64, types.int64), generate


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _keys(builder: Any, args: Any, kinds: Any, context: Any) -> Any:
    """The keys of 64 elements as a vector of bytes; args are (base, at, shift, field, …)."""
    width = kinds[0].dtype.bitwidth
    data = _data(context, builder, kinds[0], args[0])
    element, byte = ir.IntType(width), ir.VectorType(_I8, BLOCK)
    vector = ir.VectorType(element, BLOCK)
    pointer = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
    values = builder.load(pointer, align=width // 8)
    amount = args[2] if width == 64 else builder.trunc(args[2], element)
    keys = builder.lshr(values, _splat(builder, amount, BLOCK))
    if width > 8:
        keys = builder.trunc(keys, byte)
    return builder.and_(keys, _splat(builder, builder.trunc(args[3], _I8), BLOCK))


def _class_bits(builder: Any, args: Any, kinds: Any, context: Any) -> list[Any]:
    """For k = 1 … 15 an i64 whose bit j says that element j has class k or higher."""
    keys = _keys(builder, args, kinds, context)
    limits = _data(context, builder, kinds[4], args[4])
    masks = []
    for k in range(CLASSES - 1):
        limit = builder.load(_place(builder, limits, k))
        mask = builder.icmp_unsigned(">=", keys, _splat(builder, limit, BLOCK))
        masks.append(builder.bitcast(mask, _I64))
    return masks


def _place(builder: Any, pointer: Any, k: int) -> Any:
    return builder.gep(pointer, [ir.Constant(_I64, k)])


@intrinsic
def count_block(
    typing: Any, base: Any, at: Any, shift: Any, field: Any, thresholds: Any, tally: Any, block: Any
) -> Any:
    """Count the classes of the 64 elements from ``base[at]`` on.

    An element's key is ``(bits >> shift) & field``, its class the number of ``thresholds`` ((15,)
    uint8, ascending) that its key reaches. ``tally[k, block + 1]`` ((17, 65) uint16) becomes
    ``tally[k, block]`` and the number of elements of class k or higher. Nothing is checked: the
    caller sees to it that 64 elements are there.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _class_bits(builder, args, signature.args, context)
        column = builder.gep(_data(context, builder, signature.args[5], args[5]), [args[6]])
        sizes = [ir.Constant(_I16, BLOCK)]
        sizes += [builder.trunc(builder.ctpop(mask), _I16) for mask in bits]
        for k, size in enumerate(sizes):
            total = builder.add(builder.load(_place(builder, column, k * COLUMNS)), size)
            builder.store(total, _place(builder, column, k * COLUMNS + 1))
        return context.get_dummy_value()

    args = (base, types.int64, types.int64, types.int64, thresholds, tally, types.int64)
    return types.void(*args), generate


@intrinsic
def passed_blocks(typing: Any, tally: Any, k: Any, rank: Any) -> Any:
    """In which of 64 blocks ``tally[k, block + 1]`` ((17, 65) uint16) is at most ``rank``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.add(builder.mul(args[1], ir.Constant(_I64, COLUMNS)), ir.Constant(_I64, 1))
        row = builder.gep(_data(context, builder, signature.args[0], args[0]), [first])
        pointer = builder.bitcast(row, ir.VectorType(_I16, BLOCKS).as_pointer())
        rank = _splat(builder, builder.trunc(args[2], _I16), BLOCKS)
        passed = builder.icmp_unsigned("<=", builder.load(pointer, align=2), rank)
        return builder.bitcast(passed, ir.IntType(BLOCKS))

    return types.uint64(tally, types.int64, types.int64), generate


@intrinsic
def between(typing: Any, base: Any, at: Any, shift: Any, field: Any, low: Any, span: Any) -> Any:
    """Which of the 64 elements from ``base[at]`` on have keys from ``low`` to ``low + span - 1``.

    Returns:
        A bit for each. Arguments otherwise as for :func:`count_block`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        keys = _keys(builder, args, signature.args, context)
        low, span = (_splat(builder, builder.trunc(x, _I8), BLOCK) for x in args[4:])
        mine = builder.icmp_unsigned("<", builder.sub(keys, low), span)
        return builder.bitcast(mine, _I64)

    args = (base, types.int64, types.int64, types.int64, types.int64, types.int64)
    return types.uint64(*args), generate
