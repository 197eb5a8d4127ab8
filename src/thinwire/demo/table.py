"""How figures read: units, one table row per version, the totals as lines. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.demo.ledger import Ledger, Row

__all__ = ["HEADERS", "cells", "proof_lines", "summary_lines"]

HEADERS = (
    "ver",
    "step",
    "reward",
    "changed",
    "payload",
    "full/",
    "publish",
    "apply",
    "pause",
    "used",
    "blocked",
)
"""``full/``: a full checkpoint over the payload. ``used``: versions that generated the step's
completions. ``blocked``: share of the wall clock so far in which a server could not generate."""

WIDTHS = (3, 4, 6, 7, 8, 5, 7, 7, 7, 5, 7)

_PENDING = "…"


def cells(ledger: Ledger, row: Row) -> tuple[str, ...]:
    """A version's cells under :data:`HEADERS`; what is not known yet shows as ``…``."""
    stepped, published = row.stepped, row.published
    used = sorted(map(int, stepped.used)) if stepped else []
    return (
        str(row.version),
        str(stepped.step) if stepped else _PENDING,
        f"{stepped.reward:.3f}" if stepped else _PENDING,
        percent(row.changed_share),
        size(published.payload_bytes) if published else _PENDING,
        _PENDING if row.ratio is None else f"{row.ratio:.0f}x",
        seconds(row.publish_s),
        milliseconds(row.worst("apply_ms")),
        milliseconds(row.worst("pause_ms")),
        ",".join(map(str, used)) or _PENDING,
        percent(ledger.blocked_share(row)),
    )


def size(count: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if count >= 99.5 or unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return ""


def percent(share: float | None) -> str:
    """A share in percent."""
    if share is None:
        return _PENDING
    return f"{100 * share:.2f} %" if share < 0.1 else f"{100 * share:.1f} %"


def seconds(value: float | None) -> str:
    """Seconds."""
    return _PENDING if value is None else f"{value:.2f} s"


def milliseconds(value: float | None) -> str:
    """Milliseconds."""
    if value is None:
        return _PENDING
    return f"{value:.1f} ms" if value < 99.5 else f"{value:.0f} ms"


def summary_lines(totals: Mapping[str, Any]) -> list[str]:
    """The totals, for people."""
    t = totals
    return [
        f"{t['versions']} versions, {t['completions']} completions from {t['versions_used']} "
        f"weight versions, at most {t['max_staleness']} behind the trainer",
        f"shipped {size(t['payload_bytes'])} instead of {size(t['full_bytes'])} in full "
        f"checkpoints: {t['ratio']:.0f} times less",
        f"per version {size(t['mean_payload_bytes'])}, {percent(t['mean_changed_share'])} of "
        f"{t['parameters'] / 1e6:.3g} M weights changed, {t['bytes_per_change']:.2f} bytes each",
        f"reward {t['first_quarter_reward']:.3f} in the first quarter, "
        f"{t['last_quarter_reward']:.3f} in the last; the best constant phrase would earn "
        f"{t['constant_reward']:.3f}",
        f"publish held the trainer up for {t['mean_diff_s']:.2f} s and was committed after "
        f"{t['mean_publish_s']:.2f} s; servers had it {t['mean_lag_ms'] / 1e3:.2f} s after the "
        "commit (means)",
        f"apply {t['mean_apply_ms']:.1f} ms, pause {t['mean_pause_ms']:.1f} ms (means; longest "
        f"{t['max_apply_ms']:.1f} and {t['max_pause_ms']:.1f} ms); a server could not generate "
        f"during {100 * t['paused_share']:.3f} % of the time",
        f"{t['wall_s']:.0f} s in all, {t['setup_s']:.0f} s of it before the first step",
    ]


def proof_lines(proof: Mapping[str, Any]) -> list[str]:
    """What was compared with the trainer's cast, and how it came out."""
    lines = [f"sha256 {proof['sha256'][:32]}…  the trainer's masters, cast by torch to bf16"]
    for name, held in proof["servers"].items():
        live = held["live_sha256"] == proof["sha256"]
        live = live and held["live_state_digest"] == proof["state_digest"]
        mirror = held["mirror_sha256"] == proof["sha256"]
        lines.append(f"sha256 {held['live_sha256'][:32]}…  {name}, live weights: {_verdict(live)}")
        lines.append(
            f"sha256 {held['mirror_sha256'][:32]}…  {name}, mirror on disk: {_verdict(mirror)}"
        )
    return lines


def _verdict(same: bool) -> str:
    return "identical" if same else "DIFFERENT"
