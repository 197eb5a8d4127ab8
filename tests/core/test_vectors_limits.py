"""What a hostile payload can cost: memory and time stay within what the schema allows."""

from __future__ import annotations

from collections.abc import Callable

SCRIPT = '''
import sys, time, tracemalloc
import numpy as np

sys.path[:0] = [{spec!r}]
from assemble import Group, container, ordinals, payload, table, varint
from thinwire import codec
from thinwire.dtypes import DTYPES
from thinwire.errors import CorruptPayload
from thinwire.schema import Schema, TensorSpec

SEGMENT = 1 << 22
NUMEL = 4 * SEGMENT
THREADS = 2
NUMBERS = list(DTYPES)


def state(kind, numel=NUMEL):
    schema = Schema((TensorSpec("w", DTYPES[kind], (numel,)),))
    return schema, [np.zeros(numel, DTYPES[kind].bits)]


def claim(kind, entries, streams=b"", front=None):
    """A group of one tensor, one class, one-symbol tables."""
    group = Group(NUMBERS.index(kind), DTYPES[kind].width, [0], {{}})
    group.tables[0] = [4096], [0, 4096]
    return varint(1) + (front or group.front()) + b"".join(entries) + ordinals() + streams


def cost(file, schema, base):
    """What became of it, the peak of memory above what was there, and seconds."""
    tracemalloc.start()
    began = time.process_time()
    try:
        outcome = sum(map(len, codec.decode(file, schema, base, threads=THREADS)))
    except CorruptPayload:
        outcome = "refused"
    seconds = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return outcome, peak, seconds


START = bytes([0, 0, 1, 0] * 4)
'''

EVERYTHING_CHANGES = """
for kind in ("BF16", "I64"):
    for name in ("packed", "compact"):
        schema, base = state(kind)
        entry = varint(SEGMENT) + varint(0) + varint(0)
        file = payload(claim(kind, [entry] * 4, START * 4), name)
        assert len(file) < 400
        small, first = state(kind, 64)
        warm = payload(claim(kind, [varint(64) + bytes(2)], START), name)
        assert cost(warm, small, first)[0] == 64
        outcome, peak, seconds = cost(file, schema, base)
        assert outcome == NUMEL, outcome
        cap = 2 * NUMEL * (4 + DTYPES[kind].itemsize) + THREADS * 64 * SEGMENT
        print(kind, name, round(peak / cap, 2), round(seconds, 2))
        assert peak <= cap, (kind, name, peak, cap)
        assert seconds < 20, (kind, name, seconds)
"""


def test_a_change_of_every_element_stays_below_the_cap(
    run_python: Callable[..., str], spec_folder: str
) -> None:
    run_python(SCRIPT.format(spec=spec_folder) + EVERYTHING_CHANGES, timeout=120)


CLAIMS = """
many, none = varint(SEGMENT), varint(0)
most = varint(2 * SEGMENT), varint(SEGMENT * 6)
front = Group(NUMBERS.index("BF16"), 16, [0], {}).front
claims = {
    "counts without streams": claim("BF16", [many + none + none] * 4),
    "lengths without streams": claim("BF16", [many + most[0] + most[1]] * 4),
    "a count above its segment": claim("BF16", [varint(SEGMENT + 1) + none + none] * 4),
    "numbers without end": claim("BF16", [b"\\xff" * 1_000_000]),
    "17 groups": varint(17) + claim("BF16", [none] * 4)[1:],
    "ordinals without end": varint(1) + b"\\x09\\x00" + varint(2**40),
    "tables without end": varint(1) + front(tables=b"", present=b"\\xff\\xff") + varint(256) * 3,
}
schema, base = state("BF16")
for about, body in claims.items():
    for name in ("packed", "compact"):
        outcome, peak, seconds = cost(payload(body, name), schema, base)
        print(about, outcome, peak, seconds)
        assert outcome == "refused", about
        assert peak < 16 << 20, (about, peak)
        assert seconds < 5, (about, seconds)
"""


def test_claims_cost_nothing_before_they_are_checked(
    run_python: Callable[..., str], spec_folder: str
) -> None:
    run_python(SCRIPT.format(spec=spec_folder) + CLAIMS, timeout=120)


SHORT_STREAMS = """
group = Group(NUMBERS.index("BF16"), 16, [0], {})
group.tables[0] = [2048, 2048], [2048, 2048]
front = group.front()
many, none = varint(SEGMENT), varint(0)
small, first = state("BF16", 64)
cost(payload(claim("BF16", [varint(64) + bytes(2)], START, front), "compact"), small, first)
schema, base = state("BF16")
file = payload(claim("BF16", [many + none + none] * 4, START * 4, front), "compact")
outcome, peak, seconds = cost(file, schema, base)
print(outcome, peak, seconds)
assert outcome == "refused"
assert peak <= THREADS * 64 * SEGMENT + (16 << 20), peak
assert seconds < 20, seconds
"""


def test_streams_that_end_at_once_cost_a_segment_at_most(
    run_python: Callable[..., str], spec_folder: str
) -> None:
    run_python(SCRIPT.format(spec=spec_folder) + SHORT_STREAMS, timeout=120)


BEYOND_32_BITS = """
numel = (1 << 31) + 100
schema, base = state("U8", numel)  # zeros that no one touches take no memory
quiet = [varint(0)] * (numel // SEGMENT)
for name in ("packed", "compact"):
    file = payload(claim("U8", [*quiet, varint(100) + bytes(2)], START), name)
    (patch,) = codec.decode(file, schema, base)
    patch.check()
    assert patch.positions.tolist() == list(range(1 << 31, numel))
    assert patch.positions.dtype.itemsize == 8
indices = np.array([0, numel - 1], "<i8").tobytes()
entries = [("w.indices", "I64", [2], indices), ("w.values", "U8", [2], b"ab")]
metadata = {"format": "thinwire-delta", "major": "1", "codec": "raw"}
(patch,) = codec.decode(container(entries, metadata), schema)
assert patch.positions.tolist() == [0, numel - 1]
"""


def test_tensors_above_two_billion_elements(
    run_python: Callable[..., str], spec_folder: str
) -> None:
    run_python(SCRIPT.format(spec=spec_folder) + BEYOND_32_BITS, timeout=120)
