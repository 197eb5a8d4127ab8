"""A real server follows a run over HTTP while it serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_vllm._http import Server, serving, spoil
from engine_vllm._runs import PROMPTS, Run

LONG = "the quick brown fox jumps over the lazy dog. " * 5  # 225 tokens of one byte each


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("run"), "tied")
    for _ in range(3):
        run.step()
    return run


@pytest.fixture(scope="module")
def server(run: Run) -> Iterator[Server]:
    with serving(run.base, run) as server:
        yield server


def fresh(run: Run, version: int, prompts: list[str]) -> dict[str, object]:
    """What a fresh server of that version's mirror says."""
    with serving(run.pulled(version), None) as server:
        return {prompt: server.generate(prompt) for prompt in prompts}


@pytest.mark.timeout(600)
def test_a_late_server_has_caught_up_before_it_serves(run: Run, server: Server) -> None:
    assert server.version() == 3
    assert server.get("/weight_info") == {"weight_version": "3"}
    assert server.get("/thinwire/attest", {})["exact"]


@pytest.mark.timeout(600)
def test_updates_prefixes_and_requests_in_flight(run: Run, server: Server) -> None:
    before = server.generate(LONG)
    finished = []

    def long_request() -> None:
        finished.append(server.generate("0 1 2 3", tokens=200))

    threads = [threading.Thread(target=long_request) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        version = run.step()
        told = server.get("/thinwire/update", {})
        assert (told["version"], told["moved"]) == (version, True)
    for thread in threads:
        thread.join(120)
    assert [len(tokens) for tokens, *_ in finished] == [200] * 3
    after = {prompt: server.generate(prompt) for prompt in [LONG, *PROMPTS]}
    assert after[LONG] != before
    assert server.get("/thinwire/attest", {})["exact"]
    assert server.get("/weight_info") == {"weight_version": str(version)}
    sums = server.get("/weight_checker", {"action": "checksum"})
    with serving(run.pulled(version), None) as other:
        assert {prompt: other.generate(prompt) for prompt in after} == after
        assert other.get("/weight_checker", {"action": "checksum"}) == sums


@pytest.mark.timeout(600)
def test_a_spoiled_payload_never_reaches_the_engine(run: Run, server: Server) -> None:
    held = server.version()
    before = [server.generate(prompt) for prompt in PROMPTS]
    sums = server.get("/weight_checker", {"action": "checksum"})
    known = set((run.bucket / "deltas").iterdir())
    version = run.step()
    (payload,) = set((run.bucket / "deltas").iterdir()) - known
    whole = spoil(payload)
    for _ in range(2):
        code, told = server.ask("/thinwire/update", {"version": version})
        assert (code, told["error"]["type"]) == (409, "CorruptPayload")
        assert server.version() == held
        assert [server.generate(prompt) for prompt in PROMPTS] == before
        assert server.get("/weight_checker", {"action": "checksum"}) == sums
    payload.write_bytes(whole)
    assert server.get("/thinwire/update", {"version": version})["moved"]
    assert [server.generate(prompt) for prompt in PROMPTS] != before


@pytest.mark.timeout(600)
def test_whoever_asks_may_die(run: Run, server: Server) -> None:
    for after in (0.0, 0.005, 0.02, 0.05, 0.1, 0.2):
        version = run.step()
        server.update_and_vanish(version, after)
        server.wait_for(version)
        assert server.generate(PROMPTS[0])
        assert server.get("/is_paused") == {"is_paused": False}
    assert server.get("/thinwire/attest", {})["exact"]


@pytest.mark.timeout(600)
def test_what_makes_no_sense_is_refused(run: Run, server: Server) -> None:
    held = server.version()
    for body, kind in (
        ({"version": 999}, "Misuse"),
        ({"version": held - 1}, "RollbackRefused"),
        ({"version": "7"}, "Misuse"),
        ([], "Misuse"),
    ):
        code, told = server.ask("/thinwire/update", body)
        assert code in (400, 409)
        assert told["error"]["type"] == kind
    assert server.version() == held
    assert not server.get("/thinwire/update", {"version": held})["moved"]


@pytest.mark.timeout(600)
def test_a_mirror_is_served_and_followed(run: Run, tmp_path: Path) -> None:
    """The server starts from the very folder that it then follows the run with."""
    folder = run.pulled(2)
    with serving(folder, run, mirror=folder) as other:
        assert other.version() == run.version
        version = run.step()
        assert other.get("/thinwire/update", {})["version"] == version
        assert other.get("/thinwire/attest", {})["exact"]
