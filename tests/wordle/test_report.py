from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from dataclasses import asdict
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from wordle import docs, markdown
from wordle.facts import facts
from wordle.figure import Figure
from wordle.ledger import Ledger, Sample, totals
from wordle.plots import figures, write_plots
from wordle.proven import proven
from wordle.recipe import QUICK
from wordle.report import render, summary_lines
from wordle.view import HEADERS, Display, cells

SERVERS = {"http://a": "server-0", "http://b": "server-1"}
BEGAN = 1_000.0
PROOF = {
    "bit_identical": True,
    "version": 12,
    "sha256": "5" * 64,
    "state_digest": "d" * 64,
    "commit": "d" * 64,
    "mirrors": dict.fromkeys(SERVERS.values(), "5" * 64),
    "engines": {
        name: {"version": 12, "exact": True, "tensors": 26, "differs": [], "not_compared": []}
        for name in SERVERS.values()
    },
}


def add_version(ledger: Ledger, version: int) -> None:
    at = BEGAN + 10 * version
    logs = {
        "thinwire/version": version,
        "thinwire/publishes": 1,
        "thinwire/payload_bytes": 1000 * version,
        "thinwire/payload_bytes_total": 1000 * version,
        "thinwire/payload_bytes_max": 1000 * version,
        "thinwire/changed_share": 0.01 * version,
        "thinwire/diff_s": 0.01,
        "thinwire/encode_s": 0.02,
        "thinwire/upload_s": 0.03,
        "thinwire/commit_s": 0.04,
        "reward": 0.05 * version,
        "entropy": 1.5,
        "sample/staleness_mean": 0.5,
        "sample/staleness_max": float(version % 3),
        "batch/samples_per_step": 15.9999,
        "sample/dropped_stale_total": 2.0,
        "tools/guess/call_total": 90.0,
        "tools/guess/failure_total": 1.0,
        "perf/rollout_wait_s": 4.0,
        "perf/fwd_bwd_s": 3.0,
        "perf/optimizer_s": 0.1,
        "perf/weight_sync_s": 0.2,
    }
    ledger.step({"event": "step", "step": version, "time": at, "logs": logs})
    for k, url in enumerate(SERVERS):
        event = {"url": url, "version": version, "paused_s": 0.01 + 0.01 * k, "stage_s": 0.3}
        ledger.arrived(event, at + 1 + k)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(SERVERS, full_bytes=1_000_000)
    for version in range(1, 13):
        add_version(ledger, version)
    for second in range(131):
        for server in SERVERS.values():
            ledger.samples.append(Sample(BEGAN + second, server, 50.0 * second))
    for k in range(40):
        marks = "G G G G G" if k % 5 == 4 else "G X Y X X"
        ledger.games.append(
            {
                "seed": k, "guesses": ["crane", f"wor{k:02d}"], "feedback": ["X X Y G X", marks],
                "won": k % 5 == 4, "invalid": k % 2, "reward": 0.95 if k % 5 == 4 else 0.15,
            }
        )  # fmt: skip
    ledger.happened("server-1 killed", BEGAN + 45)
    ledger.happened("server-1 started again", BEGAN + 48)
    return ledger


@pytest.fixture
def run(ledger: Ledger) -> dict[str, Any]:
    document = {
        "recipe": asdict(QUICK),
        "seed": 3,
        "warmup": {
            "steps": 150, "seconds": 20.0, "loss": 0.5, "valid_calls": 1.0, "parameters": 500_000
        },
        **ledger.to_json(),
        "totals": totals(ledger),
        "proof": PROOF,
        "seconds": {"setup": 30.0, "run": 120.0},
    }  # fmt: skip
    stored: dict[str, Any] = json.loads(json.dumps(document))
    return stored


@pytest.fixture
def empty() -> dict[str, Any]:
    ledger = Ledger(SERVERS, full_bytes=1_000_000)
    return {
        "recipe": asdict(QUICK), "warmup": {}, **ledger.to_json(), "totals": totals(ledger),
        "proof": None, "seconds": {"setup": 30.0, "run": 0.0},
    }  # fmt: skip


class Page(HTMLParser):
    """Elements, their text, and that those which need it are closed."""

    VOID = frozenset({"meta", "line", "circle", "polyline"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.classes: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.classes += [value or "" for name, value in attrs if name == "class"]
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def drawn(run: dict[str, Any]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(run)}


def values(figure: Figure) -> dict[str, list[float | None]]:
    return {series.name: list(series.values) for series in figure.series}


# --- the page ------------------------------------------------------------------------------


def test_the_page_is_whole_and_self_contained(run: dict[str, Any]) -> None:
    html = render(run)
    page = Page(html)
    assert page.seen.count("svg") == len(figures(run)) >= 12
    assert page.links == []
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r"\b(nan|NaN|inf|None)\b", html)
    assert "bit-identical" in page.text
    assert "154×" in page.text  # 12 MB over 78 kB
    assert "server-1 killed" in page.text
    assert "45 s" in page.text
    assert page.text.count("identical") == 6  # the verdict, the commit, two mirrors, two engines


def test_games_are_shown_with_their_marks(run: dict[str, Any]) -> None:
    page = Page(render(run))
    assert page.classes.count("game") == 12
    # A first word has one of each; the second five G or one; games 4 and 34 and 39 were won.
    assert page.classes.count("G") == 12 + 9 * 1 + 3 * 5
    assert page.classes.count("Y") == 12 + 9
    assert "won, reward 0.95" in page.text
    assert "lost, 1 refused, reward 0.15" in page.text
    run["games"] = run["games"][:3]
    assert Page(render(run)).classes.count("game") == 3


def test_markup_in_strings_is_text(run: dict[str, Any]) -> None:
    evil = "<script>x</script>&"
    run["happenings"][0]["what"] = evil
    run["recipe"]["name"] = evil
    run["recipe"][evil] = 1
    run["games"][0]["guesses"][0] = "<b>&'"
    run["games"][0]["feedback"][0] = "G <i> X X X"
    run["proof"]["sha256"] = evil
    run["proof"]["engines"]["server-0"]["differs"] = [evil]
    run["proof"]["mirrors"][evil] = evil
    for version in run["versions"]:
        version["arrivals"][evil] = version["arrivals"].pop("server-1")
    html = render(run)
    page = Page(html)
    assert "<script" not in html
    assert "<i>" not in html
    assert ">&lt;</span>" in html
    assert page.text.count(evil) >= 6
    for figure in figures(run):
        ElementTree.fromstring(figure.svg())
        assert "<script" not in figure.svg()


def test_a_run_that_went_wrong_says_so(run: dict[str, Any]) -> None:
    run["proof"]["bit_identical"] = False
    run["proof"]["mirrors"]["server-1"] = "0" * 64
    page = Page(render(run))
    assert "not bit-identical" in page.text
    assert page.text.count("DIFFERENT") == 1
    assert "bad" in page.classes
    assert summary_lines(run)[-1] == "not bit-identical"


@pytest.mark.parametrize(
    "answer", [{"version": 11}, {"exact": False}, {"differs": ["w"]}, {"not_compared": ["w"]}]
)
def test_an_engine_is_identical_only_in_every_respect(answer: dict[str, Any]) -> None:
    proof: dict[str, Any] = deepcopy(PROOF)
    assert [good for *_, good in proven(proof)] == [None, True, True, True, True, True]
    proof["engines"]["server-1"].update(answer)
    assert [good for *_, good in proven(proof)] == [None, True, True, True, True, False]
    proof["commit"] = "0" * 64
    assert [good for *_, good in proven(proof)] == [None, False, True, True, True, False]


def test_a_page_of_no_versions_claims_nothing(empty: dict[str, Any]) -> None:
    html = render(json.loads(json.dumps(empty)))
    page = Page(html)
    assert "not proved" in page.text
    assert page.seen.count("svg") == len(figures(empty))
    f = facts(empty)
    unknown = {name for name, text in f.items() if text == "…"}
    assert unknown == f.keys() - {
        "versions", "one_full", "games", "won", "guesses", "setup", "run"
    }  # fmt: skip
    assert summary_lines(empty)[-1] == "not proved"
    assert Page(render({})).seen.count("svg") == len(figures({}))


def test_missing_values_are_gaps(run: dict[str, Any]) -> None:
    for version in run["versions"][4:]:
        version["logs"] = {"thinwire/version": version["version"], "reward": math.nan}
        version["arrivals"] = {"server-0": {"paused_s": None, "stage_s": None, "at": 1.0}}
    run["games"][0] = {"won": False, "guesses": []}
    run["games"][1] = {"won": True, "guesses": ["crane"]}
    html = render(run)
    page = Page(html)
    assert not re.search(r"\b(nan|NaN|inf|None)\b", html)
    assert page.text.count("…") > 8 * 8
    assert values(drawn(run)["reward"])["step"][3:5] == [0.2, None]
    assert values(drawn(run)["pause"])["server-0"][3:5] == [0.01, None]
    for figure in figures(run):
        ElementTree.fromstring(figure.svg())


# --- figures -------------------------------------------------------------------------------


def test_figures_hold_the_ledgers_numbers(run: dict[str, Any]) -> None:
    found = drawn(run)
    assert values(found["payload"])["payload"] == [1000.0 * v for v in range(1, 13)]
    assert values(found["reward"])["mean of 3 steps"][-1] == pytest.approx(0.55)
    assert values(found["pause"]) == {"server-0": [0.01] * 12, "server-1": [0.02] * 12}
    assert values(found["lag"]) == {"server-0": [1.0] * 12, "server-1": [2.0] * 12}
    assert values(found["publishing"])["upload"] == [30.0] * 12
    assert values(found["time"])["waiting for games"] == [4.0] * 12
    assert values(found["won"])["won"] == [1 / 8, 2 / 8, 1 / 8, 2 / 8, 2 / 8]
    assert found["won"].xs == [8, 16, 24, 32, 40]


def test_tokens_per_second_over_time_and_around_versions(run: dict[str, Any]) -> None:
    found = drawn(run)
    tokens = values(found["tokens"])
    assert tokens["both servers"] == pytest.approx([100.0] * 65)
    marked = tokens["something was killed or restarted"]
    assert [k for k, value in enumerate(marked) if value is not None] == [22, 24]
    assert values(found["moving"]) == dict.fromkeys(SERVERS.values(), pytest.approx([50.0] * 12))


def test_a_pause_is_seen_where_it_is(run: dict[str, Any]) -> None:
    """Nothing is generated for the second before a server has moved."""
    moved = {
        name: {v["arrivals"][name]["at"] for v in run["versions"]} for name in SERVERS.values()
    }
    total = dict.fromkeys(SERVERS.values(), 0.0)
    for sample in run["samples"]:
        total[sample["server"]] += 0.0 if sample["at"] in moved[sample["server"]] else 50.0
        sample["tokens"] = total[sample["server"]]
    found = drawn(run)["moving"]
    assert found.xs[4:6] == [-1000, -500]
    for around in values(found).values():
        assert around == pytest.approx([*[50.0] * 4, 0.0, 0.0, *[50.0] * 6])


def test_plots_are_files_that_need_nothing_around_them(run: dict[str, Any], tmp_path: Path) -> None:
    written = write_plots(run, tmp_path / "wordle")
    assert {path.stem for path in written} == {
        "reward", "won", "changed", "payload", "pause", "staleness", "tokens", "moving"
    }  # fmt: skip
    for path in written:
        text = path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme: dark" in text
        assert "hover" not in text
        style = text[text.index("<style>") : text.index("</style>")]
        used = {c for name in re.findall(r'class="([^"]+)"', text) for c in name.split()}
        assert {name for name in used if not re.search(rf"\.{name}\b", style)} == set()
        assert "width: 100%" not in style
        colours = set(re.findall(r"var\((--\w+)\)", style))
        assert {name for name in colours if style.count(f"{name}:") != 2} == set()


# --- documentation -------------------------------------------------------------------------


def test_the_documentation_is_rewritten(run: dict[str, Any], tmp_path: Path) -> None:
    page, stored = tmp_path / "wordle.md", tmp_path / "run.json"
    stored.write_text(json.dumps(run))
    page.write_text("a\n<!-- begin run -->\nold\n<!-- end run -->\nb\n<!-- begin sync -->\n"
                    "<!-- end sync -->\nc\n")  # fmt: skip
    docs.main([str(stored), str(page)])
    text = page.read_text()
    assert "\nold\n" not in text
    assert "| reward in the last quarter | 0.550 |" in text
    assert "| versions published | 13 |" in text  # version 0 is one
    assert "| games trained on | 192 |\n| games dropped as stale | 24 |" in text
    assert "| the run | 12 MB | 78 kB | 154 |" in text
    assert "| a version, largest | 1 MB | 12 kB | 83 |" in text
    assert re.findall(r"^\w$", text, re.M) == ["a", "b", "c"]
    assert len(list((tmp_path / "wordle").glob("*.svg"))) == 8
    docs.main([str(stored), str(page)])
    assert page.read_text() == text


@pytest.mark.parametrize(
    "page",
    ["nothing", "<!-- begin x -->\n<!-- end x -->", "<!-- begin run -->\n",
     "<!-- begin run -->\n<!-- end run -->\n<!-- begin run -->\n<!-- end run -->\n"],
)  # fmt: skip
def test_a_page_with_other_places_is_refused(run: dict[str, Any], page: str) -> None:
    with pytest.raises(ValueError, match="place"):
        markdown.insert(page, docs.tables(run))


def test_places_for_other_parts_are_left_alone() -> None:
    page = "<!-- begin a -->\nold\n<!-- end a -->\n<!-- begin b -->\nold\n<!-- end b -->\n"
    made = markdown.insert(page, {"a": "new", "c": "new"})
    assert made == page.replace("old", "new", 1)


def test_what_is_inserted_is_taken_as_it_is() -> None:
    made = markdown.insert("<!-- begin a -->\n<!-- end a -->", {"a": r"\1 \g<0> \n"})
    assert made == "<!-- begin a -->\n\\1 \\g<0> \\n\n<!-- end a -->"


def test_tables_of_nothing(empty: dict[str, Any]) -> None:
    assert all(text.startswith("|") for text in docs.tables(empty).values())


# --- the terminal --------------------------------------------------------------------------


def test_lines_for_people(run: dict[str, Any]) -> None:
    said = "\n".join(summary_lines(run))
    assert "shipped 78 kB instead of 12 MB in full checkpoints: 154 times less" in said
    assert "40 games played, 8 won (20.0 %)" in said
    assert "15.0 ms per version, 20.0 ms at most" in said
    assert "192 games trained on, 24 dropped as stale" in said
    assert "100 tokens per second of all servers; of a server 50 in the second before" in said
    assert "pause included, 50 in the one after" in said
    assert "30 s until the first version, 120 s from there" in said
    assert said.endswith("\nbit-identical")
    assert "DIFFERENT" not in said


def test_a_row_and_what_is_not_known_of_it(ledger: Ledger) -> None:
    row = dict(zip(HEADERS, cells(ledger, ledger.rows[4], "3/20", 99.6), strict=True))
    assert row == {
        "ver": "4", "step": "4", "reward": "0.200", "won": "3/20", "changed": "4.00 %",
        "payload": "4 kB", "full/": "250x", "pause": "20.0 ms", "stale": "0.5, 1", "tok/s": "100",
    }  # fmt: skip
    ledger.step({"event": "step", "step": 13, "time": 2e3, "logs": {"thinwire/version": 13}})
    assert cells(ledger, ledger.rows[13])[2:] == ["…"] * 8


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_is_shown(ledger: Ledger, terminal: bool) -> None:
    out = StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=100, height=12, highlight=False, markup=False
    )
    with Display(ledger, console) as display:
        display.say("[b]begins[/b]")
        display.status("vLLM starts")
        display.refresh()
        display.say("server-1 killed", "run")
        display.status("step 8 of 8")
        display.refresh()
    text = out.getvalue()
    assert "[b]begins[/b]" in text
    for header in HEADERS:
        assert header in text
    for version in range(1, 13):
        assert f"{0.05 * version:.3f}" in text
    assert ("last: server-1 killed" in text) == terminal
    if not terminal:
        assert text.count("0.550") == 1


def test_all_is_on_stderr_and_taken_as_it_is(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    with Display(ledger) as display:
        display.say("[b]begins[/b]", "run")
    told = capsys.readouterr()
    assert told.out == ""
    assert "run      [b]begins[/b]\n" in told.err
    assert "0.600" in told.err


def test_lines_come_once_and_when_a_version_is_served_or_followed(ledger: Ledger) -> None:
    out = StringIO()
    live = Ledger(SERVERS, full_bytes=1_000_000)
    with Display(live, Console(file=out, width=100, markup=False)) as display:
        display.status("vLLM starts")
        logs = {"thinwire/version": 1, "reward": 0.111}
        live.step({"event": "step", "step": 1, "time": 1.0, "logs": logs})
        live.games += ledger.games[:10]
        display.refresh()
        assert "0.111" not in out.getvalue()
        logs = {"thinwire/version": 2, "reward": 0.222}
        live.step({"event": "step", "step": 2, "time": 2.0, "logs": logs})
        live.games += ledger.games[10:15]
        display.refresh()
        display.refresh()
        assert "0.222" not in out.getvalue()
        for url in SERVERS:
            live.arrived({"url": url, "version": 2, "paused_s": 0.1, "stage_s": 0.1}, 2.5)
        display.refresh()
        display.status("step 2 of 3")
        logs = {"thinwire/version": 3, "reward": 0.333}
        live.step({"event": "step", "step": 3, "time": 3.0, "logs": logs})
        display.refresh()
        assert "0.333" not in out.getvalue()
    lines = out.getvalue().splitlines()
    assert "vLLM starts" in lines[0]
    assert lines[1].split() == list(HEADERS)
    assert [line.split()[:4] for line in lines[2:]] == [
        ["1", "1", "0.111", "2/10"],
        ["2", "2", "0.222", "1/5"],
        ["3", "3", "0.333", "…"],
    ]
