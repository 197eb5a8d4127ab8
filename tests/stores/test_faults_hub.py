"""Faults on the way to a Hub, and of the Hub itself, at each point of a run (see ``_matrix``).

The clients are the real ones, huggingface_hub and hf_xet, and obstore for the S3 gateway.
"""

from __future__ import annotations

import itertools
import json
import urllib.parse
from collections.abc import Iterator, Mapping

import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("hf_xet")

from servers.hub.process import HubProcess
from servers.proxy import FaultyProxy
from stores._matrix import CODEC, SHORT, Point, Tale, cells, faults
from stores._runs import State, check_history, held, hub_settings, series, start
from thinwire import Publisher, Replica
from thinwire.bucket import hub as hub_module
from thinwire.bucket import open_bucket
from thinwire.errors import AccessDenied
from thinwire.log import keys
from thinwire.mirror import MemoryMirror

TOKEN = "hf_faults"
EXPIRED = json.dumps({"error": "Invalid credentials in Authorization header"}).encode()
COLUMNS = faults(401, EXPIRED)
# Every request costs more here than on S3: what teaches nothing new beside another is left out.
for left_out in ("503", "late", "slow", "body empty", "first byte wrong", "resets from here on"):
    del COLUMNS[left_out]

MISREAD = frozenset({"HistoryRewritten"})  # of a listing, which tells of holes
WRONG_TOKEN = frozenset({"AccessDenied"})
# hf_xet tries again by itself before an error comes out, and a record is tried four times
XET_RETRIES_S = 6.0
SLOW = frozenset({"429, Retry-After 60", "responses lost from here on"})
LISTING = "/api/*/tree*"
TOKENS = "/api/*/xet-write-token"


def name(act: str, folder: str, **how: frozenset[str]) -> Point:
    """The batch that gives a content its name under ``folder``: then it is there."""
    return Point(act, "write", "POST", "/api/*/batch", holding=folder.encode(), **how)  # type: ignore[arg-type]


def content(act: str, folder: str) -> Point:
    """The second half of a read: where the Hub has sent the reader on to."""
    return Point(act, "read", "GET", f"/content/*{folder}*")  # type: ignore[arg-type]


POINTS: Mapping[str, Point] = {
    "start: look for a run": Point("start", "probe", "GET", "*/resolve/*run.json"),
    "start: token": Point("start", "read", "GET", TOKENS, others=WRONG_TOKEN),
    "start: content": Point("start", "write", "POST", "/v1/xorbs/*", without=SLOW),
    "start: shard": Point("start", "write", "POST", "/v2/shards", without=SLOW),
    "start: run record": name("start", "run.json"),
    "start: anchor": name("start", "anchors/"),
    "start: version 0": name("start", "commits/"),
    "publish: content": Point("publish", "write", "POST", "/v1/xorbs/*"),
    "publish: shard": Point("publish", "write", "POST", "/v2/shards"),
    "publish: payload": name("publish", "deltas/"),
    "publish: payload's size": Point("publish", "probe", "HEAD", "*/resolve/*deltas*"),
    "publish: find last commit": Point("publish", "probe", "GET", "*/resolve/*commits*"),
    "publish: last commit": content("publish", "commits"),
    "publish: commit": name("publish", "commits/"),
    "take over: run record": content("take over", "run.json"),
    "take over: head": Point("take over", "probe", "HEAD", "*/resolve/*commits*"),
    "take over: listing": Point("take over", "read", "GET", LISTING, others=MISREAD),
    "take over: fence": name("take over", "commits/"),
    "follow: head": Point("follow", "probe", "HEAD", "*/resolve/*commits*"),
    "follow: commit": content("follow", "commits"),
    "follow: payload": content("follow", "deltas"),
    "pull: listing": Point("pull", "read", "GET", LISTING, others=MISREAD),
    "pull: anchor": content("pull", "anchors"),
    "pull: payload": content("pull", "deltas"),
}

GATEWAY_POINTS: Mapping[str, Point] = {
    "start: version 0": Point("start", "write", "PUT", "/s3/*/commits/*"),
    "publish: payload": Point("publish", "write", "PUT", "/s3/*/deltas/*"),
    "publish: commit": Point("publish", "write", "PUT", "/s3/*/commits/*"),
    "take over: fence": Point("take over", "write", "PUT", "/s3/*/commits/*"),
}

XET_POINTS: Mapping[str, Point] = {
    "pull: reconstruction": Point("pull", "read", "GET", "/v2/reconstructions/*"),
    "pull: content": Point("pull", "read", "GET", "/xorbs/*"),
}


@pytest.fixture(scope="module", autouse=True)
def _settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with hub_settings(tmp_path_factory.mktemp("hf-home"), TOKEN):
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """Short pages, so that listings have several."""
    options = ("--token", f"{TOKEN}=me", "--page", "5")
    with HubProcess(tmp_path_factory.mktemp("hub"), *options) as hub:
        yield hub


class Bench:
    """A Hub, reached directly and through a proxy; a new bucket each time."""

    numbers = itertools.count()

    def __init__(self, hub: HubProcess, proxy: FaultyProxy) -> None:
        self.hub, self.proxy = hub, proxy

    def tale(self, deadline: float, *, gateway: bool = False) -> Tale:
        number = next(self.numbers)
        place = f"hf://buckets/me/faults-{number}/run"
        create = f"&create=s3&gateway={self.proxy.url}/s3" if gateway else ""
        through = open_bucket(f"{place}?endpoint={self.proxy.url}{create}", deadline=deadline)
        direct = open_bucket(f"{place}?endpoint={self.hub.url}")
        # other weights each time: Xet would not upload again what it has seen
        return Tale(self.proxy.heal(), through, direct, series(5, seed=10 * number))


@pytest.fixture(scope="module")
def benches(running: HubProcess) -> Iterator[Bench]:
    address = urllib.parse.urlsplit(running.url)
    with FaultyProxy(str(address.hostname), int(address.port or 80)) as proxy:
        yield Bench(running, proxy)


@pytest.fixture
def bench(benches: Bench) -> Iterator[Bench]:
    benches.hub.heal()
    yield benches
    benches.hub.heal()


def check(tale: Tale, points: Mapping[str, Point], point: str, fault: str) -> None:
    at, how = points[point], COLUMNS[fault]
    outcome = tale.tell(at, how)
    print(f"cell: {point} | {fault} | {outcome} | {tale.watched.seconds:.2f} s")  # for pytest -rP
    assert tale.watched.kinds <= at.allows(fault, how)
    assert tale.watched.seconds < how.limit + XET_RETRIES_S


@pytest.mark.parametrize(("point", "fault"), cells(POINTS, COLUMNS))
def test_a_fault_at_a_point(bench: Bench, point: str, fault: str) -> None:
    check(bench.tale(COLUMNS[fault].deadline), POINTS, point, fault)


@pytest.mark.parametrize(("point", "fault"), cells(GATEWAY_POINTS, COLUMNS))
def test_a_fault_on_the_way_to_the_gateway(bench: Bench, point: str, fault: str) -> None:
    tale = bench.tale(COLUMNS[fault].deadline, gateway=True)
    check(tale, GATEWAY_POINTS, point, fault)


@pytest.mark.parametrize(("point", "fault"), cells(XET_POINTS, COLUMNS))
def test_a_fault_of_reading_through_xet(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, point: str, fault: str
) -> None:
    monkeypatch.setattr(hub_module, "SMALL", 64)  # as large payloads are read
    check(bench.tale(COLUMNS[fault].deadline), XET_POINTS, point, fault)


# --- faults of the Hub itself ------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["deltas/", "commits/"])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_batch_that_fails_behind_a_good_status(bench: Bench, folder: str, times: int) -> None:
    tale = bench.tale(8.0 if times == 1 else SHORT)
    states, third = tale.states, tale.states[2]
    publisher = start(tale.through, *states[:2], codec=CODEC)
    if folder == "deltas/":
        path = f"run/{payload_key(tale, publisher, third)}"
    else:
        path = f"run/{keys.commit_key(2)}"
    bench.hub.faults(fail_batch={path: times})
    tale.watched.call(publisher.publish(third.source).result)
    assert bench.hub.faults()["fail_batch"][path] < times
    if times == 1:
        assert tale.watched.outcome == "unnoticed"
    else:
        expected = "BucketUnavailable" if folder == "deltas/" else "CommitUnresolved"
        assert tale.watched.outcome == expected
        assert publisher.version == 1
    bench.hub.heal()
    publisher.publish(states[3].source).result()
    order = check_history(tale.direct, states)
    # a payload that could not be had is forgotten; an open commit is settled first
    assert order == ([0, 1, 3] if times > 1 and folder == "deltas/" else [0, 1, 2, 3])


def payload_key(tale: Tale, publisher: Publisher, state: State) -> str:
    """What this publish's payload will be called: by its content, so it is the same each time."""
    tale.proxy.answer(401, "GET", "*/resolve/*commits*", body=EXPIRED)  # between payload and commit
    with pytest.raises(AccessDenied):
        publisher.publish(state.source).result()
    (key,) = (info.key for info in tale.direct.list("deltas/0000000002"))
    tale.direct.delete(key)
    return key


def test_listings_that_are_behind(bench: Bench) -> None:
    tale = bench.tale(8.0)
    states = tale.states
    start(tale.through, *states[:3]).close()
    bench.hub.faults(stale_listings=1)
    mirror = MemoryMirror()
    Replica(tale.through, mirror).sync()
    assert bench.hub.faults()["stale_listings"] == 0
    assert held(mirror) == states[2].raw
    bench.hub.faults(stale_listings=1)
    with Publisher(tale.through, states[2].source) as heir:
        assert bench.hub.faults()["stale_listings"] == 0
        assert heir.version == 3
        heir.publish(states[3].source).result()
    assert check_history(tale.direct, states) == [0, 1, 2, 2, 3]


def test_tokens_of_the_store_that_end_in_the_middle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "SMALL", 64)  # so that readers use such tokens as well
    tale = bench.tale(8.0)
    states = tale.states
    mirror = MemoryMirror()
    replica = Replica(tale.through, mirror)
    with Publisher(tale.through, states[0].source) as publisher:
        for state in states[1:]:
            bench.hub.faults(expire_tokens=True)
            publisher.publish(state.source).result()
            bench.hub.faults(expire_tokens=True)
            replica.sync()
            assert held(mirror) == state.raw
    assert check_history(tale.direct, states) == [0, 1, 2, 3, 4]


def test_xet_bytes_that_are_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tale = bench.tale(SHORT)
    states = tale.states
    start(tale.through, *states[:2]).close()
    monkeypatch.setattr(hub_module, "SMALL", 64)
    bench.hub.faults(corrupt_xorbs=1000)
    mirror = MemoryMirror()
    tale.watched.call(Replica(tale.through, mirror).sync)
    assert tale.watched.kinds <= {"BucketUnavailable", "CorruptPayload"}
    assert bench.hub.faults()["corrupt_xorbs"] < 1000
    bench.hub.heal()
    Replica(tale.through, mirror).sync()
    assert held(mirror) == states[1].raw


@pytest.mark.parametrize(("times", "outcome"), [(1, "unnoticed"), (1000, "BucketUnavailable")])
def test_contents_that_lack_their_last_byte(bench: Bench, times: int, outcome: str) -> None:
    tale = bench.tale(8.0 if times == 1 else SHORT)
    states = tale.states
    start(tale.through, *states[:2]).close()
    bench.hub.faults(short_reads=times)
    mirror = MemoryMirror()
    tale.watched.call(Replica(tale.through, mirror).sync)
    assert tale.watched.outcome == outcome
    assert bench.hub.faults()["short_reads"] < times
    bench.hub.heal()
    Replica(tale.through, mirror).sync()
    assert held(mirror) == states[1].raw
