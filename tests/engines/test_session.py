"""A rank's session over a plain module: proof, catching up, staging, poison, healing, sharing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines._run import Run
from engines._server import DEVICES, Checkpoint, Server
from thinwire.engines.host import ReadingRank
from thinwire.engines.merge import merge
from thinwire.engines.scatter import Staged
from thinwire.engines.session import Session
from thinwire.engines.vllm.settings import positive_seconds
from thinwire.errors import (
    BucketNotFound,
    BucketUnavailable,
    CorruptPayload,
    EnginePoisoned,
    Misuse,
    RollbackRefused,
    SchemaMismatch,
)
from thinwire.patch import Patch


def expected(run: Run, version: int, rank: int = 0, ranks: int = 1) -> dict[str, bytes]:
    server = Server(rank, ranks)
    server.load_weights(run.states[version].pairs())
    return server.bits()


def started(run: Run, device: str = "cpu", **options: Any) -> tuple[Session, Server]:
    server = Server(device=device)
    server.load_weights(run.states[0].pairs(device))
    session = Session(server, server.load_weights, run.host(), **options)
    session.start(run.base)
    return session, server


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.publisher.close()


@pytest.mark.parametrize("device", DEVICES)
def test_version_by_version(run: Run, device: str) -> None:
    session, server = started(run, device)
    assert (session.version, session.weights.plan.refused) == (0, {})
    for version in range(1, 4):
        run.step()
        before = server.bits()
        session.stage(None if version % 2 else version)
        assert server.bits() == before
        assert session.status()["staged"] == version
        session.apply(version)
        assert session.version == version
        assert server.bits() == expected(run, version)
        assert session.weights.differing() == {}
    assert set(session.status()["seconds"]) >= {"fetch_s", "decode_s", "stage_s", "apply_s"}
    session.close()


def test_versions_that_were_missed_come_in_one_write(run: Run) -> None:
    session, server = started(run)
    for _ in range(5):
        run.step(0.4)
    session.stage(5)
    session.apply(5)
    assert server.bits() == expected(run, 5)
    session.close()


def test_a_late_engine_catches_up_before_it_serves(run: Run) -> None:
    for _ in range(3):
        run.step()
    session, server = started(run)
    assert session.version == 3
    assert server.bits() == expected(run, 3)
    run.step()
    session.stage(None)
    session.apply(4)
    assert server.bits() == expected(run, 4)
    session.close()


def test_an_engine_that_loaded_the_mirror_itself(run: Run) -> None:
    run.step()
    host = run.host()
    host.advance(1)
    host.close()
    run.step()
    server = Server()
    server.load_weights(run.states[1].pairs())
    session = Session(server, server.load_weights, run.host())
    assert session.start(run.root / "mirror") == 2
    assert server.bits() == expected(run, 2)
    session.close()


def test_without_a_folder_the_mirror_is_the_proof(run: Run) -> None:
    server = Server()
    server.load_weights(run.state.pairs())
    session = Session(server, server.load_weights, run.host())
    assert session.start(None) == 0
    session.close()


def test_weights_that_are_not_the_runs_are_refused(run: Run) -> None:
    server = Server()
    server.load_weights(Checkpoint.random(9).pairs())
    for loaded in (None, run.base):
        host = run.host()
        with pytest.raises(SchemaMismatch, match="cannot be followed"):
            Session(server, server.load_weights, host).start(loaded)
        host.close()


class Packed(Server):
    """Packs its experts once they are loaded, as some engines do."""

    def pack(self) -> None:
        self.w2.data = self.w2.data.reshape(2, 4, 2, 6).transpose(2, 3).reshape(2, 8, 6)


def packed(run: Run, **options: Any) -> tuple[Session, Packed]:
    server = Packed()
    server.load_weights(run.state.pairs())
    server.pack()
    return Session(server, server.load_weights, run.host(), **options), server


def test_packed_experts_are_refused_or_left_alone(run: Run) -> None:
    session, server = packed(run)
    with pytest.raises(SchemaMismatch, match=r"2 of 22 .*experts\.0\.down: what w2 holds"):
        session.start(run.base)
    session.close()
    before = server.bits()
    session, server = packed(run, freeze=True)
    session.start(run.base)
    assert session.weights.plan.refused.keys() == {"experts.0.down", "experts.1.down"}
    assert server.bits() == before
    run.step()
    with pytest.raises(SchemaMismatch, match=r"experts\.\d\.down changes"):
        session.stage(1)
    assert server.bits() == before
    assert session.version == 0
    session.close()


def test_a_late_engine_writes_nothing_if_something_cannot_be_placed(run: Run) -> None:
    session, server = packed(run, freeze=True)
    run.step()
    before = server.bits()
    with pytest.raises(SchemaMismatch, match=r"experts\.\d\.down changes"):
        session.start(run.base)
    assert server.bits() == before
    session.close()


def test_whole_tensors_where_changes_are_not_known(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, server = started(run)
    monkeypatch.setattr(session.host, "changes", lambda since: None)
    for version in (1, 2):
        run.step(0.01)
        session.stage(version)
        assert server.bits() == expected(run, version - 1)
        session.apply(version)
        assert server.bits() == expected(run, version)
    session.close()
    other = Run(run.root / "other")
    session, server = packed(other, freeze=True)
    session.start(other.base)
    monkeypatch.setattr(session.host, "changes", lambda since: None)
    other.step()
    before = server.bits()
    with pytest.raises(SchemaMismatch, match=r"experts\.\d\.down changes"):
        session.stage(1)
    assert server.bits() == before
    session.close()


def test_a_tensor_that_no_rank_keeps_may_be_there_until_it_changes(run: Run) -> None:
    server = Server()
    server.load_weights(run.state.pairs())

    def without_norm(weights: Any) -> None:
        server.load_weights((n, t) for n, t in weights if n != "norm")

    session = Session(server, without_norm, run.host())
    session.start(run.base)
    assert session.weights.plan.refused == {"norm": "0 of its 8 elements are kept"}
    run.step(1.0)
    with pytest.raises(SchemaMismatch, match="norm changes"):
        session.stage(1)
    session.close()


def test_a_spoiled_payload_changes_nothing(run: Run) -> None:
    session, server = started(run)
    run.step()
    (payload,) = (run.root / "bucket" / "deltas").iterdir()
    whole = payload.read_bytes()
    payload.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    session.stage_in_background(1)
    while (status := session.status())["staging"]:
        time.sleep(0.01)
    assert status["error"].startswith(CorruptPayload.__name__)
    assert (status["staged"], server.bits()) == (None, expected(run, 0))
    with pytest.raises(Misuse, match="not staged"):
        session.apply(1)
    payload.write_bytes(whole)
    session.stage(1)
    session.apply(1)
    assert server.bits() == expected(run, 1)
    session.close()


def test_a_failed_write_poisons_until_healed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    session, server = started(run)
    run.step()
    session.stage(1)

    def half(staged: Staged) -> None:
        first = staged._changes[0]
        first.memory.index_put_((first.index,), first.bits)
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(Staged, "write", half)
        with pytest.raises(EnginePoisoned, match="device lost"):
            session.apply(1)
    assert "in part" in session.status()["poisoned"]
    with pytest.raises(EnginePoisoned):
        session.apply(1)
    assert session.heal() == 1
    assert session.status()["poisoned"] == ""
    assert server.bits() == expected(run, 1)
    run.step()
    session.stage(2)
    session.apply(2)
    assert server.bits() == expected(run, 2)
    session.close()


def test_memory_exchanged_behind_the_session_is_refused(run: Run) -> None:
    session, server = started(run)
    server.norm.data = server.norm.data.clone()
    run.step()
    with pytest.raises(SchemaMismatch, match="norm"):
        session.stage(1)
    session.close()


def test_nothing_waits_for_a_version_that_is_being_staged(run: Run) -> None:
    session, _ = started(run)
    with session._moving:
        for ask in (lambda: session.apply(1), session.read, session.heal):
            with pytest.raises(Misuse, match="being staged"):
                ask()
        assert session.status()["version"] == 0
    session.close()


# --- ranks -----------------------------------------------------------------------------------


class Ring:
    """``gather`` for ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._values: list[Any] = [None] * size

    @property
    def waiting(self) -> int:
        """Ranks that wait for the others."""
        return self._barrier.n_waiting

    def of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather


def on_all(actions: list[Any]) -> None:
    trouble: list[BaseException] = []

    def act(action: Any) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised again below
            trouble.append(error)

    threads = [threading.Thread(target=act, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if trouble:
        raise trouble[0]


def test_ranks_share_a_mirror_and_one_decode(run: Run) -> None:
    run.step()
    ring = Ring(2)
    servers = [Server(rank, 2) for rank in range(2)]
    for server in servers:
        server.load_weights(run.states[0].pairs())
    hosts = [run.host() for _ in range(2)]
    assert [host.writes for host in hosts] == [True, False]
    sessions = [
        Session(server, server.load_weights, host, gather=ring.of(rank))
        for rank, (server, host) in enumerate(zip(servers, hosts))
    ]
    on_all([lambda s=s: s.start(run.base) for s in sessions])
    assert [s.version for s in sessions] == [1, 1]
    for version in range(2, 5):
        run.step()
        on_all([lambda s=s, v=version: s.stage(v) for s in sessions])
        assert [len(host.changes(version - 1) or ()) for host in hosts] == [1, 1]
        for session in sessions:
            session.apply(version)
        assert [s.bits() for s in servers] == [expected(run, version, r, 2) for r in range(2)]
    assert sessions[1].status()["seconds"]["decode_s"] == 0
    for session in sessions:
        session.close()


def test_nobody_moves_the_mirror_while_a_rank_proves_itself_by_it(run: Run) -> None:
    run.step()
    host = run.host()
    host.advance(1)
    host.close()
    run.step()
    ring = Ring(2)
    servers = [Server(rank, 2) for rank in range(2)]
    for server in servers:
        server.load_weights(run.states[1].pairs())

    hosts = [run.host() for _ in range(2)]

    def slowly(weights: Any) -> None:
        while not ring.waiting:  # the writer has got as far as it gets without this rank
            time.sleep(0.01)
        servers[1].load_weights(weights)

    sessions = [
        Session(server, load, host, gather=ring.of(rank))
        for rank, (server, load, host) in enumerate(
            zip(servers, (servers[0].load_weights, slowly), hosts)
        )
    ]
    on_all([lambda s=s: s.start(run.root / "mirror") for s in sessions])
    assert [s.bits() for s in servers] == [expected(run, 2, rank, 2) for rank in range(2)]
    for session in sessions:
        session.close()


def test_a_reader_that_missed_the_journal_takes_whole_tensors(run: Run) -> None:
    writer = run.host()
    writer.advance(0)
    reader = run.host()
    run.step()
    run.step()
    writer.advance(2)
    writer.close()  # empties the journal
    reader.advance(2)
    assert reader.changes(0) is None
    with reader.reading() as tensors:
        for bits, want in zip(tensors, run.states[2].tensors):
            assert np.array_equal(bits, want)
    with pytest.raises(RollbackRefused):
        reader.advance(1)


def test_a_reader_does_not_wait_for_ever(run: Run) -> None:
    writer = run.host()
    writer.advance(0)
    reader = ReadingRank(run.root / "mirror", patience=0.1)
    assert reader.version == 0
    with pytest.raises(BucketUnavailable, match="version 1"):
        reader.advance(1)
    writer.close()


def test_an_engine_of_readers_alone_is_refused(run: Run) -> None:
    writer = run.host()
    writer.advance(0)
    server = Server()
    server.load_weights(run.state.pairs())
    with pytest.raises(Misuse, match="another engine writes"):
        Session(server, server.load_weights, run.host()).start(run.base)
    writer.close()


# --- merging ---------------------------------------------------------------------------------


def test_merged_patches_are_the_patches_one_after_another() -> None:
    state = Checkpoint.random(1)
    steps = [state.patches(Checkpoint.random(s), 0.3, seed=s) for s in range(2, 7)]
    one_by_one = state
    for patches in steps:
        one_by_one = one_by_one.patched(patches)
    merged = merge(steps)
    assert len({patch.ordinal for patch in merged}) == len(merged)
    for patch in merged:
        patch.check()
    for a, b in zip(state.patched(merged).tensors, one_by_one.tensors):
        assert np.array_equal(a, b)


def test_merging_one_version_copies_nothing() -> None:
    state = Checkpoint.random(1)
    patches = state.patches(Checkpoint.random(2), 0.3, seed=0)
    assert all(a is b for a, b in zip(merge([patches]), patches))
    assert merge([[], []]) == []
    assert isinstance(merge([patches, patches])[0], Patch)


def test_a_server_that_is_started_first_waits_for_the_run(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    away = run.root / "away"
    (run.root / "bucket").rename(away)
    server = Server()
    server.load_weights(run.states[0].pairs())
    session = Session(server, server.load_weights, run.host())
    with pytest.raises(BucketNotFound):
        session.start(run.base)
    timer = threading.Timer(0.3, lambda: away.rename(run.root / "bucket"))
    timer.start()
    assert session.start(run.base, patience=20) == 0
    timer.join()
    assert "waiting for a first version, 20 s more" in caplog.text
    session.close()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_settings_are_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_PATIENCE", text)
    with pytest.raises(Misuse, match="THINWIRE_PATIENCE"):
        positive_seconds("THINWIRE_PATIENCE", 1.0)
    monkeypatch.setenv("THINWIRE_PATIENCE", "" if text == "nan" else " 2.5 ")
    assert positive_seconds("THINWIRE_PATIENCE", 1.0) == (1.0 if text == "nan" else 2.5)
