"""Asking for memory before it is needed, where positions are known and jump about.

Changes are so far apart that every one of them misses the caches, and close enough together that
no hardware notices a pattern. A loop that asks some iterations ahead waits for none of them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["AHEAD", "prefetch"]

AHEAD = 64
"""Iterations to ask ahead: the best of 16, 32, 64 and 128 where it was measured."""

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_READ, _KEEP, _DATA = 0, 3, 1


@intrinsic
def prefetch(typing: Any, data: Any, at: Any) -> Any:
    """Ask for the cache line of ``data[at]``. A hint: it neither fails nor changes anything."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(start, [args[1]]), _I8.as_pointer())
        hint = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]),
            "llvm.prefetch.p0",
        )
        builder.call(hint, [place, *(ir.Constant(_I32, n) for n in (_READ, _KEEP, _DATA))])
        return context.get_dummy_value()

    return types.void(data, types.int64), generate
