"""Compile every kernel ahead of use, by using it.

Kernels are compiled the first time they meet a dtype, and kept on disk. In a container image, or
before the first step of a run, that can be done once and for all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from thinwire import codec
from thinwire.bucket import MemoryBucket
from thinwire.dtypes import DTYPES, DType, dtype
from thinwire.mirror import MemoryMirror, Mirror
from thinwire.publisher import Publisher
from thinwire.replica import Replica
from thinwire.weights import FlatTensor

__all__ = ["COMMON", "warm_up"]

COMMON = ("BF16", "F16", "F32", "F8_E4M3")
"""Dtypes that models are served in."""

_ELEMENTS = 1000


def warm_up(
    names: Iterable[str] = COMMON, *, progress: Callable[[str, int, int], None] | None = None
) -> None:
    """Publish and pull a few versions of small tensors with every codec.

    Args:
        names: safetensors names of the dtypes that will be published; casts from F32 to them are
            compiled as well.
        progress: told what is being compiled, how many are done, and how many there are.

    Raises:
        UnsupportedDtype: no such dtype.
    """
    kinds = [dtype(name) for name in names]
    work = [(name, kind) for name in codec.CODECS for kind in kinds]
    for done, (name, kind) in enumerate(work):
        if progress is not None:
            progress(f"compile {name} for {kind}", done, len(work))
        with tempfile.TemporaryDirectory() as folder:
            for mirror in (MemoryMirror(), Path(folder) / "mirror"):
                _exercise(name, kind, mirror)
    for target in ("BF16", "F16"):
        masters = {"w": _tensor(DTYPES["F32"], 0)}
        Publisher(MemoryBucket(), masters, dtype=target).publish(masters).result()


def _tensor(kind: DType, version: int) -> FlatTensor:
    """Random bits of which one in ten changes with every version; not a whole number of blocks."""
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, _ELEMENTS * kind.itemsize, dtype=np.uint8)
    bits = data.view(kind.bits).copy()
    bits[::10] ^= bits.dtype.type(version)
    return FlatTensor(bits, kind, (_ELEMENTS,))


def _exercise(name: str, kind: DType, mirror: Mirror | Path) -> None:
    bucket = MemoryBucket()
    with Publisher(bucket, {"w": _tensor(kind, 0)}, codec=name) as publisher:
        publisher.publish({"w": _tensor(kind, 1)}).result()
    with Replica(bucket, mirror) as replica:
        replica.sync()
        replica.mirror.rescan()
