"""What a request to ``/update_weights_from_tensor`` carries: a few whole numbers.

SGLang takes nothing but pickles there. thinwire reads none, and does not use Python's pickle to
write one: these bytes are put together here, opcode by opcode (Python's ``pickletools``), and can
hold nothing but names and numbers. Unpickled they are ``[(name, torch.tensor(number)), …]``, and
``torch.tensor`` is the only thing that they name. SGLang's allow list, as far as known, lets
``torch.`` pass (``SafeUnpickler`` in ``python/sglang/srt/utils/common.py``). A tensor that
SGLang serialized itself would be a handle to shared memory of the sending process instead.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from thinwire.errors import Misuse

__all__ = ["serialize"]

_PROTO_2, _EMPTY_LIST, _APPEND, _STOP = b"\x80\x02", b"]", b"a", b"."
_BINUNICODE, _LONG1, _TUPLE1, _TUPLE2, _REDUCE = b"X", b"\x8a", b"\x85", b"\x86", b"R"
_TENSOR = b"ctorch\ntensor\n"


def serialize(numbers: Mapping[str, int]) -> str:
    """Named numbers of 64 bits with sign, as base64, for one rank.

    Raises:
        Misuse: a number does not fit.
    """
    parts = [_PROTO_2, _EMPTY_LIST]
    for name, number in numbers.items():
        text = name.encode()
        parts += [_BINUNICODE, len(text).to_bytes(4, "little"), text]
        try:
            value = number.to_bytes(8, "little", signed=True)
        except OverflowError:
            raise Misuse(f"{name}={number} does not fit into 64 bits") from None
        parts += [_TENSOR, _LONG1, bytes([8]), value, _TUPLE1, _REDUCE, _TUPLE2, _APPEND]
    return base64.b64encode(b"".join([*parts, _STOP])).decode("ascii")
