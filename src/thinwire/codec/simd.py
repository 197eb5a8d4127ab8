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
    "CLASSES",
    "class_masks",
    "count_block",
    "high_bit",
    "load64",
    "low_bit",
    "pass_block",
    "popcount",
    "store64",
]

BLOCK = 64
CLASSES = 16

_I8, _I32, _I64 = (ir.IntType(n) for n in (8, 32, 64))


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


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _class_bits(builder: Any, args: Any, kinds: Any, context: Any) -> list[Any]:
    """For k = 1 … 15 an i64 whose bit j says that element j has class k or higher."""
    width = kinds[0].dtype.bitwidth
    data, limits = (_data(context, builder, kinds[i], args[i]) for i in (0, 4))
    element, byte = ir.IntType(width), ir.VectorType(_I8, BLOCK)
    vector = ir.VectorType(element, BLOCK)
    pointer = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
    values = builder.load(pointer, align=width // 8)
    amount = args[2] if width == 64 else builder.trunc(args[2], element)
    keys = builder.lshr(values, _splat(builder, amount, BLOCK))
    if width > 8:
        keys = builder.trunc(keys, byte)
    keys = builder.and_(keys, _splat(builder, builder.trunc(args[3], _I8), BLOCK))
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
    typing: Any, base: Any, at: Any, shift: Any, field: Any, thresholds: Any, counts: Any
) -> Any:
    """Count the classes of the 64 elements from ``base[at]`` on.

    An element's key is ``(bits >> shift) & field``, its class the number of ``thresholds`` ((15,)
    uint8, ascending) that its key reaches. ``counts[k]`` (int32) grows by the number of elements of
    class k or higher. Nothing is checked: the caller sees to it that 64 elements are there.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _class_bits(builder, args, signature.args, context)
        counts_p = _data(context, builder, signature.args[5], args[5])
        sizes = [ir.Constant(_I32, BLOCK)]
        sizes += [builder.trunc(builder.ctpop(mask), _I32) for mask in bits]
        for k, size in enumerate(sizes):
            place = _place(builder, counts_p, k)
            builder.store(builder.add(builder.load(place), size), place)
        return context.get_dummy_value()

    args = (base, types.int64, types.int64, types.int64, thresholds, counts)
    return types.void(*args), generate


@intrinsic
def class_masks(
    typing: Any, base: Any, at: Any, shift: Any, field: Any, thresholds: Any, masks: Any
) -> Any:
    """Fill ``masks`` ((17,) uint64): bit j of ``masks[k]`` says that element j is of class k or up.

    Arguments otherwise as for :func:`count_block`; ``masks[16]`` stays as it is.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _class_bits(builder, args, signature.args, context)
        masks_p = _data(context, builder, signature.args[5], args[5])
        for k, mask in enumerate([ir.Constant(_I64, -1), *bits]):
            builder.store(mask, _place(builder, masks_p, k))
        return context.get_dummy_value()

    args = (base, types.int64, types.int64, types.int64, thresholds, masks)
    return types.void(*args), generate


@intrinsic
def pass_block(
    typing: Any, base: Any, at: Any, shift: Any, field: Any, thresholds: Any, left: Any
) -> Any:
    """Pass over the 64 elements from ``base[at]`` on, and tell in which classes a change is due.

    ``left[k]`` ((16,) int32) is the number of elements of class k before the next change in that
    class. The block's are taken off; where that gives less than 0, a change lies in the block.

    Returns:
        A bit for each such class. Arguments otherwise as for :func:`count_block`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = _class_bits(builder, args, signature.args, context)
        wide, narrow = ir.VectorType(_I64, CLASSES), ir.VectorType(_I32, CLASSES)
        masks = ir.Constant(wide, [-1] + [0] * (CLASSES - 1))
        for k, mask in enumerate(bits, 1):
            masks = builder.insert_element(masks, mask, ir.Constant(_I32, k))
        count = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(wide, [wide]), "llvm.ctpop.v16i64"
        )
        sizes = builder.trunc(builder.call(count, [masks]), narrow)
        zero = ir.Constant(narrow, [0] * CLASSES)
        following = builder.shuffle_vector(
            sizes, zero, ir.Constant(narrow, list(range(1, CLASSES + 1)))
        )
        left_p = builder.bitcast(
            _data(context, builder, signature.args[5], args[5]), narrow.as_pointer()
        )
        own = builder.sub(sizes, following)
        after = builder.sub(builder.load(left_p, align=4), own)
        builder.store(after, left_p, align=4)
        due = builder.bitcast(builder.icmp_signed("<", after, zero), ir.IntType(CLASSES))
        return builder.zext(due, _I64)

    args = (base, types.int64, types.int64, types.int64, thresholds, left)
    return types.uint64(*args), generate
