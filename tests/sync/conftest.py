"""Model states known bit by bit, and ways to look at what arrived, independent of the library."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from thinwire import Publisher, Replica
from thinwire.bucket import Bucket
from thinwire.dtypes import dtype
from thinwire.errors import BucketUnavailable
from thinwire.mirror import MemoryMirror, Mirror
from thinwire.testing import FaultyBucket
from thinwire.testing.faults import Operation
from thinwire.weights import FlatTensor

LAYOUT: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("model.embed.weight", "BF16", (40, 12)),
    ("model.layers.0.mlp.weight", "BF16", (9, 31)),
    ("model.layers.0.scale", "F32", (7,)),
    ("model.flags", "U8", (33,)),
    ("model.counter", "I64", ()),
    ("model.nothing", "F16", (0, 3)),
)


@dataclass
class State:
    """Named bits; a source for a publisher, and the truth to compare with."""

    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    bits: dict[str, np.ndarray]

    @classmethod
    def random(cls, seed: int = 0, layout: Any = LAYOUT) -> State:
        rng = np.random.default_rng(seed)
        bits = {}
        for name, kind, shape in layout:
            width = dtype(kind).bits
            bits[name] = rng.integers(
                0, np.iinfo(width).max, int(np.prod(shape)), dtype=width, endpoint=True
            )
        return cls(tuple(layout), bits)

    def changed(self, seed: int, density: float = 0.1) -> State:
        """A copy in which about this share of all elements differs, at least one."""
        rng = np.random.default_rng(seed)
        after = {}
        for name, old in self.bits.items():
            mask = rng.random(old.size) < density
            other = rng.integers(1, np.iinfo(old.dtype).max, old.size, dtype=old.dtype)
            after[name] = np.where(mask, old ^ other, old)
        if density and all(np.array_equal(after[n], b) for n, b in self.bits.items()):
            first = next(n for n, b in self.bits.items() if b.size)
            after[first][0] ^= 1
        return State(self.layout, after)

    @property
    def source(self) -> list[tuple[str, FlatTensor]]:
        return [
            (name, FlatTensor(self.bits[name], dtype(kind), shape))
            for name, kind, shape in self.layout
        ]

    @property
    def raw(self) -> dict[str, bytes]:
        return {name: bits.tobytes() for name, bits in self.bits.items()}

    def distance(self, other: State) -> int:
        """Elements that differ."""
        return sum(int((self.bits[n] != other.bits[n]).sum()) for n in self.bits)


def held(mirror: Mirror) -> dict[str, bytes]:
    """What a mirror holds, through its own view."""
    with mirror.reading():
        return {s.name: bits.tobytes() for s, bits in zip(mirror.schema, mirror.tensors)}


def on_disk(folder: Path) -> dict[str, bytes]:
    """What the safetensors files in a folder hold, read with nothing but json."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = data[8 + size + start : 8 + size + stop]
    return found


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for the state files of locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("writer", "patching")
    }


def pulled(bucket: Bucket) -> dict[str, bytes]:
    """What a fresh replica ends at."""
    mirror = MemoryMirror()
    Replica(bucket, mirror).sync()
    return held(mirror)


def history(bucket: Bucket) -> list[dict[str, bytes]]:
    """What a fresh replica holds at each version."""
    mirror = MemoryMirror()
    return [held(mirror) for _ in Replica(bucket, mirror).catch_up()]


def start_run(bucket: Bucket, *states: State, **options: Any) -> Publisher:
    """A publisher that has published all the states."""
    publisher = Publisher(bucket, states[0].source, **options)
    for state in states[1:]:
        publisher.publish(state.source).result()
    return publisher


def strike(
    faulty: FaultyBucket, index: int, calls: list[Any], *, outage: bool = False, **how: Any
) -> FaultyBucket:
    """Fail the call that was number ``index`` in an earlier run with the given calls.

    Args:
        outage: every later call, of whatever kind, fails as well.
    """
    operation = calls[index].operation
    skip = sum(call.operation == operation for call in calls[:index])
    if not outage:
        return faulty.fail(operation, skip=skip, **how)
    error = how.get("error", BucketUnavailable)
    down = threading.Event()

    def check(key: str) -> None:
        if down.is_set():
            raise error(f"the store is down: {key!r}")

    faulty.run(lambda _: down.set(), operation, skip=skip, after=how.get("after", False))
    for kind in get_args(Operation):
        faulty.run(check, kind, times=None).run(check, kind, times=None, after=True)
    return faulty


def in_child(work: Callable[[], Any], *, kill_after: float | None = None) -> int:
    """Run ``work`` in a forked process; return its exit code, negative if a signal ended it.

    Args:
        kill_after: seconds until it is killed with SIGKILL.
    """
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing may leave a forked child
            traceback.print_exc()
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    return SimpleNamespace(
        LAYOUT=LAYOUT,
        State=State,
        held=held,
        on_disk=on_disk,
        files=files,
        pulled=pulled,
        history=history,
        start_run=start_run,
        strike=strike,
        in_child=in_child,
    )


@pytest.fixture(scope="session", autouse=True)
def _no_backoff() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.chain._BACKOFF_S", 0.0)
        yield


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where the system has such a place: thousands of fsyncs prove nothing here."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path_factory.mktemp("sync")
        return
    with tempfile.TemporaryDirectory(prefix="thinwire-", dir=shared) as folder:
        yield Path(folder)


@pytest.fixture
def states() -> list[State]:
    """Five states of one model, each a little different from the one before."""
    found = [State.random(1)]
    for seed in range(2, 6):
        found.append(found[-1].changed(seed))
    return found
