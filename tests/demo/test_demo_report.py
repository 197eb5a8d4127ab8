from __future__ import annotations

import json
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from thinwire.demo.charts import Baseline, Series, bars, lines, ticks
from thinwire.demo.display import Display
from thinwire.demo.events import Applied, Finished, Plan, Published, Ready, Stepped, decode, encode
from thinwire.demo.ledger import Ledger, totals
from thinwire.demo.report import render
from thinwire.demo.run import prove
from thinwire.demo.table import HEADERS, WIDTHS, cells, percent, proof_lines, size, summary_lines

SERVERS = ("server-0", "server-1")
PLAN = Plan("a model", "a task", 1000, 4, 2000, 8, 2, 4, 1e-5, "a, b", 0.1, False)


def stepped(step: int) -> Stepped:
    return Stepped(
        step=step,
        reward=0.1 * step,
        loss=0.0,
        grad_norm=1.0,
        ratio_mean=1.0,
        clipped_share=0.0,
        groups_used=2,
        tokens=20,
        used={str(max(0, step - 2)): 8},
        staleness=min(1, step - 1),
        dropped=0,
        wait_s=0.5,
        train_s=1.5,
        sample_s={"server-0": 0.4, "server-1": 0.5},
        example={"prompt": "p", "answer": "<a>", "completion": "<script>x</script>", "reward": 0.5},
    )


def published(version: int) -> Published:
    return Published(version, version, 10, 1000, 3, 80, 900, 2000, 0.1, 0.2, 0.3, 0.4, 1e9)


def applied(version: int, pause: float) -> Applied:
    return Applied(version, 5.0, 0.0, pause, 300.0, 0.1, 0.1, 0.1, 0.1, 80, 0.01 * version, 10.0)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(SERVERS)
    ledger.add("trainer", PLAN)
    for k, server in enumerate(SERVERS):
        ledger.add(server, Ready(f"http://127.0.0.1:{k}", 0, 1.0))
        ledger.add(server, applied(0, 9.0))
    for version in range(1, 9):
        assert ledger.add("trainer", stepped(version)) is None
        assert ledger.add("server-0", applied(version, 1.0)) is None
        assert ledger.add("trainer", published(version)) is None
        row = ledger.add("server-1", applied(version, 2.0))
        assert row is not None
        assert row.version == version
    return ledger


@pytest.fixture
def run(ledger: Ledger) -> dict[str, Any]:
    answer = {
        "weight_version": 8,
        "state_digest": "d" * 64,
        "sha256": "5" * 64,
        "paused_s": 0.08,
        "up_s": 10.0,
    }
    live = dict.fromkeys(SERVERS, answer)
    proof = prove(Finished(8, "d" * 64, "5" * 64, 4, 1000), live, dict.fromkeys(SERVERS, "5" * 64))
    document = {
        "bit_identical": proof["bit_identical"],
        "versions": [row.to_json() for row in ledger.rows.values()],
        "totals": totals(ledger, wall_s=60.0, setup_s=20.0, servers=live),
        "proof": proof,
        "plan": json.loads(encode(PLAN)),
        "settings": {"seed": 0},
        "servers": live,
    }
    stored: dict[str, Any] = json.loads(json.dumps(document))
    return stored


@pytest.mark.parametrize("event", [PLAN, stepped(2), published(2), applied(2, 1.0)])
def test_events_survive_the_pipe(event: Any) -> None:
    assert decode(encode(event)) == event


@pytest.mark.parametrize("line", ["", "x", "[]", "{}", '{"event": "Nope"}', '{"event": "Ready"}'])
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not an event"):
        decode(line)


def test_totals(run: dict[str, Any]) -> None:
    t = run["totals"]
    assert (t["versions"], t["steps"], t["completions"], t["versions_used"]) == (8, 8, 64, 7)
    assert (t["payload_bytes"], t["full_bytes"], t["ratio"]) == (640, 16000, 25)
    assert t["first_quarter_reward"] == pytest.approx(0.15)
    assert t["last_quarter_reward"] == pytest.approx(0.75)
    assert t["mean_publish_s"] == pytest.approx(1.0)
    assert (t["mean_pause_ms"], t["max_pause_ms"]) == (1.5, 2.0)
    assert t["paused_share"] == pytest.approx(0.008)
    assert t["bytes_per_change"] == 8


def test_totals_of_a_run_that_never_stepped() -> None:
    assert totals(Ledger(SERVERS), wall_s=1.0, setup_s=1.0, servers={})["versions"] == 0


def test_a_row_shows_the_worst_server_and_what_is_pending(ledger: Ledger) -> None:
    row = dict(zip(HEADERS, cells(ledger, ledger.rows[8]), strict=True))
    assert (row["ver"], row["reward"], row["changed"]) == ("8", "0.800", "1.00 %")
    assert (row["payload"], row["full/"], row["publish"]) == ("80 B", "25x", "1.00 s")
    assert (row["apply"], row["pause"]) == ("5.0 ms", "2.0 ms")
    assert (row["used"], row["blocked"]) == ("6", "0.80 %")
    assert len(WIDTHS) == len(HEADERS)
    ledger.add("trainer", stepped(9))
    assert cells(ledger, ledger.rows[9])[3:] == (*["…"] * 6, "7", "…")


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (6_123_456, "6.12 MB")])
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_small_and_large_shares() -> None:
    assert (percent(0.00345), percent(0.123), percent(None)) == ("0.34 %", "12.3 %", "…")


def test_lines_for_people(run: dict[str, Any]) -> None:
    said = "\n".join(summary_lines(run["totals"]) + proof_lines(run["proof"]))
    assert "25 times less" in said
    assert said.count("identical") == 4
    assert "DIFFERENT" not in said


@pytest.mark.parametrize("where", ["version", "state_digest", "sha256", "mirror"])
def test_any_difference_is_found(run: dict[str, Any], where: str) -> None:
    finished = Finished(8, "d" * 64, "5" * 64, 4, 1000)
    live = {name: dict(answer) for name, answer in run["servers"].items()}
    mirrors = dict.fromkeys(SERVERS, "5" * 64)
    if where == "mirror":
        mirrors["server-1"] = "6" * 64
    elif where == "version":
        live["server-1"]["weight_version"] = 7
    else:
        live["server-1"][where] = "6" * 64
    assert prove(finished, live, mirrors)["bit_identical"] is False
    assert prove(finished, {"server-0": run["servers"]["server-0"]}, mirrors)["bit_identical"] is (
        False
    )


class Page(HTMLParser):
    """Counts elements, and checks that those that need it are closed."""

    VOID = frozenset({"meta", "line", "rect", "circle", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(page: str) -> Page:
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_the_page_is_whole_and_self_contained(run: dict[str, Any]) -> None:
    page = render(run)
    parser = read(page)
    assert parser.seen.count("svg") == 8
    assert parser.links == []
    assert "url(" not in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert "NaN" not in page
    assert ">bit-identical<" in page


def test_the_page_of_a_run_that_went_wrong(run: dict[str, Any]) -> None:
    run["bit_identical"] = False
    run["proof"]["servers"]["server-1"]["mirror_sha256"] = "0" * 64
    for version in run["versions"][3:]:
        for name in ("reward", "payload_bytes", "example", "used"):
            version.pop(name)
        version["servers"] = {}
    page = render(run)
    read(page)
    assert "not bit-identical" in page
    assert 'class="bad">different' in page


def test_the_page_of_a_run_without_versions(run: dict[str, Any]) -> None:
    read(render({**run, "versions": [], "plan": None}))


@pytest.mark.parametrize("high", [0.0, 1e-9, 0.37, 1.0, 6.0, 999.0, 2.7e8, float("nan")])
def test_ticks_are_round_and_reach_the_top(high: float) -> None:
    grid = ticks(high)
    assert 2 <= len(grid) <= 6
    assert grid[0] == 0
    assert not grid[-1] < high


def test_charts_of_one_point_and_of_none() -> None:
    for xs in ([], [1]):
        one = [Series("a", [2.0] * len(xs)), Series("b", [None] * len(xs), 2)]
        read(lines(xs, one, str, baseline=Baseline("c", 1.0)))
        read(bars(xs, one, str))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_is_shown(ledger: Ledger, terminal: bool) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, height=12, markup=False)
    with Display(ledger, console) as display:
        display.say("begins", "trainer")
        display.status("step 8 of 8")
        for row in ledger.rows.values():
            display.completed(row)
    text = out.getvalue()
    assert "begins" in text
    for header in HEADERS:
        assert header in text
    for version in range(1, 9):
        assert f"0.{version}00" in text
