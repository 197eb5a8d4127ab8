"""What happened in a run: rows per version, folded from what its processes report. No I/O.

The trainer tells of steps, the follower of servers that serve a version, the players of games, and
the coordinator of tokens that it reads from the servers' metrics, and of what it killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

__all__ = ["Arrival", "Happening", "Ledger", "Row", "Sample", "totals"]

_NEAR_S = 1.0


@dataclass(frozen=True)
class Arrival:
    """A server serves a version.

    Attributes:
        paused_s: requests were held; None if it loaded the version when it started.
        stage_s: fetching, verifying and bringing the changes to the device, while it served.
        at: clock time, Unix seconds.
    """

    paused_s: float | None
    stage_s: float | None
    at: float


@dataclass(frozen=True)
class Happening:
    """Something that the coordinator did to the run, or saw: at a clock time."""

    at: float
    what: str


@dataclass(frozen=True)
class Sample:
    """Tokens that a server has generated since it started, at a clock time."""

    at: float
    server: str
    tokens: float


@dataclass
class Row:
    """A version: the optimizer step that made it, and who serves it.

    Attributes:
        at: clock time of the trainer's log record, just after the commit.
        logs: what the trainer logged, under TRL's and thinwire's own names.
        arrivals: by server.
    """

    version: int
    step: int
    at: float
    logs: dict[str, float]
    arrivals: dict[str, Arrival] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> float | None:
        """Bytes of the payload; None if nothing was published."""
        return self.logs.get("thinwire/payload_bytes")

    @property
    def changed_share(self) -> float | None:
        """Of all weights, 0 to 1."""
        return self.logs.get("thinwire/changed_share")

    @property
    def worst_pause_s(self) -> float | None:
        """The longest that a server held requests for it."""
        return max(
            (a.paused_s for a in self.arrivals.values() if a.paused_s is not None), default=None
        )

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


class Ledger:
    """All that is known of a run.

    Args:
        servers: names by URL.
        full_bytes: of a checkpoint in the serving dtype.
    """

    def __init__(self, servers: Mapping[str, str], full_bytes: int) -> None:
        self.servers = dict(servers)
        self.full_bytes = full_bytes
        self.rows: dict[int, Row] = {}
        self.arrivals: dict[int, dict[str, Arrival]] = {}
        self.games: list[dict[str, Any]] = []
        self.samples: list[Sample] = []
        self.happenings: list[Happening] = []
        self.end: dict[str, Any] | None = None

    def step(self, event: Mapping[str, Any]) -> None:
        """A line that the trainer wrote: ``event`` is begin, step or end."""
        if event["event"] == "end":
            self.end = dict(event)
        version = event.get("logs", {}).get("thinwire/version")
        if event["event"] != "step" or version is None:
            return
        row = Row(int(version), int(event["step"]), float(event["time"]), dict(event["logs"]))
        row.arrivals = self.arrivals.setdefault(row.version, {})
        self.rows[row.version] = row

    def arrived(self, event: Mapping[str, Any], at: float) -> None:
        """A line of ``thinwire follow --json``.

        A server that is only found at a version, by a follower that was restarted or after it was
        restarted itself, does not hide when it moved there.
        """
        arrival = Arrival(event["paused_s"], event["stage_s"], at)
        found = self.arrivals.setdefault(int(event["version"]), {})
        server = self.servers[event["url"]]
        if server not in found or arrival.paused_s is not None:
            found[server] = arrival

    def happened(self, what: str, at: float) -> None:
        """The coordinator did something, or saw it."""
        self.happenings.append(Happening(at, what))

    @property
    def newest(self) -> Row | None:
        """The row of the newest version."""
        return self.rows[max(self.rows)] if self.rows else None

    def to_json(self) -> dict[str, Any]:
        """Everything but the totals."""
        return {
            "full_bytes": self.full_bytes,
            "versions": [row.to_json() for _, row in sorted(self.rows.items())],
            "games": self.games,
            "samples": [asdict(sample) for sample in self.samples],
            "happenings": [asdict(happening) for happening in self.happenings],
        }


def totals(ledger: Ledger) -> dict[str, Any]:
    """The run in a few numbers; seconds, bytes, and shares from 0 to 1."""
    rows = [row for _, row in sorted(ledger.rows.items())]
    sent = [row.payload_bytes for row in rows if row.payload_bytes is not None]
    pauses = [a.paused_s for row in rows for a in row.arrivals.values() if a.paused_s is not None]
    rewards = [row.logs["reward"] for row in rows if "reward" in row.logs]
    quarter = max(1, len(rewards) // 4)
    return {
        "versions": len(rows),
        "payload_bytes": sum(sent),
        "full_bytes": ledger.full_bytes * len(sent),
        "ratio": ledger.full_bytes * len(sent) / max(1.0, sum(sent)),
        "mean_changed_share": _mean(
            [row.changed_share for row in rows if row.changed_share is not None]
        ),
        "mean_pause_s": _mean(pauses),
        "max_pause_s": max(pauses, default=0.0),
        "max_staleness": max(
            (row.logs.get("sample/staleness_max", 0.0) for row in rows), default=0.0
        ),
        "reward_first": _mean(rewards[:quarter]),
        "reward_last": _mean(rewards[-quarter:]),
        "games": len(ledger.games),
        "won": sum(bool(game["won"]) for game in ledger.games),
        "guesses": sum(len(game["guesses"]) for game in ledger.games),
        "tool_failures": sum(row.logs.get("tools/guess/failure_total", 0.0) for row in rows),
        **_speeds(ledger),
    }


def _speeds(ledger: Ledger) -> dict[str, float]:
    """Tokens per second over all servers, near the moments when they move to a version, and else.

    Near is the same for all, a second before and after: the time that a version takes to arrive is
    long when the machine is busy, so counting that time would find the busy moments. What is before
    the first version and after the last does not count, nor does a server that is down.
    """
    tokens, seconds = [0.0, 0.0], [0.0, 0.0]
    ends = [a.at for row in ledger.rows.values() for a in row.arrivals.values()]
    first = min((row.at for row in ledger.rows.values()), default=0.0)
    for server in ledger.servers.values():
        found = [r.arrivals[server] for r in ledger.rows.values() if server in r.arrivals]
        moves = [arrival.at for arrival in found if arrival.paused_s is not None]
        own = [sample for sample in ledger.samples if sample.server == server]
        for before, after in pairwise(own):
            if after.tokens < before.tokens:  # it was restarted
                continue
            if not ends or after.at <= first or before.at >= max(ends):
                continue
            middle = (before.at + after.at) / 2
            near = any(abs(middle - at) <= _NEAR_S for at in moves)
            tokens[near] += after.tokens - before.tokens
            seconds[near] += (after.at - before.at) / len(ledger.servers)
    return {
        "tokens_per_s": tokens[0] / seconds[0] if seconds[0] else 0.0,
        "tokens_per_s_syncing": tokens[1] / seconds[1] if seconds[1] else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
