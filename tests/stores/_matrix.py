"""The fault matrix: one fault at one point of a whole run, and what must hold whatever it does.

A tale is a run by people who try again. Its middle part, the act, meets the fault through a
proxy. It must end with the right bits or with a classified error, within a bounded time. What the
bucket holds then is whole. Once the fault is gone the same publisher and the same replica go on, a
fresh publisher takes over, and a fresh replica on a direct connection sees every version's bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from servers.proxy import FaultyProxy
from stores._runs import State, Watched, check_history, held, start
from thinwire import Publisher, Replica
from thinwire.bucket import Bucket
from thinwire.mirror import MemoryMirror

__all__ = [
    "CODEC",
    "LASTING",
    "NEVER_MIND",
    "SHORT",
    "Act",
    "Fault",
    "Point",
    "Tale",
    "cells",
    "faults",
]

Act = Literal["start", "publish", "take over", "follow", "pull"]
Kind = Literal["write", "read", "probe"]

NEVER_MIND = frozenset({"unnoticed"})
LASTING = frozenset({"BucketUnavailable", "CommitUnresolved"})
DENIED = frozenset({"AccessDenied", "CommitUnresolved"})
SPOILED = frozenset({"unnoticed", "CorruptPayload", "BucketUnavailable"})


@dataclass(frozen=True)
class Point:
    """Which requests of which act a fault strikes.

    Attributes:
        kind: whether they carry a body, ask for one, or neither.
        others: outcomes that spoiled bytes may have here beside the fault's own.
        without: faults that make no sense here.
    """

    act: Act
    kind: Kind
    method: str
    target: str
    holding: bytes = b""
    others: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def where(self) -> dict[str, object]:
        return {"method": self.method, "target": self.target, "holding": self.holding}

    def allows(self, name: str, fault: Fault) -> frozenset[str]:
        """What may come of the act; what it may do for spoiled bytes holds for no other fault."""
        return fault.allowed | (self.others if "wrong" in name else frozenset())


@dataclass(frozen=True)
class Fault:
    """How to arm a proxy, and what may come of it.

    Attributes:
        deadline: seconds of patience that the bucket is opened with.
        allowed: outcomes; the act may also go through although the fault lasts, where what it
            strikes is not needed.
    """

    kinds: tuple[Kind, ...]
    arm: Callable[[FaultyProxy, Mapping[str, object]], object]
    allowed: frozenset[str]
    deadline: float = 8.0

    @property
    def limit(self) -> float:
        """Seconds in which the act must have come to an end, with room for a busy machine.

        A record is tried up to four times before its outcome is called unresolved.
        """
        return 5.0 + self.deadline * (4 if self.deadline == SHORT else 1)


ALL: tuple[Kind, ...] = ("write", "read", "probe")
BODIES: tuple[Kind, ...] = ("write", "read")
SHORT = 0.2
CODEC = "raw"  # stores do not see the difference, and hundreds of runs take half the time


def faults(status: int, expired: bytes) -> dict[str, Fault]:
    """The columns of the matrix.

    Args:
        status, expired: the response by which this store says that a token has expired.
    """
    denied = {"status": status, "body": expired}
    return {
        "reset": Fault(ALL, lambda p, at: p.reset(**at), NEVER_MIND),
        "503": Fault(ALL, lambda p, at: p.answer(503, **at), NEVER_MIND),
        "503 three times": Fault(ALL, lambda p, at: p.answer(503, **at, times=3), NEVER_MIND),
        "429, Retry-After 1": Fault(
            ALL, lambda p, at: p.answer(429, **at, headers={"Retry-After": "1"}), NEVER_MIND
        ),
        "response lost": Fault(ALL, lambda p, at: p.lose(**at), NEVER_MIND),
        "late": Fault(ALL, lambda p, at: p.delay(0.2, **at, times=1), NEVER_MIND),
        "twice": Fault(("write",), lambda p, at: p.duplicate(**at), NEVER_MIND),
        "upload cut": Fault(("write",), lambda p, at: p.cut(40, **at), NEVER_MIND),
        "slow": Fault(BODIES, lambda p, at: p.slow(20_000, **at, times=2), NEVER_MIND),
        "body empty": Fault(("read",), lambda p, at: p.truncate(**at, times=1), NEVER_MIND),
        "body cut": Fault(("read",), lambda p, at: p.truncate(**at, at=50, times=1), NEVER_MIND),
        "first byte wrong": Fault(("read",), lambda p, at: p.corrupt(**at, times=1), SPOILED),
        "a byte wrong": Fault(("read",), lambda p, at: p.corrupt(**at, at=60, times=1), SPOILED),
        "token expired once": Fault(
            ALL, lambda p, at: p.answer(**denied, **at), DENIED | NEVER_MIND
        ),
        "resets from here on": Fault(
            ALL, lambda p, at: p.reset(**at, times=None), LASTING, deadline=SHORT
        ),
        "503 from here on": Fault(
            ALL, lambda p, at: p.answer(503, **at, times=None), LASTING, deadline=SHORT
        ),
        "429, Retry-After 60": Fault(
            ALL,
            lambda p, at: p.answer(429, **at, headers={"Retry-After": "60"}, times=None),
            LASTING,
            deadline=SHORT,
        ),
        "responses lost from here on": Fault(
            ALL, lambda p, at: p.lose(**at, times=None), LASTING | NEVER_MIND, deadline=SHORT
        ),
        "token expired": Fault(
            ALL, lambda p, at: p.answer(**denied, **at, times=None), DENIED, deadline=SHORT
        ),
        "bodies cut from here on": Fault(
            ("read",), lambda p, at: p.truncate(**at, at=50, times=None), LASTING, deadline=SHORT
        ),
        "a byte wrong from here on": Fault(
            ("read",),
            lambda p, at: p.corrupt(**at, at=60, times=None),
            SPOILED,
            deadline=SHORT,
        ),
    }


# Minutes matter in every run of the tests; what these teach, others mostly teach as well.
RARE = frozenset(
    {
        "503",
        "late",
        "body empty",
        "first byte wrong",
        "token expired once",
        "resets from here on",
        "429, Retry-After 60",
        "bodies cut from here on",
        "a byte wrong from here on",
    }
)


def cells(points: Mapping[str, Point], columns: Mapping[str, Fault]) -> list[tuple[str, str]]:
    """Every point with every fault that can strike it.

    The rare ones are left out unless ``THINWIRE_FAULT_MATRIX=full`` is set.
    """
    full = os.environ.get("THINWIRE_FAULT_MATRIX") == "full"
    return [
        (point, fault)
        for point, at in points.items()
        for fault, how in columns.items()
        if at.kind in how.kinds and fault not in at.without and (full or fault not in RARE)
    ]


@dataclass
class Tale:
    """One cell's run.

    Args:
        proxy: between ``through`` and the server.
        through: the bucket, opened with the fault's deadline, through the proxy.
        direct: the same bucket without the proxy.
    """

    proxy: FaultyProxy
    through: Bucket
    direct: Bucket
    states: list[State]
    watched: Watched = field(default_factory=Watched)

    def tell(self, point: Point, fault: Fault) -> str:
        """The whole run; returns the act's outcome."""
        first, second, third, fourth, fifth = self.states
        mirror = MemoryMirror()
        replica = Replica(self.through, mirror)
        publisher: Publisher | None = None
        if point.act != "start":
            publisher = start(self.through, first, second, codec=CODEC)
            replica.sync()
        if point.act == "follow" and publisher is not None:
            publisher.publish(third.source).result()
        fault.arm(self.proxy, point.where())
        publisher = self._act(point.act, publisher, replica)
        assert not self.proxy.unfired, "the fault struck nothing"
        check_history(self.direct, self.states)
        self.proxy.heal()

        # the same ones go on
        if publisher is None:
            publisher = Publisher(self.through, first.source, codec=CODEC, threads=1)
        publisher.publish(fourth.source).result()
        publisher.close()
        replica.sync()
        assert held(mirror) == fourth.raw
        # and so do others
        with Publisher(self.through, fourth.source, codec=CODEC, threads=1) as heir:
            commit = heir.publish(fifth.source).result()
            replica.sync()
            assert held(mirror) == fifth.raw
            assert heir.version == replica.version == commit.version
        order = check_history(self.direct, self.states)
        assert self.states[order[-1]] is fifth
        assert len(order) == commit.version + 1
        return self.watched.outcome

    def _act(self, act: Act, publisher: Publisher | None, replica: Replica) -> Publisher | None:
        """What meets the fault. Returns the publisher that goes on, if there is one."""
        third = self.states[2]
        watched = self.watched
        if act in ("start", "take over"):
            before = self.states[0] if act == "start" else self.states[1]
            publisher = None  # the fence may be there although the heir does not know: it is over
            with watched.bearing():
                publisher = Publisher(self.through, before.source, codec=CODEC, threads=1)
        elif act == "publish" and publisher is not None:
            receipt = publisher.publish(third.source)
            watched.call(receipt.result)
        elif act == "follow":
            watched.call(replica.sync)
            if not watched.errors:
                assert held(replica.mirror) == third.raw
        else:
            mirror = MemoryMirror()
            watched.call(lambda: Replica(self.through, mirror).sync())
            if not watched.errors:
                assert held(mirror) == self.states[1].raw
        return publisher
