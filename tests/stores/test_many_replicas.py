"""Many at once on real servers: one publisher with 32 replicas, and 16 processes in a race."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from servers.proxy import FaultyProxy
from servers.seaweed import SeaweedServer
from stores._runs import State, check_history, digest, held, hub_settings, series
from thinwire import Publisher, Replica
from thinwire.bucket import open_bucket
from thinwire.mirror import MemoryMirror


@pytest.fixture(autouse=True)
def _environment(seaweed: SeaweedServer, credentials: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.environment().items():
        credentials.setenv(name, value)


MANY = 32
VERSIONS = 5


@dataclass(frozen=True)
class Route:
    """A fresh run's bucket, directly and through a proxy that counts."""

    direct: str
    through: str
    proxy: FaultyProxy


@pytest.fixture
def s3_routes(seaweed: SeaweedServer) -> Iterator[Callable[[str], Route]]:
    address = urllib.parse.urlsplit(seaweed.endpoint)
    name = seaweed.make_bucket()
    with ExitStack() as stack:

        def route(prefix: str) -> Route:
            proxy = stack.enter_context(FaultyProxy(str(address.hostname), int(address.port or 80)))
            direct = seaweed.bucket_url(name, prefix)
            ends = (urllib.parse.quote_plus(url) for url in (seaweed.endpoint, proxy.url))
            return Route(direct, direct.replace(*ends), proxy)

        yield route


@dataclass(frozen=True)
class Cost:
    """What one side of a run asked of the server."""

    requests: int
    sent: int
    received: int

    @classmethod
    def of(cls, proxy: FaultyProxy) -> Cost:
        seen = proxy.requests
        assert all(request.status is not None for request in seen)
        return cls(len(seen), sum(r.sent for r in seen), sum(r.received for r in seen))


def run_with(route: Route, states: list[State], count: int) -> tuple[Cost, list[str]]:
    """A run with ``count`` replicas that follow from before its start.

    Returns:
        what the publisher cost, and the digest that each replica ended at.
    """
    begun = threading.Barrier(count + 1)

    def follow(_: int) -> str:
        mirror = MemoryMirror()
        with open_bucket(route.direct) as bucket, Replica(bucket, mirror) as replica:
            begun.wait()
            versions = [u.version for u in replica.follow(poll=0.1, until=len(states) - 1)]
            assert versions == list(range(len(states)))
            return digest(held(mirror))

    with ThreadPoolExecutor(count) as pool, open_bucket(route.through) as bucket:
        ends = [pool.submit(follow, index) for index in range(count)]
        begun.wait()
        with Publisher(bucket, states[0].source, threads=1) as publisher:
            for state in states[1:]:
                publisher.publish(state.source).result()
        found = [end.result(120) for end in ends]
    return Cost.of(route.proxy), found


def check_many(routes: Callable[[str], Route]) -> None:
    states = series(VERSIONS + 1, seed=7)
    expected = digest(states[-1].raw)
    alone, found = run_with(routes("few1"), states, 1)
    assert found == [expected]
    route = routes("many")  # names of one length: they are in the answers
    crowd, found = run_with(route, states, MANY)
    assert found == [expected] * MANY
    assert check_history(open_bucket(route.direct), states) == list(range(len(states)))
    print(f"the publisher's cost with 1 replica: {alone}, with {MANY}: {crowd}")
    assert crowd.requests == alone.requests
    # times, random ids and what compression makes of them differ by some bytes
    assert crowd.sent == pytest.approx(alone.sent, rel=0.002)
    assert crowd.received == pytest.approx(alone.received, rel=0.002)


@pytest.fixture
def hub_routes(tmp_path: Path) -> Iterator[Callable[[str], Route]]:
    pytest.importorskip("hf_xet")
    from servers.hub.process import HubProcess

    token = "hf_many"
    with ExitStack() as stack:
        stack.enter_context(hub_settings(tmp_path, token))
        hub = stack.enter_context(HubProcess(tmp_path, "--token", f"{token}=me"))
        address = urllib.parse.urlsplit(hub.url)

        def route(name: str) -> Route:
            proxy = stack.enter_context(FaultyProxy(str(address.hostname), int(address.port or 80)))
            place = f"hf://buckets/me/{name}/run?endpoint="
            return Route(place + hub.url, place + proxy.url, proxy)

        yield route


def test_on_s3(s3_routes: Callable[[str], Route]) -> None:
    check_many(s3_routes)


def test_on_the_hub(hub_routes: Callable[[str], Route]) -> None:
    check_many(hub_routes)


RACERS, ROUNDS = 16, 3  # SeaweedFS lets losers wait for seconds
RACE = """
import json, multiprocessing, sys
import thinwire.bucket.objects, obstore  # once for all: the processes are forked from this one
from thinwire.bucket import open_bucket
from thinwire.errors import AlreadyExists

racers, rounds, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def race(me, barrier, results):
    with open_bucket(url) as bucket:
        list(bucket.list())  # connected before the start
        for turn in range(rounds):
            barrier.wait(60)
            try:
                bucket.create(f"commits/{turn:010}.json", b"<%d>" % me * 50)
                results.put((turn, me, "won"))
            except AlreadyExists:
                results.put((turn, me, "lost"))

context = multiprocessing.get_context("fork")
barrier, results = context.Barrier(racers), context.SimpleQueue()
processes = [context.Process(target=race, args=(me, barrier, results)) for me in range(racers)]
for process in processes:
    process.start()
print(json.dumps([results.get() for _ in range(racers * rounds)]))
for process in processes:
    process.join()
"""


def test_processes_race_for_one_key(seaweed: SeaweedServer) -> None:
    url = seaweed.bucket_url(seaweed.make_bucket(), "race")
    command = [sys.executable, "-c", RACE, str(RACERS), str(ROUNDS), url]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout)
    assert len(told) == RACERS * ROUNDS
    bucket = open_bucket(url)
    for turn in range(ROUNDS):
        (winner,) = (me for at, me, how in told if (at, how) == (turn, "won"))
        assert bucket.get(f"commits/{turn:010}.json") == b"<%d>" % winner * 50
