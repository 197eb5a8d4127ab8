"""TRL's protocol, driven as TRL drives it, with real replicas behind real HTTP servers."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from servers.ports import free_port
from thinwire import Publisher, open_bucket
from thinwire.engines.client import ServerRefused
from thinwire.errors import BucketUnavailable, DigestMismatch, Misuse
from thinwire.testing import FaultyBucket
from thinwire.trainers.fleet import Fleet, ServersBehind
from thinwire.trainers.trl import DeltaWeightTransfer
from trainers._server import ReplicaServer
from trainers._training import history, require_same, served_bits, tiny_model


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def servers(tmp_path: Path, bucket: Path) -> Iterator[list[ReplicaServer]]:
    pair = [ReplicaServer(bucket, tmp_path / f"mirror-{n}") for n in range(2)]
    with contextlib.ExitStack() as stack:
        for server in pair:
            stack.callback(server.stop)
            server.start()
        yield pair


def urls(servers: list[ReplicaServer]) -> list[str]:
    return [server.url for server in servers]


def sync(transfer: DeltaWeightTransfer, model: torch.nn.Module) -> None:
    """What TRL does around every sync, on rank 0."""
    transfer.pause()
    transfer.send_weights((name, p.detach()) for name, p in model.named_parameters())
    transfer.resume()


def step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)


@contextlib.contextmanager
def transferring(transfer: DeltaWeightTransfer) -> Iterator[DeltaWeightTransfer]:
    try:
        yield transfer
    finally:
        transfer.destroy()


def eventually(what: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- without servers ----------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["committed", "copied"])
def test_versions_are_in_the_bucket(bucket: Path, wait: str) -> None:
    model = tiny_model()
    expected = []
    transfer = DeltaWeightTransfer(bucket, wait=wait)  # type: ignore[arg-type]
    with transferring(transfer):
        transfer.init_weight_transfer()
        for _ in range(4):
            expected.append(served_bits(model))
            sync(transfer, model)
            if wait == "committed":
                assert len(history(bucket)[0]) == len(expected)
            step(model)
    assert transfer.versions == [0, 1, 2, 3]
    for found, bits in zip(history(bucket)[1], expected, strict=True):
        require_same(found, bits)
    assert transfer.servers == ()


def test_a_run_is_resumed_as_a_diff(bucket: Path) -> None:
    model = tiny_model()
    with transferring(DeltaWeightTransfer(bucket)) as transfer:
        sync(transfer, model)
    step(model)
    with transferring(DeltaWeightTransfer(bucket, resume="require")) as transfer:
        sync(transfer, model)
        assert transfer.versions == [2]  # version 1 takes the run over
    require_same(history(bucket)[1][-1], served_bits(model))


def test_a_sync_after_the_end_goes_on_in_the_run(bucket: Path) -> None:
    """TRL sets up once, destroys at the end of every train()."""
    model = tiny_model()
    transfer = DeltaWeightTransfer(bucket, resume="new")
    for _ in range(2):
        with transferring(transfer):
            sync(transfer, model)
    assert transfer.versions == [0, 2]


def test_the_iterator_is_read_to_its_end_before_anything_fails(bucket: Path) -> None:
    """Other ranks gather along: they would wait forever for a rank that stops in the middle."""
    read = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in tiny_model().named_parameters():
            read.append(name)
            yield name, parameter.detach()

    faulty = FaultyBucket(open_bucket(bucket)).fail("get", "run.json").fail("stream", "run.json")
    with pytest.raises(BucketUnavailable):
        DeltaWeightTransfer(faulty).send_weights(pairs())
    assert len(read) == len(list(tiny_model().named_parameters()))


@pytest.mark.parametrize("wait", ["committed", "copied"])
def test_a_failed_upload_is_raised(bucket: Path, wait: str) -> None:
    faulty = FaultyBucket(open_bucket(bucket))
    for operation in ("create", "put"):
        faulty.fail(operation, "deltas/*")
    transfer = DeltaWeightTransfer(faulty, wait=wait)  # type: ignore[arg-type]
    model = tiny_model()
    sync(transfer, model)
    step(model)
    if wait == "committed":
        with pytest.raises(BucketUnavailable):
            sync(transfer, model)
        transfer.destroy()
    else:
        sync(transfer, model)
        with pytest.raises(BucketUnavailable):
            transfer.destroy()
    assert history(bucket)[0] == [None]


def test_the_end_does_not_hide_the_error_that_training_ends_with(bucket: Path) -> None:
    faulty = FaultyBucket(open_bucket(bucket))
    for operation in ("create", "put"):
        faulty.fail(operation, "deltas/*")
    transfer = DeltaWeightTransfer(faulty, wait="copied")

    def train() -> None:
        model = tiny_model()
        with transferring(transfer):
            sync(transfer, model)
            step(model)
            sync(transfer, model)
            raise KeyError("the training's own")

    with pytest.raises(KeyError) as caught:
        train()
    notes = getattr(caught.value, "__notes__", [])  # since Python 3.11
    assert all("the last publish failed as well" in note for note in notes)
    assert len(notes) == (sys.version_info >= (3, 11))


# --- with servers -------------------------------------------------------------------------


def test_servers_serve_the_version_when_the_sync_returns(
    bucket: Path, servers: list[ReplicaServer]
) -> None:
    model = tiny_model()
    with transferring(DeltaWeightTransfer(bucket, servers=urls(servers))) as transfer:
        for version in range(4):
            sync(transfer, model)
            for server in servers:
                assert server.version == version
                require_same(server.bits(), served_bits(model))
            step(model)
        assert [state.version for state in transfer.servers] == [3, 3]
        assert not any(state.left_out or state.trouble for state in transfer.servers)


def test_servers_are_told_after_the_commit_only(bucket: Path, servers: list[ReplicaServer]) -> None:
    model = tiny_model()
    with transferring(DeltaWeightTransfer(bucket, servers=urls(servers))) as transfer:
        sync(transfer, model)
        step(model)
        sync(transfer, model)
    told = [body for _, path, body in servers[0].requests if path == "/thinwire/update"]
    assert told == [{"version": 0}, {"version": 1}]


def test_servers_that_start_later_are_waited_for(
    tmp_path: Path, bucket: Path, servers: list[ReplicaServer]
) -> None:
    """Both: the second one for as long as patience lasts, once the first one is there."""
    for server in servers:
        server.stop()
    starting = [
        threading.Timer(seconds, server.start) for seconds, server in zip((1.0, 2.5), servers)
    ]
    transfer = DeltaWeightTransfer(bucket, servers=urls(servers), patience=6.0)
    with transferring(transfer):
        began = time.monotonic()
        for timer in starting:
            timer.start()
        sync(transfer, tiny_model())
        assert 2.4 < time.monotonic() - began < 15
        assert [server.version for server in servers] == [0, 0]
        assert [state.left_out for state in transfer.servers] == [False, False]
    for timer in starting:
        timer.join()


def test_patience_with_a_server_that_starts_begins_with_the_first_one(
    bucket: Path, servers: list[ReplicaServer]
) -> None:
    model = tiny_model()
    for server in servers:
        server.stop()
    starting = threading.Timer(1.5, servers[0].start)
    transfer = DeltaWeightTransfer(bucket, servers=urls(servers), patience=3.0)
    with transferring(transfer):
        began = time.monotonic()
        starting.start()
        sync(transfer, model)
        assert 4.4 < time.monotonic() - began < 30
        assert [state.left_out for state in transfer.servers] == [False, True]
        assert "refused" in transfer.servers[1].trouble
        step(model)
        began = time.monotonic()
        sync(transfer, model)
        assert time.monotonic() - began < 2.8  # only once
        servers[1].start()  # a late one comes by itself
        eventually(lambda: servers[1].version == 1 and not transfer.servers[1].left_out)
    starting.join()


def test_a_killed_server_is_left_out_and_comes_back(
    bucket: Path, servers: list[ReplicaServer]
) -> None:
    model = tiny_model()
    transfer = DeltaWeightTransfer(bucket, servers=urls(servers), patience=10.0)
    with transferring(transfer):
        sync(transfer, model)
        servers[1].stop()
        for _ in range(2):
            step(model)
            began = time.monotonic()
            sync(transfer, model)
            assert time.monotonic() - began < 5  # nobody waits for the dead
        assert [state.left_out for state in transfer.servers] == [False, True]
        assert "refused" in transfer.servers[1].trouble
        servers[1].start()
        eventually(lambda: not transfer.servers[1].left_out)
        require_same(servers[1].bits(), served_bits(model))
        step(model)
        sync(transfer, model)
        assert [server.version for server in servers] == [3, 3]


def test_a_lagging_server_is_left_out_and_comes_back(
    bucket: Path, servers: list[ReplicaServer]
) -> None:
    model = tiny_model()
    transfer = DeltaWeightTransfer(bucket, servers=urls(servers), patience=2.0)
    with transferring(transfer):
        sync(transfer, model)
        servers[0].open.clear()
        step(model)
        sync(transfer, model)
        assert [state.left_out for state in transfer.servers] == [True, False]
        began = time.monotonic()
        step(model)
        sync(transfer, model)
        assert time.monotonic() - began < 2.0
        servers[0].open.set()
        eventually(lambda: not transfer.servers[0].left_out)
        assert servers[0].version == 2
        require_same(servers[0].bits(), served_bits(model))


def test_no_server_at_all(bucket: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    transfer = DeltaWeightTransfer(bucket, servers=[nobody], timeout=0.5, patience=0.1)
    with transferring(transfer), pytest.raises(ServersBehind, match="refused"):
        sync(transfer, tiny_model())
    assert len(history(bucket)[0]) == 1  # the version is there nevertheless


def test_servers_that_refuse(bucket: Path, servers: list[ReplicaServer]) -> None:
    for server in servers:
        server.refuses = DigestMismatch("another base")
    transfer = DeltaWeightTransfer(bucket, servers=urls(servers), patience=0.1)
    with transferring(transfer), pytest.raises(ServerRefused, match="another base"):
        sync(transfer, tiny_model())


def test_servers_that_refused_a_version_are_asked_for_the_next(
    bucket: Path, servers: list[ReplicaServer]
) -> None:
    model = tiny_model()
    with Publisher(open_bucket(bucket), model, dtype="bf16") as publisher:
        for _ in range(2):
            step(model)
            publisher.publish(model)
    fleet = Fleet(urls(servers), retry=60.0)
    for server in servers:
        server.refuses = DigestMismatch("another base")
    with pytest.raises(ServerRefused):
        fleet.serve(1)
    for server in servers:
        server.refuses = None
    began = time.monotonic()
    assert fleet.serve(2)
    assert time.monotonic() - began < 30  # no retry is waited for
    eventually(lambda: sorted(fleet.live) == sorted(urls(servers)))
    fleet.close()


@pytest.mark.parametrize("wait", ["committed", "copied"])
def test_servers_follow_in_the_background(
    bucket: Path, servers: list[ReplicaServer], wait: str
) -> None:
    model = tiny_model()
    servers[0].open.clear()
    transfer = DeltaWeightTransfer(
        bucket,
        servers=urls(servers),
        wait=wait,  # type: ignore[arg-type]
        patience=5.0,
    )
    with transferring(transfer):
        for _ in range(3):
            sync(transfer, model)  # no server holds it up
            step(model)
        eventually(lambda: servers[1].version == 2)
        servers[0].open.set()
        sync(transfer, model)
    # the end waits for the last one
    assert [server.version for server in servers] == [3, 3]


@pytest.mark.parametrize("servers", [[], "http://host:1", ["http://host:1", "http://host:1/"]])
def test_servers_are_checked(bucket: Path, servers: list[str]) -> None:
    with pytest.raises(Misuse):
        DeltaWeightTransfer(bucket, servers=servers)


def test_waiting_for_servers_takes_servers(bucket: Path) -> None:
    with pytest.raises(Misuse, match="wait="):
        DeltaWeightTransfer(bucket, wait="served")


def test_a_closed_fleet_takes_nothing(servers: list[ReplicaServer], bucket: Path) -> None:
    Publisher(open_bucket(bucket), tiny_model(), dtype="bf16").close()
    fleet = Fleet(urls(servers))
    assert sorted(fleet.serve(0)) == sorted(urls(servers)) == sorted(fleet.live)
    fleet.close()
    with pytest.raises(Misuse, match="closed"):
        fleet.announce(1)
