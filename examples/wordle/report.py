"""The run as one self-contained page, and as lines: pure functions of ``run.json``'s content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from thinwire.demo.table import percent, seconds, size
from wordle.facts import count, facts, held, logged, shown, times
from wordle.plots import began, figures
from wordle.proven import identical, proven

__all__ = ["render", "summary_lines"]

_SHOWN_GAMES = 6
_STYLE = """
.game { display: inline-block; vertical-align: top; width: 164px; margin: 0 14px 18px 0; }
.game > p { font-size: 13px; }
.word { display: flex; gap: 3px; margin-bottom: 3px; }
.word span { width: 26px; height: 26px; border-radius: 4px; color: #fff; background: #75797f;
  font-weight: 600; line-height: 26px; text-align: center; text-transform: uppercase; }
.word .G { background: #2c8a57; }
.word .Y { background: #b8891d; }
"""


def render(run: Mapping[str, Any]) -> str:
    """The HTML page.

    Args:
        run: what was written to ``run.json``, also after a trip through JSON.
    """
    f = facts(run)
    style = files("thinwire.demo").joinpath("report.css").read_text(encoding="utf-8") + _STYLE
    body = "".join(
        (
            _heading(run, f),
            _tiles(f),
            '<div class="charts">',
            *(figure.html() for figure in figures(run)),
            "</div>",
            _proof(run),
            _against_full(f),
            _happenings(run),
            _examples(run.get("games") or []),
            _versions(run),
            _settings(run),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>thinwire: Wordle, {escape(f['versions'])} versions</title>"
        f"<style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def summary_lines(run: Mapping[str, Any]) -> list[str]:
    """The totals and the proof, for a terminal."""
    f = facts(run)
    lines = [
        f"{f['versions']} versions, {f['games']} games played, {f['won']} won ({f['won_share']})",
        f"{f['trained']} games trained on, {f['dropped']} dropped as stale; when taken from the "
        f"queue, weights at most {f['staleness']} behind the trainer, one step before training",
        f"reward {f['reward_first']} in the first quarter, {f['reward_last']} in the last",
        f"shipped {f['shipped']} instead of {f['full']} in full checkpoints: {f['ratio']} times "
        "less",
        f"per version {f['payload']}, {f['changed']} of {f['parameters']} weights changed",
        f"a server held its requests for {f['mean_pause']} per version, {f['max_pause']} at most",
        f"{f['speed']} tokens per second of all servers; of a server {f['speed_before']} in the "
        f"second before it has moved to a version, pause included, {f['speed_after']} in the one "
        "after",
        f"{f['setup']} until the first version, {f['run']} from there",
    ]
    rows = proven(run.get("proof"))
    lines += [": ".join(part for part in row[:3] if part) for row in rows]
    return [*lines, _verdict(run)[0]]


def _verdict(run: Mapping[str, Any]) -> tuple[str, str, str]:
    """A word, what it means, and whether it is good, as the stylesheet calls it."""
    same = identical(run)
    if same is None:
        return "not proved", "The run ended before anything was compared.", "bad"
    if same:
        says = (
            "The weights inside both vLLM engines and both mirrors on disk equal the trainer's "
            "masters, cast by torch to bf16, in every bit."
        )
        return "bit-identical", says, "good"
    return "not bit-identical", "Some weights differ from the trainer's: see the proof.", "bad"


def _heading(run: Mapping[str, Any], f: Mapping[str, str]) -> str:
    verdict, says, kind = _verdict(run)
    what = (
        f"A Qwen3 with {f['parameters']} weights learned to play TextArena's Wordle, with TRL's "
        "AsyncGRPOTrainer. After every optimizer step the trainer published what had changed in "
        "bf16 to a bucket. Two vLLM servers followed it through that bucket alone and went on "
        f"with their games: {f['games']} in all."
    )
    return (
        f"<header><h1>thinwire: Wordle</h1><p>{escape(what)}</p>"
        f'<p class="verdict {kind}"><b>{verdict}</b> {escape(says)}</p></header>'
    )


def _tiles(f: Mapping[str, str]) -> str:
    tiles = (
        (f"{f['ratio']}×", "less than full checkpoints"),
        (f["payload"], f"per version, of {f['one_full']}"),
        (f["changed"], "of the weights change per version"),
        (f["mean_pause"], f"a server holds requests per version; {f['max_pause']} at most"),
        (f"{f['reward_first']} → {f['reward_last']}", "reward, first and last quarter"),
        (f["won_share"], f"of {f['games']} games won; {f['tool_failures']} tool calls failed"),
        (f["trained"], f"games trained on; {f['dropped']} dropped as stale"),
        (f["speed"], "tokens per second, all servers"),
        (
            f"{f['speed_before']} / {f['speed_after']}",
            "tokens per second of a server, in the second before it has moved to a version (the "
            "pause is in it) / in the second after",
        ),
        (
            f["staleness"],
            "versions behind the trainer, at most, when a game is taken from the queue; it is "
            "trained on one step later",
        ),
        (f["run"], f"from the first version on; {f['setup']} until then"),
    )
    cells = (f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return f'<section class="tiles">{"".join(cells)}</section>'


def _proof(run: Mapping[str, Any]) -> str:
    rows = proven(run.get("proof"))
    if not rows:
        return ""
    marks = {None: "", True: "good", False: "bad"}
    cells = (
        (escape(what), f"<code>{escape(found)}</code>", f'<b class="{marks[good]}">{verdict}</b>')
        for what, found, verdict, good in rows
    )
    title = f"Proof at version {run['proof']['version']}"
    return _section(title, "", _table(("what", "found", ""), cells))


def _against_full(f: Mapping[str, str]) -> str:
    rows = (
        ("a version, mean", f["one_full"], f["payload"], f["ratio"]),
        ("a version, largest", f["one_full"], f["largest_payload"], f["smallest_ratio"]),
        ("the run", f["full"], f["shipped"], f["ratio"]),
    )
    heads = ("bytes uploaded", "full checkpoints", "thinwire", "times less")
    says = "What the trainer uploads, against a whole bf16 checkpoint for every version."
    table = _table(heads, (map(escape, row) for row in rows), "figures")
    return _section("Against full checkpoints", says, table)


def _happenings(run: Mapping[str, Any]) -> str:
    found = run.get("happenings") or []
    if not found:
        return ""
    start = began(run)
    rows = ((f"{h['at'] - start:.0f} s", escape(str(h["what"]))) for h in found)
    says = "Seconds as in the plot of tokens per second."
    return _section("What was done to it", says, _table(("time", "what"), rows))


def _examples(games: Sequence[Mapping[str, Any]]) -> str:
    played = [game for game in games if game.get("guesses")]
    if not played:
        return ""
    if len(played) <= 2 * _SHOWN_GAMES:
        return _section("Games", "All of them.", "".join(map(_game, played)))
    first, last = played[:_SHOWN_GAMES], played[-_SHOWN_GAMES:]
    return _section(
        "Games",
        f"The first {_SHOWN_GAMES} of the run, and the last {_SHOWN_GAMES}.",
        f"<div>{''.join(map(_game, first))}</div><div>{''.join(map(_game, last))}</div>",
    )


def _game(game: Mapping[str, Any]) -> str:
    words = []
    for word, marks in zip(game["guesses"], game.get("feedback") or []):
        letters = (
            f'<span class="{mark if mark in ("G", "Y") else "X"}">{escape(letter)}</span>'
            for letter, mark in zip(str(word), str(marks).split())
        )
        words.append(f'<div class="word">{"".join(letters)}</div>')
    refused = f", {game['invalid']} refused" if game.get("invalid") else ""
    reward = shown(game.get("reward"), lambda r: f"{r:.2f}")
    says = f"{'won' if game.get('won') else 'lost'}{refused}, reward {reward}"
    return f'<div class="game">{"".join(words)}<p>{escape(says)}</p></div>'


def _versions(run: Mapping[str, Any]) -> str:
    versions = run.get("versions") or []
    servers = sorted({name for v in versions for name in v.get("arrivals") or {}})
    heads = (
        "version", "step", "reward", "entropy", "changed", "payload", "full /", "staleness",
        "calls", "failed", "publishing", *(f"pause, {name}" for name in servers),
    )  # fmt: skip
    logs = {
        name: logged(versions, name)
        for name in (
            "reward", "entropy", "thinwire/changed_share", "thinwire/payload_bytes",
            "sample/staleness_max", "tools/guess/call_total", "tools/guess/failure_total",
            "perf/weight_sync_s",
        )
    }  # fmt: skip
    rows = []
    for k, v in enumerate(versions):
        payload = logs["thinwire/payload_bytes"][k]
        arrivals = v.get("arrivals") or {}
        rows.append(
            (
                str(v["version"]),
                str(v["step"]),
                shown(logs["reward"][k], lambda r: f"{r:.3f}"),
                shown(logs["entropy"][k], lambda e: f"{e:.3f}"),
                percent(logs["thinwire/changed_share"][k]),
                shown(payload, size),
                times(run.get("full_bytes"), payload),
                count(logs["sample/staleness_max"][k]),
                count(logs["tools/guess/call_total"][k]),
                count(logs["tools/guess/failure_total"][k]),
                seconds(logs["perf/weight_sync_s"][k]),
                *(held((arrivals.get(name) or {}).get("paused_s")) for name in servers),
            )
        )
    table = _table(map(escape, heads), (map(escape, row) for row in rows), "figures")
    says = (
        "A step takes its games one batch ahead: reward and staleness of a row are those of the "
        "batch that the next step is trained on, and the first row's those of two batches. Calls "
        "are those that were made meanwhile."
    )
    return _section("Every version", says, table)


def _settings(run: Mapping[str, Any]) -> str:
    recipe = run.get("recipe") or {}
    groups = {"": recipe, "seed": run.get("seed"), "warm-up": run.get("warmup") or {}}
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in _flat("", groups)
    )
    return _section("Settings", "", f"<dl>{items}</dl>")


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, inner in value.items():
        yield from _flat(f"{prefix} {str(name).replace('_', ' ')}".strip(), inner)


def _section(title: str, says: str, content: str) -> str:
    told = f"<p>{escape(says)}</p>" if says else ""
    return f"<section><h2>{escape(title)}</h2>{told}{content}</section>"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """Of cells that are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'
