"""What happened in a run, folded from events: rows per version, totals. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.demo.events import Applied, Event, Plan, Published, Ready, Stepped

__all__ = ["Ledger", "Row", "totals"]


@dataclass
class Row:
    """One version: the step that made it, its publish, and every server's apply."""

    version: int
    stepped: Stepped | None = None
    published: Published | None = None
    applied: dict[str, Applied] = field(default_factory=dict)

    def complete(self, servers: int) -> bool:
        """Whether nothing more will be heard of this version."""
        return (
            self.stepped is not None and self.published is not None and len(self.applied) == servers
        )

    @property
    def changed_share(self) -> float | None:
        """Of all elements."""
        sent = self.published
        return None if sent is None else sent.changed / max(1, sent.elements)

    @property
    def ratio(self) -> float | None:
        """Bytes of a full checkpoint over bytes of the payload."""
        sent = self.published
        return None if sent is None else sent.full_bytes / max(1, sent.payload_bytes)

    @property
    def publish_s(self) -> float | None:
        """From the start of the diff to the commit."""
        sent = self.published
        if sent is None:
            return None
        return sent.diff_s + sent.encode_s + sent.upload_s + sent.commit_s

    def worst(self, name: str) -> float | None:
        """The largest value of a field of :class:`Applied` over the servers heard from."""
        values = [float(getattr(applied, name)) for applied in self.applied.values()]
        return max(values, default=None)

    def to_json(self) -> dict[str, Any]:
        """All figures of the version, flat where there is one, per server where there are two."""
        return {
            "version": self.version,
            "changed_share": self.changed_share,
            "ratio": self.ratio,
            "publish_s": self.publish_s,
            **(asdict(self.stepped) if self.stepped else {}),
            **(asdict(self.published) if self.published else {}),
            "servers": {name: asdict(applied) for name, applied in self.applied.items()},
        }


class Ledger:
    """All that the coordinator has been told."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.servers = tuple(servers)
        self.plan: Plan | None = None
        self.ready: dict[str, Ready] = {}
        self.rows: dict[int, Row] = {}

    def add(self, source: str, event: Event) -> Row | None:
        """Take in an event; return the row that it completed, if it did."""
        if isinstance(event, Plan):
            self.plan = event
        elif isinstance(event, Ready):
            self.ready[source] = event
        elif isinstance(event, Stepped):
            return self._completed(event.step, stepped=event)
        elif isinstance(event, Published):
            return self._completed(event.version, published=event)
        elif isinstance(event, Applied) and event.version > 0:
            row = self.rows.setdefault(event.version, Row(event.version))
            row.applied[source] = event
            return row if row.complete(len(self.servers)) else None
        return None

    def _completed(self, version: int, **what: Any) -> Row | None:
        row = self.rows.setdefault(version, Row(version))
        for name, value in what.items():
            setattr(row, name, value)
        return row if row.complete(len(self.servers)) else None

    def blocked_share(self, row: Row) -> float | None:
        """Share of the wall clock up to a version in which the worst server could not generate."""
        shares = [a.paused_s / a.up_s for a in row.applied.values() if a.up_s > 0]
        return max(shares, default=None)


def totals(
    ledger: Ledger,
    *,
    wall_s: float,
    setup_s: float,
    servers: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The run in a few numbers.

    Args:
        wall_s: of everything; ``setup_s`` of it before the first step.
        servers: each server's last answer to ``GET /weights``.
    """
    rows = [row for _, row in sorted(ledger.rows.items())]
    sent = [row.published for row in rows if row.published is not None]
    steps = [row.stepped for row in rows if row.stepped is not None]
    applied = [a for row in rows for a in row.applied.values()]
    rewards = [step.reward for step in steps]
    quarter = max(1, len(rewards) // 4)
    used: Counter[int] = Counter()
    for step in steps:
        used.update({int(version): n for version, n in step.used.items()})
    payload = sum(p.payload_bytes for p in sent)
    full = sum(p.full_bytes for p in sent)
    return {
        "versions": len(sent),
        "steps": len(steps),
        "parameters": ledger.plan.parameters if ledger.plan else 0,
        "full_checkpoint_bytes": ledger.plan.full_bytes if ledger.plan else 0,
        "payload_bytes": payload,
        "commit_bytes": sum(p.commit_bytes for p in sent),
        "full_bytes": full,
        "ratio": full / max(1, payload),
        "mean_payload_bytes": payload / max(1, len(sent)),
        "mean_changed_share": _mean([p.changed / max(1, p.elements) for p in sent]),
        "bytes_per_change": payload / max(1, sum(p.changed for p in sent)),
        "first_quarter_reward": _mean(rewards[:quarter]),
        "last_quarter_reward": _mean(rewards[-quarter:]),
        "constant_reward": ledger.plan.constant_reward if ledger.plan else 0.0,
        "completions": sum(used.values()),
        "versions_used": len(used),
        "max_staleness": max((step.staleness for step in steps), default=0),
        "dropped_completions": sum(step.dropped for step in steps),
        "mean_diff_s": _mean([p.diff_s for p in sent]),
        "mean_publish_s": _mean([row.publish_s or 0.0 for row in rows if row.published]),
        "mean_apply_ms": _mean([a.apply_ms for a in applied]),
        "max_apply_ms": max((a.apply_ms for a in applied), default=0.0),
        "mean_pause_ms": _mean([a.pause_ms for a in applied]),
        "max_pause_ms": max((a.pause_ms for a in applied), default=0.0),
        "mean_lag_ms": _mean([a.lag_ms for a in applied]),
        "paused_share": max(
            (s["paused_s"] / s["up_s"] for s in servers.values() if s["up_s"]), default=0.0
        ),
        "mean_train_s": _mean([step.train_s for step in steps]),
        "mean_wait_s": _mean([step.wait_s for step in steps]),
        "setup_s": setup_s,
        "wall_s": wall_s,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
