"""The run as one self-contained page: a pure function of ``run.json``'s content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from thinwire.demo.plots import figures
from thinwire.demo.table import milliseconds, percent, seconds, size

__all__ = ["render"]


def render(run: Mapping[str, Any]) -> str:
    """The HTML page.

    Args:
        run: what :func:`thinwire.demo.run.run_demo` returns, also after a trip through JSON.
    """
    plan, totals, versions = run.get("plan") or {}, run["totals"], run["versions"]
    title = f"thinwire demo: {plan.get('model', 'a model')}, {totals['versions']} versions"
    style = files("thinwire.demo").joinpath("report.css").read_text(encoding="utf-8")
    body = "".join(
        (
            _heading(run, plan, totals),
            _tiles(totals),
            '<div class="charts">',
            *figures(versions, totals),
            "</div>",
            _proof(run["proof"]),
            _versions(versions),
            _examples(versions),
            _how(plan, run.get("settings") or {}),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _heading(run: Mapping[str, Any], plan: Mapping[str, Any], totals: Mapping[str, Any]) -> str:
    good = bool(run["bit_identical"])
    verdict = "bit-identical" if good else "not bit-identical"
    says = (
        "The weights inside both running servers, and both mirrors on disk, equal the trainer's "
        "cast of its masters in every bit."
        if good
        else "Some weights differ from the trainer's cast of its masters: see the proof below."
    )
    what = (
        f"{plan.get('model', 'A model')} ({totals['parameters'] / 1e6:.3g} M weights) was trained "
        f"to {plan.get('task', 'do its task')} with GRPO for {totals['steps']} steps. After each, "
        "the trainer published what had changed in bf16 to a bucket; two rollout servers followed "
        "it through that bucket alone and generated the next completions."
    )
    return (
        f"<header><h1>thinwire demo</h1><p>{escape(what)}</p>"
        f'<p class="verdict {"good" if good else "bad"}"><b>{verdict}</b> {says}</p></header>'
    )


def _tiles(t: Mapping[str, Any]) -> str:
    tiles = (
        (f"{t['ratio']:.0f}×", "less than full checkpoints"),
        (size(t["mean_payload_bytes"]), f"per version, of {size(t['full_checkpoint_bytes'])}"),
        (
            percent(t["mean_changed_share"]),
            f"of weights change, {t['bytes_per_change']:.2f} B each",
        ),
        (
            f"{t['first_quarter_reward']:.2f} → {t['last_quarter_reward']:.2f}",
            f"reward, first and last quarter; best constant {t['constant_reward']:.2f}",
        ),
        (milliseconds(t["mean_pause_ms"]), f"pause per version; apply {t['mean_apply_ms']:.0f} ms"),
        (f"{100 * t['paused_share']:.2g} %", "of the time a server could not generate"),
        (seconds(t["mean_lag_ms"] / 1e3), "from commit to serving"),
        (f"{t['wall_s']:.0f} s", f"in all; {t['setup_s']:.0f} s before the first step"),
    )
    cells = (f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return f'<section class="tiles">{"".join(cells)}</section>'


def _proof(proof: Mapping[str, Any]) -> str:
    expected = (proof["sha256"], proof["state_digest"])
    rows: list[tuple[str, str, str, bool | None]] = [
        ("trainer's masters, cast by torch", *expected, None)
    ]
    for name, held in proof["servers"].items():
        live = (held["live_sha256"], held["live_state_digest"])
        rows.append((f"{name}, weights in the live module", *live, live == expected))
        same = held["mirror_sha256"] == proof["sha256"]
        rows.append((f"{name}, mirror read with safetensors", held["mirror_sha256"], "", same))
    cells = "".join(
        f"<tr><td>{escape(what)}</td><td><code>{escape(sha)}</code></td>"
        f"<td><code>{escape(digest[:32])}</code></td><td>{_mark(same)}</td></tr>"
        for what, sha, digest, same in rows
    )
    return (
        f"<section><h2>Proof at version {proof['version']}</h2><div class='wide'><table>"
        "<tr><th>what</th><th>SHA-256 over all bf16 bytes</th><th>state digest</th><th></th></tr>"
        f"{cells}</table></div></section>"
    )


def _mark(same: bool | None) -> str:
    if same is None:
        return ""
    return '<b class="good">identical</b>' if same else '<b class="bad">different</b>'


def _versions(versions: Sequence[Mapping[str, Any]]) -> str:
    heads = (
        "version", "reward", "changed", "tensors", "payload", "full /", "publish", "apply",
        "pause", "lag", "completions from",
    )  # fmt: skip
    rows = []
    for v in versions:
        applied = v.get("servers", {}).values()
        used = ", ".join(f"v{k} ({n})" for k, n in (v.get("used") or {}).items())
        cells = (
            v["version"],
            _maybe(v.get("reward"), lambda x: f"{x:.3f}"),
            percent(v.get("changed_share")),
            v.get("tensors", "…"),
            _maybe(v.get("payload_bytes"), size),
            _maybe(v.get("ratio"), lambda x: f"{x:.0f}×"),
            seconds(v.get("publish_s")),
            milliseconds(max((a["apply_ms"] for a in applied), default=None)),
            milliseconds(max((a["pause_ms"] for a in applied), default=None)),
            milliseconds(max((a["lag_ms"] for a in applied), default=None)),
            used,
        )
        rows.append("".join(f"<td>{escape(str(cell))}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        "<section><h2>Every version</h2><p>Apply, pause and lag are those of the slower server.</p>"
        f'<div class="wide"><table class="figures"><tr>{head}</tr>{body}</table></div></section>'
    )


def _examples(versions: Sequence[Mapping[str, Any]]) -> str:
    found = [v for v in versions if v.get("example")]
    chosen = found if len(found) <= 8 else [found[k * (len(found) - 1) // 7] for k in range(8)]
    if not chosen:
        return ""
    rows = "".join(
        f"<tr><td>{v['step']}</td><td><code>{escape(v['example']['completion'])}</code></td>"
        f"<td><code>{escape(v['example']['answer'])}</code></td>"
        f"<td>{v['example']['reward']:.2f}</td></tr>"
        for v in chosen
    )
    return (
        "<section><h2>What it wrote</h2><p>The first completion of a few steps.</p>"
        '<div class="wide"><table><tr><th>step</th><th>completion</th><th>answer</th>'
        f"<th>reward</th></tr>{rows}</table></div></section>"
    )


def _how(plan: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    facts = {**plan, **{k: v for k, v in settings.items() if k != "recipe"}}
    items = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in facts.items()
    )
    return f"<section><h2>Settings</h2><dl>{items}</dl></section>"


def _maybe(value: Any, show: Any) -> str:
    return "…" if value is None else str(show(value))
