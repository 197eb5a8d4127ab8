"""SGLang's custom weight loader, against the interface recorded in ``_sglang.py``: not SGLang."""

from __future__ import annotations

import pickletools
import threading
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines._run import Run
from engines._server import Checkpoint, Server
from engines._sglang import Recorded, deserialize, install_distributed
from thinwire import Replica, open_bucket
from thinwire.engines.client import ServerRefused, ServerUnavailable
from thinwire.engines.live import LiveWeights
from thinwire.engines.scatter import Staged
from thinwire.engines.sglang import loader
from thinwire.engines.sglang.account import read_account
from thinwire.engines.sglang.client import SGLangClient
from thinwire.engines.sglang.follow import follow
from thinwire.engines.sglang.loader import Worker
from thinwire.engines.sglang.payload import serialize
from thinwire.errors import EnginePoisoned, Misuse


def bits(run: Run, version: int, rank: int = 0, ranks: int = 1) -> dict[str, bytes]:
    server = Server(rank, ranks)
    server.load_weights(run.states[version].pairs())
    return server.bits()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(tmp_path)
    install_distributed(monkeypatch)
    monkeypatch.setattr(loader, "_worker", None)
    monkeypatch.setenv("THINWIRE_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setenv("THINWIRE_CHECKPOINT", str(run.base))
    yield run
    run.publisher.close()


def model(run: Run, version: int = 0) -> Server:
    server = Server()
    server.load_weights(run.states[version].pairs())
    return server


def pulled(run: Run, version: int) -> None:
    with Replica(open_bucket(run.url), run.root / "mirror") as replica:
        replica.sync(version)


def client(run: Run, server: Recorded, **options: Any) -> SGLangClient:
    return SGLangClient(server.url, run.root / "mirror", timeout=20, **options)


# --- the payload --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 255, 2**62 - 1, -1, 2**63 - 1])
def test_numbers_arrive_as_tensors(number: int) -> None:
    (name, tensor), (other, last) = deserialize(serialize({"a.b": number, "é": 7}))
    assert (name, int(tensor), other, int(last)) == ("a.b", number, "é", 7)
    assert tensor.dtype == torch.int64


def test_the_payload_names_one_function() -> None:
    data = b64decode(serialize({"a": 1, "b": 2}))
    named = [arg for opcode, arg, _ in pickletools.genops(data) if opcode.name == "GLOBAL"]
    assert named == ["torch tensor"] * 2


def test_a_number_that_is_too_large() -> None:
    with pytest.raises(Misuse, match="64 bits"):
        serialize({"a": 2**63})


# --- a server -----------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [True, False])
@pytest.mark.parametrize("pauses", [True, False])
def test_version_by_version(run: Run, sessions: bool, pauses: bool) -> None:
    with Recorded(model(run), sessions=sessions, pauses=pauses) as server:
        for version in range(3):
            server.stale = True
            pulled(run, version)
            arrival = client(run, server).move(version)
            assert arrival["version"] == version
            assert server.model.bits() == bits(run, version)
            assert (server.weight_version, server.stale) == (str(version), False)
            assert (server.paused, server.open) == (False, False)
            run.step()
        assert server.dead is None


def test_follow_a_run(run: Run) -> None:
    arrivals: list[int] = []
    with Recorded(model(run)) as server:
        for _ in range(3):
            run.step()

        def report(arrival: dict[str, Any]) -> None:
            version = arrival["version"]
            assert server.model.bits() == bits(run, version)
            arrivals.append(version)

        follow(run.url, run.root / "mirror", client(run, server), report, until=3)
        run.step()
        follow(run.url, run.root / "mirror", client(run, server), report, until=4)
    assert arrivals == sorted(arrivals)
    assert (arrivals[-1], arrivals.count(3)) == (4, 2)


def test_a_server_that_loaded_the_mirror(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_CHECKPOINT")
    run.step()
    pulled(run, 1)
    run.step()
    with Recorded(model(run, 1)) as server:
        follow(run.url, run.root / "mirror", client(run, server), until=2)
        assert server.model.bits() == bits(run, 2)


def test_weights_that_are_not_the_runs_are_refused(run: Run) -> None:
    server = Server()
    server.load_weights(Checkpoint.random(9).pairs())
    before = server.bits()
    pulled(run, 0)
    with Recorded(server) as recorded:
        with pytest.raises(ServerRefused, match="cannot be followed"):
            client(run, recorded).move(0)
        assert (recorded.dead, recorded.paused, recorded.open) == (None, False, False)
        assert recorded.weight_version == "default"
    assert server.bits() == before


def test_a_checkpoint_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_CHECKPOINT", str(run.root / "nothing"))
    pulled(run, 0)
    with Recorded(model(run)) as server:
        with pytest.raises(ServerRefused, match="nothing"):
            client(run, server).move(0)
        assert server.dead is None


def test_a_mirror_that_has_moved_on(run: Run) -> None:
    pulled(run, 0)
    with Recorded(model(run)) as server:
        client(run, server).move(0)
        run.step()
        pulled(run, 1)
        with pytest.raises(ServerRefused, match="RollbackRefused"):
            client(run, server).move(0)
        client(run, server).move(1)
        assert server.model.bits() == bits(run, 1)


def test_half_a_version_ends_the_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(staged: Staged) -> None:
        raise RuntimeError("device lost")

    with (
        Replica(open_bucket(run.url), run.root / "mirror") as replica,
        Recorded(model(run)) as server,
    ):
        replica.sync(0)
        client(run, server).move(0)
        run.step()
        replica.sync(1)
        monkeypatch.setattr(Staged, "write", broken)
        with pytest.raises(ServerUnavailable):
            client(run, server).move(1)
        assert isinstance(server.dead, EnginePoisoned)
        assert server.weight_version == "0"


def test_a_cache_that_cannot_be_flushed_changes_nothing(run: Run) -> None:
    pulled(run, 0)
    with Recorded(model(run)) as server:
        server.waiting = True
        with pytest.raises(ServerUnavailable, match="cannot be flushed"):
            client(run, server).move(0)
        assert "/update_weights_from_tensor" not in server.paths
        assert not server.paused
        client(run, server, mode="abort").move(0)
        assert server.weight_version == "0"


def test_another_mirror_is_noticed(run: Run) -> None:
    pulled(run, 0)
    with Recorded(model(run)) as server:
        other = SGLangClient(server.url, run.root / "other", timeout=20)
        with pytest.raises(ServerRefused, match="no account"):
            other.move(0)
        assert server.weight_version == "default"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pp_size", 2, "pp_size=2"),
        ("nnodes", 2, "nnodes=2"),
        ("speculative_algorithm", "EAGLE", "draft"),
        ("custom_weight_loader", [], "does not know"),
    ],
)
def test_servers_that_are_not_supported(run: Run, name: str, value: object, message: str) -> None:
    with Recorded(model(run)) as server:
        server.info[name] = value
        with pytest.raises(ServerRefused, match=message):
            client(run, server).move(0)
        assert server.paths == ["/server_info", "/get_server_info"]


# --- ranks --------------------------------------------------------------------------------


class Ranks:
    """Two workers that exchange values as tensor-parallel ranks do."""

    def __init__(self, run: Run, *, loaded: tuple[Path | None, ...]) -> None:
        self.models = [Server(rank, 2) for rank in (0, 1)]
        for each in self.models:
            each.load_weights(run.states[0].pairs())
        self._rows: list[Any] = [None, None]
        self._barrier = threading.Barrier(2, timeout=20)
        self.workers = [
            Worker(str(run.root / "mirror"), loaded[rank], rank=rank, gather=self._gather(rank))
            for rank in (0, 1)
        ]

    def _gather(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._rows[rank] = value
            self._barrier.wait()
            rows = list(self._rows)
            self._barrier.wait()
            return rows

        return gather

    def load(self, version: int) -> list[BaseException | None]:
        found: list[BaseException | None] = [None, None]

        def one(rank: int) -> None:
            named = deserialize(serialize({"thinwire.version": version, "thinwire.ask": version}))
            try:
                self.workers[rank].load(self.models[rank], named)
            except BaseException as error:  # noqa: BLE001 - looked at below
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def test_two_ranks(run: Run) -> None:
    ranks = Ranks(run, loaded=(run.base, run.base))
    for version in range(3):
        pulled(run, version)
        assert ranks.load(version) == [None, None]
        for rank in (0, 1):
            assert ranks.models[rank].bits() == bits(run, version, rank, 2)
        run.step()


@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_that_cannot_keeps_both_as_they_were(run: Run, bad: int) -> None:
    loaded = [run.base, run.base]
    loaded[bad] = run.root / "nothing"
    run.step()
    pulled(run, 1)
    ranks = Ranks(run, loaded=tuple(loaded))
    assert ranks.load(1) == [None, None]
    account = read_account(run.root / "mirror", 1)
    assert account is not None
    assert account["error"]
    for rank in (0, 1):
        assert ranks.models[rank].bits() == bits(run, 0, rank, 2)


def test_one_rank_that_breaks_while_proving(run: Run) -> None:
    run.step()
    pulled(run, 1)
    ranks = Ranks(run, loaded=(run.base, run.base))
    ranks.models[1].qkv.data.fill_(1)
    assert ranks.load(1) == [None, None]
    account = read_account(run.root / "mirror", 1)
    assert account is not None
    assert account["error"] == "SchemaMismatch"
    assert ranks.models[0].bits() == bits(run, 0, 0, 2)


def test_one_rank_that_holds_something_else_ends_both(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled(run, 0)
    ranks = Ranks(run, loaded=(run.base, run.base))
    good = LiveWeights.differing

    def differing(live: LiveWeights) -> dict[str, str]:
        return {"q": "it is not"} if live._module is ranks.models[1] else good(live)

    monkeypatch.setattr(LiveWeights, "differing", differing)
    assert [type(error) for error in ranks.load(0)] == [EnginePoisoned, EnginePoisoned]
    assert read_account(run.root / "mirror", 0) is None
