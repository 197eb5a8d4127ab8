"""The peak memory of a publish, measured in a process that does nothing else.

What the trainer holds anyway (the weights, the libraries, compiled kernels) is there before the
measurement begins and is subtracted. Pages of files do not count: a local bucket writes through
the system's cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError

__all__ = ["measure", "measure_in_child"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_TARGET = 1.05


def measure_in_child(*, quick: bool, threads: int, density: float) -> dict[str, Any] | None:
    """Run :func:`measure` in a fresh process; None where the system does not tell the peak.

    Raises:
        ThinwireError: the process failed.
    """
    if not _CLEAR.exists():
        return None
    arguments = json.dumps({"quick": quick, "threads": threads, "density": density})
    code = f"from thinwire.cli.bench_memory import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ThinwireError(f"the memory measurement ended with status {done.returncode}: {last}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(*, quick: bool, threads: int, density: float) -> dict[str, Any]:
    """Start a run in a temporary bucket and publish one version; see how high memory went."""
    from thinwire.bucket import MemoryBucket, open_bucket
    from thinwire.cli.bench_state import QUICK, QWEN3_06B, changes, make_weights, named
    from thinwire.patch import apply_patch
    from thinwire.publisher import Publisher
    from thinwire.schema import Schema, TensorSpec

    kind = Schema((TensorSpec("warm", QUICK.schema()[0].dtype, (4096,)),))
    warm = make_weights(kind)
    with Publisher(MemoryBucket(), named(kind, warm)) as publisher:
        for patch in changes(kind, warm, 0.1):
            apply_patch(warm[0], patch)
        publisher.publish(named(kind, warm)).result()

    schema = (QUICK if quick else QWEN3_06B).schema()
    tensors = make_weights(schema)
    patches = changes(schema, tensors, density)
    with tempfile.TemporaryDirectory() as folder:
        _give_back()
        _CLEAR.write_text("5")  # forget the peak so far
        before = _status("VmRSS")
        with Publisher(open_bucket(folder), named(schema, tensors), threads=threads) as publisher:
            for patch in patches:
                apply_patch(tensors[patch.ordinal], patch)
            stats = publisher.publish(named(schema, tensors), step=1).stats()
        peak = _status("VmHWM") - before
    # the changes as they are held until their commit is known: positions and new elements
    delta = sum(patch.positions.nbytes + patch.bits.nbytes for patch in patches)
    return {
        "baseline_bytes": schema.nbytes,
        "delta_bytes": delta,
        "payload_bytes": stats.payload_bytes,
        "peak_extra_bytes": peak,
        "ratio": peak / (schema.nbytes + delta),
        "target": _TARGET,
    }


def _give_back() -> None:
    """Return what is freed to the system: memory used again would not show in the measurement."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc has it, others do not
        ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise ThinwireError(f"{_STATUS} has no {field}")
    return int(found[1]) * 1024


def main(arguments: str) -> None:
    """What the child process runs: print the measurement as JSON."""
    print(json.dumps(measure(**json.loads(arguments))))
