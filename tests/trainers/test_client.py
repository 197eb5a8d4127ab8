"""One server: what it is asked, and what its answers mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from servers.ports import free_port
from thinwire import Publisher, open_bucket
from thinwire.engines.client import ServerRefused, ServerUnavailable, UpdateClient
from thinwire.errors import BucketUnavailable, DigestMismatch, Misuse
from trainers._server import ReplicaServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReplicaServer]:
    weights = {"w": np.zeros(8, np.float32)}
    with Publisher(open_bucket(tmp_path / "bucket"), weights) as publisher:
        for step in range(3):
            weights["w"][step] = 1
            publisher.publish(weights)
    with ReplicaServer(tmp_path / "bucket", tmp_path / "mirror") as server:
        yield server


def test_an_update_answers_when_the_version_serves(server: ReplicaServer) -> None:
    client = UpdateClient(server.url + "/")
    assert client.version() is None
    assert client.update(1) == 1
    assert client.version() == server.version == 1
    assert client.update(3) == 3
    assert ("POST", "/thinwire/update", {"version": 3}) in server.requests


def test_a_server_beyond_the_version_is_there(server: ReplicaServer) -> None:
    client = UpdateClient(server.url)
    client.update(3)
    assert client.update(1) == 3


def test_a_poisoned_engine_is_healed_first(server: ReplicaServer) -> None:
    client = UpdateClient(server.url)
    client.update(1)
    server.poisoned = True
    assert client.version() is None
    assert client.update(2) == 2
    assert not server.poisoned


def test_what_a_server_refuses(server: ReplicaServer) -> None:
    client = UpdateClient(server.url)
    server.refuses = DigestMismatch("the base is another", hint="pull anew")
    with pytest.raises(ServerRefused, match="409 DigestMismatch the base is another") as caught:
        client.update(2)
    assert caught.value.hint == "pull anew"
    server.refuses = BucketUnavailable("no network")
    with pytest.raises(ServerUnavailable, match="503 BucketUnavailable"):
        client.update(2)
    server.refuses = None
    with pytest.raises(ServerRefused, match="not committed"):
        client.update(99)


def test_a_server_without_the_plugin(server: ReplicaServer) -> None:
    with pytest.raises(ServerRefused, match="no thinwire routes") as caught:
        UpdateClient(server.url + "/elsewhere").update(1)
    assert "VLLM_PLUGINS=thinwire" in caught.value.hint


def test_a_server_with_a_key(server: ReplicaServer) -> None:
    server.key = "s3cret"
    with pytest.raises(ServerRefused, match="wants its API key") as caught:
        UpdateClient(server.url).update(1)
    assert "the key" in caught.value.hint
    assert UpdateClient(server.url, token="s3cret").update(1) == 1


def test_nobody_there() -> None:
    with pytest.raises(ServerUnavailable, match="refused"):
        UpdateClient(f"http://127.0.0.1:{free_port()}").update(1)


def test_a_server_that_hangs(server: ReplicaServer) -> None:
    server.open.clear()
    with pytest.raises(ServerUnavailable, match="timed out"):
        UpdateClient(server.url, timeout=0.2).update(1)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "", "http://h/?a=b"])
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(Misuse):
        UpdateClient(url)
