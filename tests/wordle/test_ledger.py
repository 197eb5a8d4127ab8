from __future__ import annotations

import json
from typing import Any

import pytest

from wordle.ledger import Ledger, Sample, totals
from wordle.speed import around, reading_s, tokens_between, tokens_per_s

SERVERS = {"http://a": "server-0", "http://b": "server-1"}


def step(version: int, at: float, **logs: float) -> dict[str, Any]:
    told = {
        "thinwire/version": version, "thinwire/publishes": 1, "thinwire/payload_bytes": 100,
        "thinwire/payload_bytes_total": 100, **logs,
    }  # fmt: skip
    return {"event": "step", "step": version, "time": at, "logs": told}


def arrival(url: str, version: int, paused: float | None = 0.1) -> dict[str, Any]:
    return {"url": url, "version": version, "paused_s": paused, "stage_s": 0.2}


def steady(rates: dict[str, float], seconds: int, start: float = 0.0) -> list[Sample]:
    return [
        Sample(start + second, server, rate * second)
        for second in range(seconds + 1)
        for server, rate in rates.items()
    ]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(SERVERS, full_bytes=1000)


def test_only_steps_with_a_version_are_rows(ledger: Ledger) -> None:
    ledger.step({"event": "begin", "step": 0, "time": 1.0, "resumed": False})
    ledger.step({"event": "step", "step": 1, "time": 2.0, "logs": {"reward": 1.0}})
    assert ledger.newest is None
    ledger.step(step(1, 3.0))
    ledger.step(step(2, 4.0))
    ledger.step({"event": "end", "step": 2, "time": 5.0, "version": 2})
    assert sorted(ledger.rows) == [1, 2]
    assert ledger.newest is ledger.rows[2]
    assert ledger.end is not None
    assert ledger.end["version"] == 2


def test_a_server_may_have_a_version_before_the_trainer_tells_of_it(ledger: Ledger) -> None:
    ledger.arrived(arrival("http://a", 1, 0.3), at=3.1)
    ledger.step(step(1, 3.0))
    ledger.arrived(arrival("http://b", 1, 0.5), at=3.2)
    row = ledger.rows[1]
    assert {name: a.at for name, a in row.arrivals.items()} == {"server-0": 3.1, "server-1": 3.2}
    assert row.worst_pause_s == 0.5


def test_a_restarted_follower_does_not_hide_a_pause(ledger: Ledger) -> None:
    ledger.step(step(1, 3.0))
    ledger.arrived(arrival("http://a", 1, 0.3), at=3.1)
    ledger.arrived(arrival("http://a", 1, None), at=60.0)
    assert ledger.rows[1].arrivals["server-0"].paused_s == 0.3
    assert ledger.rows[1].arrivals["server-0"].at == 3.1
    ledger.arrived(arrival("http://b", 1, None), at=3.2)
    ledger.arrived(arrival("http://b", 1, 0.4), at=3.3)
    assert ledger.rows[1].arrivals["server-1"].paused_s == 0.4


def test_totals(ledger: Ledger) -> None:
    for version in range(1, 9):
        ledger.step(step(version, float(version), reward=0.1 * version, **{
            "thinwire/changed_share": 0.01, "sample/staleness_max": version % 3,
            "tools/guess/failure_total": 2, "batch/samples_per_step": 15.9999996,
        }))  # fmt: skip
        ledger.arrived(arrival("http://a", version, 0.1), at=version + 0.5)
        ledger.arrived(arrival("http://b", version, 0.3), at=version + 0.5)
    ledger.games = [{"won": True, "guesses": ["a", "b"]}, {"won": False, "guesses": []}]
    t = totals(ledger)
    assert (t["versions"], t["publishes"], t["payload_bytes"]) == (9, 8, 800)
    assert (t["full_bytes"], t["ratio"]) == (8000, 10)
    assert t["mean_changed_share"] == pytest.approx(0.01)
    assert (t["mean_pause_s"], t["max_pause_s"]) == (pytest.approx(0.2), 0.3)
    assert (t["max_staleness"], t["tool_failures"]) == (2, 16)
    assert (t["reward_first"], t["reward_last"]) == (pytest.approx(0.15), pytest.approx(0.75))
    assert (t["games"], t["won"], t["guesses"]) == (2, 1, 2)
    assert (t["trained"], t["dropped"]) == (128, 0)


def test_totals_across_a_restart_of_the_trainer(ledger: Ledger) -> None:
    """A version that was lost before it was told of, one that takes over, two in a record."""
    ledger.step(step(1, 1.0, **{"thinwire/changed_share": 0.05}))
    for version, paused in ((1, 0.1), (2, 0.9), (3, None), (4, 0.2), (5, 0.4)):
        ledger.arrived(arrival("http://a", version, paused), at=version + 0.5)
    ledger.step(step(5, 5.0, **{
        "thinwire/publishes": 2, "thinwire/payload_bytes": 40, "thinwire/payload_bytes_total": 80,
        "thinwire/changed_share": 0.02, "sample/dropped_stale_total": 3.0,
    }))  # fmt: skip
    t = totals(ledger)
    assert (t["versions"], t["publishes"]) == (6, 3)
    assert (t["payload_bytes"], t["full_bytes"]) == (180, 3000)
    assert t["mean_changed_share"] == pytest.approx(0.03)
    assert (t["mean_pause_s"], t["max_pause_s"]) == (pytest.approx(0.4), 0.9)
    assert t["dropped"] == 3
    ledger.step({"event": "end", "step": 5, "time": 9.0, "version": 6})
    assert totals(ledger)["versions"] == 7  # published at the end, without a step


def test_totals_of_nothing(ledger: Ledger) -> None:
    t = totals(ledger)
    assert {k: v for k, v in t.items() if v} == {}
    json.dumps(ledger.to_json())


def test_what_was_not_published_does_not_dilute_the_mean(ledger: Ledger) -> None:
    ledger.step(step(1, 1.0, **{"thinwire/changed_share": 0.02}))
    ledger.step(step(2, 2.0, **{"thinwire/publishes": 0}))
    assert totals(ledger)["mean_changed_share"] == 0.02


def test_speed_before_and_after_moves(ledger: Ledger) -> None:
    """Each server at its own moments, also at a version without a row; loading one is no move."""
    ledger.step(step(1, 10.0))
    for url, version, paused, at in (
        ("http://a", 1, 0.1, 12), ("http://b", 1, 0.1, 18), ("http://a", 2, 0.1, 22),
        ("http://b", 2, None, 30),
    ):  # fmt: skip
        ledger.arrived(arrival(url, version, paused), at=at)
    tokens = dict.fromkeys(SERVERS.values(), 0.0)
    for half in range(81):
        at = half / 2
        for name, moved in (("server-0", (12, 22)), ("server-1", (18,))):
            if 10 < at <= 30:  # before and after, nothing is generated
                tokens[name] += 5 if any(m - 1 < at <= m for m in moved) else 20
            ledger.samples.append(Sample(at, name, tokens[name]))
    t = totals(ledger)
    assert (t["tokens_per_s_before"], t["tokens_per_s_after"]) == (10, 40)
    assert t["tokens_per_s"] == pytest.approx(80 - 3 * 30 / 20)


def test_a_server_that_is_down_generates_nothing(ledger: Ledger) -> None:
    ledger.step(step(1, 0.0))
    ledger.arrived(arrival("http://a", 1, None), at=10.0)
    for at in range(12):
        ledger.samples.append(Sample(at, "server-0", 400.0 * at))
    assert totals(ledger)["tokens_per_s"] == 400


def test_a_restart_is_no_negative_speed(ledger: Ledger) -> None:
    ledger.step(step(1, 0.0))
    ledger.arrived(arrival("http://a", 1, None), at=7.0)
    for at, tokens in ((0, 0), (1, 50), (2, 100), (6, 0), (7, 50)):
        ledger.samples.append(Sample(at, "server-0", tokens))
        ledger.samples.append(Sample(at, "server-1", 50 * at))
    assert totals(ledger)["tokens_per_s"] == pytest.approx((150 + 350) / 7)


def test_tokens_are_shared_out_between_edges() -> None:
    samples = steady({"server-0": 10, "server-1": 30}, 10)
    assert tokens_between(samples, [0, 1, 2.5, 10]) == pytest.approx([40, 60, 300])
    assert tokens_between(samples, [-5, 0, 20]) == pytest.approx([0, 400])
    assert tokens_between([], [0, 1]) == [0]


def test_tokens_after_a_restart_count_from_it() -> None:
    samples = [Sample(0, "a", 0), Sample(1, "a", 100), Sample(3, "a", 20), Sample(5, "a", 60)]
    assert tokens_between(samples, [0, 1, 2, 3, 4]) == pytest.approx([100, 0, 0, 20])


def test_a_speed_needs_readings_at_its_start() -> None:
    samples = steady({"server-0": 10}, 10, start=5)
    assert tokens_per_s(samples, 6, 8) == pytest.approx(10)
    assert tokens_per_s(samples, 14, 99) == pytest.approx(10)
    for start, end in ((0, 3), (4, 8), (15, 20), (8, 8)):
        assert tokens_per_s(samples, start, end) is None
    assert tokens_per_s([], 0, 1) is None


def test_speed_around_moments() -> None:
    samples = [Sample(0, "a", 0), Sample(5, "a", 0), Sample(6, "a", 50), Sample(20, "a", 750)]
    assert around(samples, [5], [-2, -1, 0, 1]) == [0, 0, 50]
    assert around(samples, [5, 12], [-2, 0, 2]) == [25, 50]
    assert around(samples, [1, 5, 19], [-2, 0, 2]) == [0, 50]
    assert around(samples, [], [-1, 0, 1]) == around([], [5], [-1, 0, 1]) == [None, None]


def test_how_often_counters_are_read() -> None:
    samples = steady({"a": 1, "b": 1}, 5)
    assert reading_s(samples) == 1
    assert reading_s(samples[:1]) is None
