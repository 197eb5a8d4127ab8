"""What happened in a run: rows per version, folded from what its processes report. No I/O.

The trainer tells of steps, the follower of servers that serve a version, the players of games, and
the coordinator of tokens that it reads from the servers' metrics, and of what it killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wordle.speed import Sample, around, tokens_per_s

__all__ = ["Arrival", "Happening", "Ledger", "Row", "Sample", "totals"]


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


@dataclass
class Row:
    """A version: the optimizer step that made it, and who serves it.

    Attributes:
        at: clock time of the trainer's log record, just after the commit.
        logs: what the trainer logged, under TRL's and thinwire's own names. Reward and staleness
            are of the games that were taken from the queue during the step, which the next step is
            trained on: they are taken one batch ahead. The first row's are of two batches.
        arrivals: by server.
    """

    version: int
    step: int
    at: float
    logs: dict[str, float]
    arrivals: dict[str, Arrival] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> float | None:
        """Bytes of the payload, the mean if there were several; None if nothing was published."""
        return self.logs.get("thinwire/payload_bytes")

    @property
    def publishes(self) -> int:
        """Since the row before: more than one after a restart of the trainer."""
        return int(self.logs.get("thinwire/publishes", 0))

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
    """The run in a few numbers; seconds, bytes, and shares from 0 to 1.

    ``versions`` are all that there are, of which ``publishes`` were deltas that the trainer told
    of: version 0 is none, nor is the version by which a restarted trainer takes the run over.
    ``trained`` and ``dropped`` are games, and include those of steps that a restart has lost.
    """
    rows = [row for _, row in sorted(ledger.rows.items())]
    publishes = sum(row.publishes for row in rows)
    sent = sum(row.logs.get("thinwire/payload_bytes_total", 0.0) for row in rows)
    full = ledger.full_bytes * publishes
    shares = [(row.changed_share or 0.0) * row.publishes for row in rows]
    pauses = [
        arrival.paused_s
        for found in ledger.arrivals.values()
        for arrival in found.values()
        if arrival.paused_s is not None
    ]
    rewards = [row.logs["reward"] for row in rows if "reward" in row.logs]
    quarter = max(1, len(rewards) // 4)
    return {
        "versions": max([-1, *ledger.rows, *ledger.arrivals, (ledger.end or {}).get("version", -1)])
        + 1,
        "publishes": publishes,
        "payload_bytes": sent,
        "full_bytes": full,
        "ratio": full / max(1.0, sent),
        "mean_changed_share": sum(shares) / max(1, publishes),
        "mean_pause_s": _mean(pauses),
        "max_pause_s": max(pauses, default=0.0),
        "max_staleness": max(
            (row.logs.get("sample/staleness_max", 0.0) for row in rows), default=0.0
        ),
        "reward_first": _mean(rewards[:quarter]),
        "reward_last": _mean(rewards[-quarter:]),
        "games": len(ledger.games),
        "won": sum(bool(game["won"]) for game in ledger.games),
        "trained": sum(round(row.logs.get("batch/samples_per_step", 0.0)) for row in rows),
        "dropped": sum(round(row.logs.get("sample/dropped_stale_total", 0.0)) for row in rows),
        "guesses": sum(len(game["guesses"]) for game in ledger.games),
        "tool_failures": sum(row.logs.get("tools/guess/failure_total", 0.0) for row in rows),
        **_speeds(ledger),
    }


def _speeds(ledger: Ledger) -> dict[str, float]:
    """Tokens per second: of all servers, and of one around the moments when it has moved.

    The first is over clock time, from the first row to the last arrival; a server that is down
    generates nothing. The others are means over all moves, of a second each. The one before has the
    pause in it. What is asked of the servers is about the same in both, which it is not at other
    times: how much they generate there tells whether anybody asks, and little of moving.
    """
    arrivals = [a for found in ledger.arrivals.values() for a in found.values()]
    first = min((row.at for row in ledger.rows.values()), default=0.0)
    last = max((arrival.at for arrival in arrivals), default=0.0)
    before, after = [], []
    for server in ledger.servers.values():
        own = [sample for sample in ledger.samples if sample.server == server]
        found = [of[server] for of in ledger.arrivals.values() if server in of]
        for moved in (arrival.at for arrival in found if arrival.paused_s is not None):
            earlier, later = around(own, [moved], (-1.0, 0.0, 1.0))
            if earlier is not None and later is not None:
                before.append(earlier)
                after.append(later)
    return {
        "tokens_per_s": tokens_per_s(ledger.samples, first, last) or 0.0,
        "tokens_per_s_before": _mean(before),
        "tokens_per_s_after": _mean(after),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
