"""A run's figures as people read them. What nothing was measured for is ``…``, never zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.demo.table import milliseconds, percent, size

__all__ = ["UNKNOWN", "count", "facts", "held", "known", "logged", "rate", "shown", "times"]

UNKNOWN = "…"
_STALENESS, _CALLS = "sample/staleness_max", "tools/guess/call_total"
_TRAINED = "batch/samples_per_step"


def known(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run's totals; None for those that nothing was measured for."""
    t, versions = dict(run.get("totals") or {}), run.get("versions") or []
    games = t.get("games") or 0
    payloads = [p for p in logged(versions, "thinwire/payload_bytes_max") if p is not None]
    t["max_payload_bytes"] = max(payloads, default=None)
    publishes = t.get("publishes") or 0
    t["mean_payload_bytes"] = t.get("payload_bytes", 0) / publishes if publishes else None
    t["won_share"] = t.get("won", 0) / games if games else None
    t["one_full_bytes"] = run.get("full_bytes")
    t["parameters"] = (run.get("warmup") or {}).get("parameters")
    t["setup_s"], t["run_s"] = ((run.get("seconds") or {}).get(key) for key in ("setup", "run"))
    for measured, names in (
        (t.get("payload_bytes"), ("payload_bytes", "full_bytes", "ratio", "mean_changed_share")),
        (t.get("max_pause_s"), ("mean_pause_s", "max_pause_s")),
        (t.get("tokens_per_s"), ("tokens_per_s",)),
        (t.get("tokens_per_s_before"), ("tokens_per_s_before",)),
        (t.get("tokens_per_s_after"), ("tokens_per_s_after",)),
        (_any(versions, "reward"), ("reward_first", "reward_last")),
        (_any(versions, _STALENESS), ("max_staleness",)),
        (_any(versions, _CALLS), ("tool_failures",)),
        (_any(versions, _TRAINED), ("trained", "dropped")),
    ):
        for name in names:
            t[name] = t.get(name) if measured else None
    return t


def facts(run: Mapping[str, Any]) -> dict[str, str]:
    """The totals by name, with units."""
    t = known(run)
    return {
        "versions": count(t.get("versions")),
        "parameters": shown(t["parameters"], lambda n: f"{n / 1e6:.3g} M"),
        "one_full": shown(t["one_full_bytes"], size),
        "games": count(t.get("games")),
        "won": count(t.get("won")),
        "won_share": percent(t["won_share"]),
        "trained": count(t["trained"]),
        "dropped": count(t["dropped"]),
        "guesses": count(t.get("guesses")),
        "tool_failures": count(t["tool_failures"]),
        "reward_first": shown(t["reward_first"], lambda r: f"{r:.3f}"),
        "reward_last": shown(t["reward_last"], lambda r: f"{r:.3f}"),
        "changed": percent(t["mean_changed_share"]),
        "payload": shown(t["mean_payload_bytes"], size),
        "largest_payload": shown(t["max_payload_bytes"], size),
        "smallest_ratio": times(t["one_full_bytes"], t["max_payload_bytes"]),
        "shipped": shown(t["payload_bytes"], size),
        "full": shown(t["full_bytes"], size),
        "ratio": shown(t["ratio"], lambda r: f"{r:.0f}"),
        "mean_pause": held(t["mean_pause_s"]),
        "max_pause": held(t["max_pause_s"]),
        "staleness": shown(t["max_staleness"], lambda s: f"{s:.0f}"),
        "speed": rate(t["tokens_per_s"]),
        "speed_before": rate(t["tokens_per_s_before"]),
        "speed_after": rate(t["tokens_per_s_after"]),
        "setup": shown(t["setup_s"], lambda s: f"{s:.0f} s"),
        "run": shown(t["run_s"], lambda s: f"{s:.0f} s"),
    }


def logged(versions: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """What the trainer logged under a name, per version; None where it is missing or no number."""
    values = ((v.get("logs") or {}).get(name) for v in versions)
    return [v if isinstance(v, (int, float)) and math.isfinite(v) else None for v in values]


def shown(value: Any, show: Callable[[Any], str]) -> str:
    """The value; ``…`` for None."""
    return UNKNOWN if value is None else show(value)


def count(value: float | None) -> str:
    """A number of things."""
    return shown(value, lambda n: f"{n:,.0f}")


def held(value: float | None) -> str:
    """Seconds of a pause, in milliseconds."""
    return milliseconds(None if value is None else 1e3 * value)


def rate(value: float | None) -> str:
    """Tokens per second."""
    return shown(value, lambda r: f"{r:,.0f}")


def times(full: float | None, payload: float | None) -> str:
    """How many times larger a full checkpoint is than what was sent."""
    return f"{full / payload:.0f}" if full and payload else UNKNOWN


def _any(versions: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(value is not None for value in logged(versions, name))
