"""A run's figures, for the report's page and as files for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.demo.charts import Series
from thinwire.demo.table import milliseconds, percent, seconds, size
from wordle.facts import held, logged
from wordle.figure import Figure
from wordle.ledger import Sample
from wordle.speed import around, reading_s, tokens_between

__all__ = ["began", "figures", "samples_of", "write_plots"]

_DOCUMENTED = ("reward", "won", "changed", "payload", "pause", "staleness", "tokens", "moving")


def write_plots(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """The figures that the documentation shows, as ``<name>.svg``; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures(run):
        if figure.name in _DOCUMENTED:
            written.append(folder / f"{figure.name}.svg")
            written[-1].write_text(figure.svg(), encoding="utf-8")
    return written


def figures(run: Mapping[str, Any]) -> list[Figure]:
    """All figures of ``run.json``'s content, in reading order."""
    versions = run.get("versions") or []
    return [
        *_learning(versions),
        _games(run.get("games") or []),
        *_moved(versions),
        *_arrivals(versions),
        *_speed(run),
        *_time(versions),
    ]


def samples_of(run: Mapping[str, Any]) -> list[Sample]:
    """The readings of the servers' counters, in order."""
    return sorted((Sample(**sample) for sample in run.get("samples") or []), key=lambda s: s.at)


def began(run: Mapping[str, Any]) -> float:
    """Clock time of the first thing that is known of the run."""
    kept = [*(run.get("samples") or []), *(run.get("happenings") or [])]
    return min((entry["at"] for entry in [*kept, *(run.get("versions") or [])]), default=0.0)


# --- what the trainer tells ----------------------------------------------------------------


def _learning(versions: Sequence[Mapping[str, Any]]) -> list[Figure]:
    xs, rewards = _numbers(versions), logged(versions, "reward")
    span = max(3, len(xs) // 10)
    stale = (
        Series("largest", logged(versions, "sample/staleness_max"), 2, dots=True),
        Series("mean", logged(versions, "sample/staleness_mean")),
    )
    return [
        Figure(
            "reward", "Reward",
            "Mean over the games taken from the queue during a step; the next one learns from "
            "them.", xs,
            (Series("step", rewards, 2, dots=True),
             Series(f"mean of {span} steps", _running(rewards, span))),
            _plain,
        ),
        Figure(
            "staleness", "Staleness",
            "Versions by which the weights that played a game were behind the trainer when it was "
            "taken from the queue; it is trained on one step later.",
            xs, stale, _plain,
        ),
        Figure(
            "entropy", "Entropy", "Of the model's choices, per token.", xs,
            (Series("entropy", logged(versions, "entropy")),), _plain,
        ),
    ]  # fmt: skip


def _games(games: Sequence[Mapping[str, Any]]) -> Figure:
    span = max(8, -(-len(games) // 40))
    starts = range(0, len(games), span)
    shares = [_mean([float(bool(g.get("won"))) for g in games[k : k + span]]) for k in starts]
    return Figure(
        "won", "Games won", f"Share of every {span} games, in the order in which they ended.",
        [min(k + span, len(games)) for k in starts], (Series("won", shares),), percent,
        x_name="games",
    )  # fmt: skip


def _moved(versions: Sequence[Mapping[str, Any]]) -> list[Figure]:
    xs = _numbers(versions)
    changed = Series("changed", logged(versions, "thinwire/changed_share"))
    payload = Series("payload", logged(versions, "thinwire/payload_bytes"))
    return [
        Figure(
            "changed", "Changed weights",
            "Share of bf16 weights whose bits differ from the version before.", xs, (changed,),
            percent,
        ),
        Figure(
            "payload", "Payload", "Bytes uploaded per version, in the mean since the one before.",
            xs, (payload,), size, stacked=True,
        ),
    ]  # fmt: skip


def _time(versions: Sequence[Mapping[str, Any]]) -> list[Figure]:
    xs = _numbers(versions)
    named = {
        "waiting for games": "perf/rollout_wait_s",
        "forward and backward": "perf/fwd_bwd_s",
        "optimizer": "perf/optimizer_s",
        "publishing": "perf/weight_sync_s",
    }
    parts = {
        f"thinwire/{part}_s": f"{part}, copying included" if part == "diff" else part
        for part in ("diff", "encode", "upload", "commit")
    }
    publishing = [
        Series(label, [None if v is None else 1e3 * v for v in logged(versions, name)], k)
        for k, (name, label) in enumerate(parts.items(), 1)
    ]
    return [
        Figure(
            "time", "Where a step's time went", "In the trainer.", xs,
            [Series(label, logged(versions, name), k)
             for k, (label, name) in enumerate(named.items(), 1)],
            seconds, stacked=True,
        ),
        Figure(
            "publishing", "Publishing", "From the trainer's weights to a committed version.", xs,
            publishing, milliseconds, stacked=True,
        ),
    ]  # fmt: skip


# --- what the servers tell -----------------------------------------------------------------


def _arrivals(versions: Sequence[Mapping[str, Any]]) -> list[Figure]:
    xs = _numbers(versions)
    paused, lags = [], []
    for k, server in enumerate(_servers(versions)):
        own = [(v, (v.get("arrivals") or {}).get(server) or {}) for v in versions]
        paused.append(Series(server, [a.get("paused_s") for _, a in own], 1 + k % 4))
        late = [None if a.get("paused_s") is None else a["at"] - v["at"] for v, a in own]
        lags.append(Series(server, [None if x is None else max(0.0, x) for x in late], 1 + k % 4))
    return [
        Figure(
            "pause", "Pause", "How long a server held its requests to take in a version.", xs,
            paused, held,
        ),
        Figure(
            "lag", "From commit to serving",
            "Noticing the version, fetching and verifying it, and the pause.", xs, lags, seconds,
        ),
    ]  # fmt: skip


def _speed(run: Mapping[str, Any]) -> list[Figure]:
    samples, start = samples_of(run), began(run)
    end = samples[-1].at if samples else start
    width = next((w for w in (2, 5, 10, 20, 30, 60) if (end - start) / w <= 90), 300)
    edges = [start + k * width for k in range(int((end - start) / width) + 1)]
    speeds = [made / width for made in tokens_between(samples, edges)] if samples else []
    marked: list[float | None] = [None] * len(speeds)
    for happening in run.get("happenings") or []:
        at = int((happening["at"] - start) / width)
        if 0 <= at < len(speeds):
            marked[at] = speeds[at]
    over_time = [Series("both servers", speeds)]
    if any(value is not None for value in marked):
        over_time.append(Series("something was killed or restarted", marked, 2, dots=True))
    return [
        Figure(
            "tokens", "Tokens per second", f"Generated by the servers, means over {width} s.",
            [k * width for k in range(len(speeds))], over_time, _plain, x_name="seconds",
        ),
        _moving(run.get("versions") or [], samples),
    ]  # fmt: skip


def _moving(versions: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> Figure:
    offsets = [k / 2 for k in range(-6, 7)]
    speeds = []
    for k, server in enumerate(_servers(versions)):
        found = [(v.get("arrivals") or {}).get(server) or {} for v in versions]
        moves = [arrival["at"] for arrival in found if arrival.get("paused_s") is not None]
        own = [sample for sample in samples if sample.server == server]
        speeds.append(Series(server, around(own, moves, offsets), 1 + k % 4))
    every = reading_s(samples)
    return Figure(
        "moving", "Generating while weights move",
        "Tokens per second of a server before and after it has moved to a version, in the mean "
        "over all versions."
        + ("" if every is None else f" Its counter is read every {every:.2g} s."),
        [int(1000 * offset) for offset in offsets[:-1]], speeds, _plain, x_name="ms",
    )  # fmt: skip


# --- small things --------------------------------------------------------------------------


def _servers(versions: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for v in versions for name in v.get("arrivals") or {}})


def _numbers(versions: Sequence[Mapping[str, Any]]) -> list[int]:
    return [int(v["version"]) for v in versions]


def _running(values: Sequence[float | None], span: int) -> list[float | None]:
    """Mean of the last ``span`` values, of those that are there."""
    return [
        _mean([v for v in values[max(0, k + 1 - span) : k + 1] if v is not None])
        for k in range(len(values))
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _plain(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
