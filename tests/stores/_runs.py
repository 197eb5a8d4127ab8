"""Whole runs of a small model over a store: states known bit by bit, and what a run must keep."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from thinwire import Publisher, Replica
from thinwire.bucket import Bucket
from thinwire.chain import Chain
from thinwire.dtypes import dtype
from thinwire.errors import BucketNotFound, ThinwireError
from thinwire.log import keys
from thinwire.mirror import MemoryMirror, Mirror
from thinwire.weights import FlatTensor

__all__ = [
    "State",
    "Watched",
    "check_history",
    "digest",
    "held",
    "hub_settings",
    "pulled",
    "series",
    "start",
]

LAYOUT: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("model.embed.weight", "BF16", (64, 48)),
    ("model.layers.0.mlp.weight", "BF16", (96, 31)),
    ("model.layers.0.scale", "F32", (17,)),
    ("model.flags", "U8", (33,)),
)


@dataclass(frozen=True)
class State:
    """Named bits; a source for a publisher, and the truth to compare with."""

    bits: dict[str, np.ndarray]

    @classmethod
    def random(cls, seed: int) -> State:
        rng = np.random.default_rng(seed)
        found = {}
        for name, kind, shape in LAYOUT:
            width = dtype(kind).bits
            found[name] = rng.integers(0, np.iinfo(width).max, int(np.prod(shape)), dtype=width)
        return cls(found)

    def changed(self, seed: int, share: float = 0.05) -> State:
        """A copy in which this share of every tensor differs, at least one element."""
        rng = np.random.default_rng(seed)
        after = {}
        for name, old in self.bits.items():
            new = old.copy()
            where = rng.choice(old.size, max(1, int(old.size * share)), replace=False)
            new[where] ^= rng.integers(1, np.iinfo(old.dtype).max, where.size, dtype=old.dtype)
            after[name] = new
        return State(after)

    @property
    def source(self) -> list[tuple[str, FlatTensor]]:
        return [
            (name, FlatTensor(self.bits[name], dtype(kind), shape)) for name, kind, shape in LAYOUT
        ]

    @property
    def raw(self) -> dict[str, bytes]:
        return {name: bits.tobytes() for name, bits in self.bits.items()}

    def distance(self, other: State) -> int:
        """Elements that differ."""
        return sum(int((self.bits[name] != other.bits[name]).sum()) for name in self.bits)


def series(count: int, seed: int = 0) -> list[State]:
    """States of one model, each a little different from the one before."""
    states = [State.random(seed)]
    while len(states) < count:
        states.append(states[-1].changed(seed + len(states)))
    return states


def start(bucket: Bucket, *states: State, codec: str = "auto") -> Publisher:
    """A publisher that has published all the states."""
    publisher = Publisher(bucket, states[0].source, codec=codec, threads=1)
    for state in states[1:]:
        publisher.publish(state.source).result()
    return publisher


def held(mirror: Mirror) -> dict[str, bytes]:
    """What a mirror holds."""
    with mirror.reading():
        return {spec.name: bits.tobytes() for spec, bits in zip(mirror.schema, mirror.tensors)}


def digest(content: dict[str, bytes]) -> str:
    """One hash of a whole model, by names and bytes alone."""
    found = hashlib.sha256()
    for name, data in sorted(content.items()):
        found.update(name.encode() + b"\0" + data)
    return found.hexdigest()


def pulled(bucket: Bucket) -> dict[str, bytes]:
    """What a fresh replica ends at."""
    mirror = MemoryMirror()
    Replica(bucket, mirror).sync()
    return held(mirror)


def check_history(bucket: Bucket, states: Sequence[State]) -> list[int]:
    """That a run is whole, as a fresh replica sees it.

    One commit a version, without gaps; every version one of the states, whole; none older than
    the one before; every commit's count of changes that of its states; no payload twice.

    Returns:
        for each version, which of the states it is.
    """
    try:
        versions = [keys.commit_version(info.key) for info in bucket.list(keys.COMMITS)]
    except BucketNotFound:
        return []  # where the first write makes the bucket, there has been none
    assert versions == list(range(len(versions)))
    if not versions:
        assert Chain(bucket).sure_head() is None
        return []
    raw, order, payloads = [state.raw for state in states], [], []
    mirror = MemoryMirror()
    for update in Replica(bucket, mirror).catch_up():
        order.append(raw.index(held(mirror)))
        payloads += [ref.key for ref in update.commit.payloads]
        if update.version:
            assert update.commit.changed == states[order[-1]].distance(states[order[-2]])
    assert len(order) == len(versions)
    assert order == sorted(order)
    assert len(set(payloads)) == len(payloads)
    return order


@dataclass
class Watched:
    """Calls that may fail in a classified way, and how long each took.

    Attributes:
        errors: what they raised, in order.
        seconds: of the longest.
    """

    errors: list[ThinwireError] = field(default_factory=list)
    seconds: float = 0.0

    @contextmanager
    def bearing(self) -> Iterator[None]:
        """Note a classified error; any other one fails the test."""
        began = time.monotonic()
        try:
            yield
        except ThinwireError as error:
            self.errors.append(error)
        finally:
            self.seconds = max(self.seconds, time.monotonic() - began)

    def call(self, work: Callable[[], object]) -> None:
        with self.bearing():
            work()

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of errors, or "unnoticed" alone. Each error says what to do next."""
        assert all(str(error).strip() and error.hint for error in self.errors), self.errors
        return frozenset(type(error).__name__ for error in self.errors) or frozenset({"unnoticed"})

    @property
    def outcome(self) -> str:
        """ "unnoticed", or the kinds of errors in order."""
        return ", ".join(type(error).__name__ for error in self.errors) or "unnoticed"


@contextmanager
def hub_settings(home: Path, token: str) -> Iterator[None]:
    """huggingface_hub and hf_xet keep their things apart from the user's, and find ``token``."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # requests are counted
        patch.setenv("HF_TOKEN", token)
        patch.setenv("AWS_ACCESS_KEY_ID", "HFAKTEST")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield
