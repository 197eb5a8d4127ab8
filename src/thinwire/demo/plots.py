"""The report's plots: a run's versions as figures, each with a title and what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from thinwire.demo.charts import Baseline, Series, bars, lines
from thinwire.demo.table import milliseconds, percent, seconds, size

__all__ = ["figures"]

_WINDOW = 5
"""Steps in the reward's moving average."""


def figures(versions: Sequence[Mapping[str, Any]], t: Mapping[str, Any]) -> list[str]:
    """HTML figures, in reading order, from ``run.json``'s versions and totals."""
    xs = [int(v["version"]) for v in versions]
    rewards = _column(versions, "reward")
    servers = sorted({name for v in versions for name in v.get("servers", {})})
    constant = Baseline("best constant phrase", t["constant_reward"])
    smooth = Series(f"mean of {_WINDOW} steps", _smooth(rewards))
    payload = Series("payload", _column(versions, "payload_bytes"))
    return [
        _figure(
            "Reward",
            "Mean over a step's completions, scored by a rule that depends on the prompt.",
            lines(xs, [Series("step", rewards, 2, dots=True), smooth], _plain, baseline=constant),
        ),
        _figure(
            "Changed weights",
            "Share of bf16 weights whose bits differ from the version before.",
            lines(xs, [Series("changed", _column(versions, "changed_share"))], percent),
        ),
        _figure(
            "Payload",
            f"Bytes uploaded per version; a full checkpoint is {size(t['full_checkpoint_bytes'])}.",
            bars(xs, [payload], size),
        ),
        _figure(
            "Publishing",
            "The trainer waits for the diff only; the rest happens while it trains on.",
            bars(
                xs,
                [
                    Series("diff and copy-out", _scaled(versions, "diff_s"), 1),
                    Series("encode", _scaled(versions, "encode_s"), 2),
                    Series("upload", _scaled(versions, "upload_s"), 3),
                    Series("commit", _scaled(versions, "commit_s"), 4),
                ],
                milliseconds,
            ),
        ),
        _figure(
            "Applying",
            "How long a server took to bring a version in, and how long it could not generate.",
            lines(
                xs,
                [
                    Series(f"{name}, {label}", _of_server(versions, name, key), colour)
                    for k, name in enumerate(servers)
                    for key, label, colour in (
                        ("apply_ms", "apply", 1 + 2 * k),
                        ("pause_ms", "pause", 2 + 2 * k),
                    )
                ],
                milliseconds,
            ),
        ),
        _figure(
            "From commit to serving",
            "Time after the commit until the live model was at the version; a batch that is being "
            "generated is waited for.",
            lines(
                xs,
                [
                    Series(name, _of_server(versions, name, "lag_ms"), 1 + 2 * k)
                    for k, name in enumerate(servers)
                ],
                milliseconds,
            ),
        ),
        _figure(
            "Versions used",
            "Completions of each step by how many versions behind the trainer their weights were.",
            bars(xs, _staleness(versions), _plain, x_name="step"),
        ),
        _figure(
            "Where a step's time went",
            "Waiting for completions, and the optimizer step.",
            bars(
                xs,
                [
                    Series("train", _column(versions, "train_s"), 1),
                    Series("wait", _column(versions, "wait_s"), 2),
                ],
                seconds,
                x_name="step",
            ),
        ),
    ]


def _figure(title: str, says: str, chart: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b> {escape(says)}</figcaption>{chart}</figure>"


def _column(versions: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    return [v.get(name) for v in versions]


def _scaled(versions: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Seconds as milliseconds."""
    return [None if value is None else 1e3 * value for value in _column(versions, name)]


def _of_server(versions: Sequence[Mapping[str, Any]], name: str, key: str) -> list[float | None]:
    return [v.get("servers", {}).get(name, {}).get(key) for v in versions]


def _smooth(values: Sequence[float | None]) -> list[float | None]:
    """Mean of the last few values that are there."""
    means: list[float | None] = []
    for k in range(len(values)):
        window = [v for v in values[max(0, k + 1 - _WINDOW) : k + 1] if v is not None]
        means.append(sum(window) / len(window) if window else None)
    return means


def _staleness(versions: Sequence[Mapping[str, Any]]) -> list[Series]:
    counts: list[dict[int, int]] = []
    for v in versions:
        of_step: dict[int, int] = {}
        for used, n in (v.get("used") or {}).items():
            behind = int(v["version"]) - 1 - int(used)
            of_step[behind] = of_step.get(behind, 0) + n
        counts.append(of_step)
    found = sorted({behind for of_step in counts for behind in of_step})
    names = {0: "current", 1: "1 behind"}
    return [
        Series(names.get(b, f"{b} behind"), [float(c.get(b, 0)) for c in counts], 1 + b % 4)
        for b in found
    ]


def _plain(value: float) -> str:
    return f"{value:.3g}"
