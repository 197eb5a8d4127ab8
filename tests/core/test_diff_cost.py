"""What a diff must not cost: the GIL, and memory of a tensor's size."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from thinwire.casts import cast_between
from thinwire.diff import diff_bits
from thinwire.digest import digest_change, digest_tensor
from thinwire.dtypes import DTYPES
from thinwire.patch import Patch, apply_patch
from thinwire.schema import TensorSpec


def one_long_call(kernel: str, count: int) -> Callable[[], object]:
    """A single call into a kernel, with ``count`` elements."""
    bits = np.zeros(count, np.uint16)
    patch = Patch(
        0, TensorSpec("w", DTYPES["U16"], (count,)), np.arange(count, dtype=np.int32), bits
    )
    if kernel in ("BF16", "F16"):
        cast = cast_between(DTYPES["F32"], DTYPES[kernel])
        assert cast is not None
        wide = np.zeros(count, np.uint32)
        return lambda: cast(wide, bits)
    calls: dict[str, Callable[[], object]] = {
        # equal inputs leave scratch alone, so this may be longer than a piece
        "diff": lambda: diff_bits(bits, bits, DTYPES["U16"]),
        "digest": lambda: digest_tensor(bits),
        "digest change": lambda: digest_change(bits, patch),
        "check": patch.check,
        "apply": lambda: apply_patch(bits, patch),
    }
    return calls[kernel]


@pytest.fixture
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_quick_switches")
@pytest.mark.parametrize(
    "kernel", ["diff", "digest", "digest change", "check", "apply", "BF16", "F16"]
)
def test_other_threads_run_during_a_kernel(kernel: str) -> None:
    one_long_call(kernel, 8)()
    call = one_long_call(kernel, 1 << 25)
    ended = threading.Event()
    times: list[float] = []

    def work() -> None:
        try:
            for _ in range(3):
                start = time.perf_counter()
                call()
                times.extend((start, time.perf_counter()))
        finally:
            ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    ticks = []
    while not ended.is_set():
        ticks.append(time.perf_counter())
        time.sleep(2e-4)
    worker.join()
    # with the GIL held there is none inside any of the calls but where they begin and end
    during = [sum(a < tick < b for tick in ticks) for a, b in zip(times[::2], times[1::2])]
    assert max(during) >= 5, during


MEMORY = """
import json, sys
import numpy as np
import torch
from thinwire.diff import copy_out, diff
from thinwire.digest import digest_tensors
from thinwire.weights import Weights

def field(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])

def extra_mib(call):
    open("/proc/self/clear_refs", "w").write("5")  # forget the old high-water mark
    before = field("VmRSS")
    call()
    return (field("VmHWM") - before) / 1024

def measured(source, dtype):
    weights = Weights.of({"w": source}, dtype=dtype)
    baseline = copy_out(weights, threads=2)
    baseline[0][::4096] ^= 1
    found = {}
    found["diff"] = extra_mib(lambda: diff(baseline, weights, threads=2))
    found["digest"] = extra_mib(lambda: digest_tensors(baseline, threads=2))
    found["copy"] = extra_mib(lambda: copy_out(weights, threads=2))
    return found

shape = (1536, 16384)  # 48 MiB of bf16, 96 MiB of fp32
def wide():
    count = shape[0] * shape[1]
    return torch.arange(count, dtype=torch.int32).view(torch.float32).reshape(shape)
def half():
    return wide().view(torch.bfloat16)[:, :shape[1]].contiguous()
measured(torch.zeros(8, 8), "bf16"), measured(torch.zeros(8, 8).t(), None)  # compile first
print(json.dumps({
    "contiguous": measured(half(), None),
    "strided": measured(half().t(), None),
    "sliced": measured(wide().view(torch.bfloat16)[:, ::2], None),
    "cast": measured(wide(), "bf16"),
    "cast strided": measured(wide().t(), "bf16"),
}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self")
def test_memory_is_that_of_a_few_pieces(run_python: Callable[..., str]) -> None:
    for case, extra in json.loads(run_python(MEMORY, timeout=120)).items():
        assert extra["diff"] < 16, (case, extra)
        assert extra["digest"] < 8, (case, extra)
        # the instrument sees what is really there: a copy of 48 MiB
        assert 44 < extra["copy"] < 48 + 24, (case, extra)
