"""Faults on the way to a real S3 server: each at each point of a whole run (see ``_matrix``)."""

from __future__ import annotations

import itertools
import threading
import urllib.parse
from collections.abc import Iterator, Mapping

import pytest

from servers.proxy import FaultyProxy
from servers.seaweed import SeaweedServer
from stores._matrix import LASTING, NEVER_MIND, SHORT, Fault, Point, Tale, cells, faults
from stores._runs import series
from thinwire.bucket import _objects_stores, open_bucket
from thinwire.errors import BucketUnavailable

EXPIRED = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
)
COLUMNS = faults(403, EXPIRED)
# The client does not tell of Retry-After, so that is a failure like any other.
for left_out in ("503", "first byte wrong", "429, Retry-After 60"):
    del COLUMNS[left_out]
LISTING = "*list-type=2*"
# a listing tells of holes: one whose keys are spoiled may show one, or keys nobody can read
MISREAD = frozenset({"HistoryRewritten"})

POINTS: Mapping[str, Point] = {
    "start: look for a run": Point("start", "probe", "GET", "*/run.json"),
    "start: run record": Point("start", "write", "PUT", "*/run.json"),
    "start: anchor": Point("start", "write", "PUT", "*/anchors/*/model*.safetensors*"),
    "start: manifest": Point("start", "write", "PUT", "*/anchors/*manifest*"),
    "start: version 0": Point("start", "write", "PUT", "*/commits/*"),
    "publish: payload": Point("publish", "write", "PUT", "*/deltas/*"),
    "publish: payload's size": Point("publish", "probe", "HEAD", "*/deltas/*"),
    "publish: last commit": Point("publish", "read", "GET", "*/commits/*"),
    "publish: commit": Point("publish", "write", "PUT", "*/commits/*"),
    "take over: run record": Point("take over", "read", "GET", "*/run.json"),
    "take over: head": Point("take over", "probe", "HEAD", "*/commits/*"),
    "take over: listing": Point("take over", "read", "GET", LISTING, others=MISREAD),
    "take over: fence": Point("take over", "write", "PUT", "*/commits/*"),
    "follow: head": Point("follow", "probe", "HEAD", "*/commits/*"),
    "follow: commit": Point("follow", "read", "GET", "*/commits/*"),
    "follow: payload": Point("follow", "read", "GET", "*/deltas/*"),
    "pull: run record": Point("pull", "read", "GET", "*/run.json"),
    "pull: listing": Point("pull", "read", "GET", LISTING, others=MISREAD),
    "pull: anchor": Point("pull", "read", "GET", "*/anchors/*"),
    "pull: payload": Point("pull", "read", "GET", "*/deltas/*"),
}


@pytest.fixture(autouse=True)
def _environment(seaweed: SeaweedServer, credentials: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.environment().items():
        credentials.setenv(name, value)


class Bench:
    """One bucket on the server, reached directly and through a proxy; a new prefix each time."""

    def __init__(self, seaweed: SeaweedServer, proxy: FaultyProxy) -> None:
        self.seaweed, self.proxy = seaweed, proxy
        self.name = seaweed.make_bucket()
        self.server = address(seaweed)
        self._numbers = itertools.count()

    def url(self, proxy: FaultyProxy, prefix: str) -> str:
        direct = self.seaweed.bucket_url(self.name, prefix)
        quoted = (urllib.parse.quote_plus(url) for url in (self.seaweed.endpoint, proxy.url))
        through = direct.replace(*quoted)
        assert through != direct
        return through

    def tale(self, deadline: float) -> Tale:
        number = next(self._numbers)
        prefix = f"run-{number}"
        through = open_bucket(self.url(self.proxy.heal(), prefix), deadline=deadline)
        direct = open_bucket(self.seaweed.bucket_url(self.name, prefix))
        return Tale(self.proxy, through, direct, series(5, seed=10 * number))


def address(seaweed: SeaweedServer) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(seaweed.endpoint)
    return str(parts.hostname), int(parts.port or 80)


@pytest.fixture(scope="module")
def bench(seaweed: SeaweedServer) -> Iterator[Bench]:
    with FaultyProxy(*address(seaweed)) as proxy:
        yield Bench(seaweed, proxy)


@pytest.mark.parametrize(("point", "fault"), cells(POINTS, COLUMNS))
def test_a_fault_at_a_point(bench: Bench, point: str, fault: str) -> None:
    at, how = POINTS[point], COLUMNS[fault]
    tale = bench.tale(how.deadline)
    outcome = tale.tell(at, how)
    print(f"cell: {point} | {fault} | {outcome} | {tale.watched.seconds:.2f} s")  # for pytest -rP
    assert tale.watched.kinds <= at.allows(fault, how)
    assert tale.watched.seconds < how.limit


SILENT = (
    "publish: payload",
    "publish: commit",
    "follow: head",
    "pull: listing",
    "pull: payload",
)


@pytest.mark.parametrize("point", SILENT)
@pytest.mark.parametrize("times", [1, None])
def test_a_server_that_says_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, point: str, times: int | None
) -> None:
    for purpose in ("ask", "move"):
        monkeypatch.setitem(_objects_stores.TIMEOUTS, purpose, "500ms")
    at = POINTS[point]
    how = Fault(
        (at.kind,),
        lambda proxy, where: proxy.hang(**where, times=times),
        NEVER_MIND if times else LASTING,
        deadline=8.0 if times else SHORT,
    )
    tale = bench.tale(how.deadline)
    outcome = tale.tell(at, how)
    print(f"cell: {point} | silence, {times} | {outcome} | {tale.watched.seconds:.2f} s")
    assert tale.watched.kinds <= how.allowed


def test_a_deadline_holds_against_silence(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the time limits of the two requests at its ends."""
    monkeypatch.setitem(_objects_stores.TIMEOUTS, "ask", "1s")
    with FaultyProxy(*bench.server) as proxy:
        bucket = open_bucket(bench.url(proxy, "silence"), deadline=0.5)
        bucket.put("key", b"x")
        proxy.hang(times=None)
        caught: list[BaseException] = []

        def look() -> None:
            try:
                bucket.head("key")
            except BucketUnavailable as error:
                caught.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join(6)
        in_time = not thread.is_alive()
        proxy.heal()
    thread.join(30)  # the proxy's end resets what waits
    assert in_time
    assert caught
