"""A real server follows a run over HTTP while it serves."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_vllm._faults import install
from engine_vllm._http import Server, serving, spoil
from engine_vllm._runs import PROMPTS, Run

KEY = "s3cret"
LIMIT_S = 5
LONG = "the quick brown fox jumps over the lazy dog. " * 5  # 225 tokens of one byte each


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("run"), "tied")
    for _ in range(3):
        run.step()
    return run


@pytest.fixture(scope="module")
def faults(run: Run) -> Path:
    """The folder in which a file called ``fault`` makes writing go wrong."""
    return run.root / "faults"


@pytest.fixture(scope="module")
def server(run: Run, faults: Path) -> Iterator[Server]:
    more = {**install(faults), "VLLM_API_KEY": KEY, "THINWIRE_PAUSE_LIMIT": str(LIMIT_S)}
    with serving(run.base, run, **more) as server:
        yield server


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
    sums = server.checksums()
    with serving(run.pulled(version), None) as other:
        assert {prompt: other.generate(prompt) for prompt in after} == after
        assert other.checksums() == sums


@pytest.mark.timeout(600)
def test_a_spoiled_payload_never_reaches_the_engine(run: Run, server: Server) -> None:
    held = server.version()
    before = [server.generate(prompt) for prompt in PROMPTS]
    sums = server.checksums()
    known = set((run.bucket / "deltas").iterdir())
    version = run.step()
    (payload,) = set((run.bucket / "deltas").iterdir()) - known
    whole = spoil(payload)
    for _ in range(2):
        code, told = server.ask("/thinwire/update", {"version": version})
        assert (code, told["error"]["type"]) == (409, "CorruptPayload")
        assert server.version() == held
        assert [server.generate(prompt) for prompt in PROMPTS] == before
        assert server.checksums() == sums
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
def test_the_key_guards_the_routes(run: Run, server: Server) -> None:
    for path, body in (
        ("/thinwire/status", None),
        ("/thinwire/update", {}),
        ("/thinwire/attest", {}),
        ("/thinwire/heal", {}),
    ):
        for key in ("", "wrong"):
            code, told = server.ask(path, body, key=key)
            assert (code, told["error"]["type"]) == (401, "Unauthorized")


def until(server: Server, run: Run, version: int, *options: str) -> list[dict[str, Any]]:
    """Follow to a version; what the command says of each step."""
    following = server.thinwire(
        "follow", run.bucket, "--until", version, "--poll", 0.1, "--json", *options
    )
    out, err = following.communicate(timeout=120)
    assert following.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.timeout(600)
def test_following_and_being_killed_at_random_moments(run: Run, server: Server) -> None:
    rng = random.Random(5)
    for _ in range(4):
        version = run.step()
        following = server.thinwire("follow", run.bucket, "--poll", 0.05)
        time.sleep(0.3 + rng.random())
        following.kill()
        following.communicate(timeout=20)
        assert server.generate(PROMPTS[0])
        assert server.get("/is_paused") == {"is_paused": False}
    run.step()
    version = run.step()
    (step,) = until(server, run, version, "--attest")
    assert (step["version"], step["moved"], step["healed"]) == (version, True, False)
    assert step["attested"]["exact"]
    assert 0 < step["apply_s"] <= step["paused_s"] < step["stage_s"] + 60
    told = server.thinwire("attest").communicate(timeout=60)[0]
    assert (
        told == f"{server.url}: version {version}, {len(run.state)} tensors read back: all exact\n"
    )
    after = [server.generate(prompt) for prompt in PROMPTS]
    with serving(run.pulled(version), None) as other:
        assert [other.generate(prompt) for prompt in PROMPTS] == after


@pytest.mark.timeout(600)
def test_half_a_version_serves_nothing_until_it_is_healed(
    run: Run, server: Server, faults: Path
) -> None:
    before = server.generate(PROMPTS[0])
    (faults / "fault").write_text("half")
    version = run.step()
    code, told = server.ask("/thinwire/update", {})
    assert (code, told["error"]["type"]) == (503, "EnginePoisoned")
    assert server.get("/thinwire/status")["poisoned"]
    answered = []
    waiting = threading.Thread(target=lambda: answered.append(server.generate(PROMPTS[0])))
    waiting.start()
    waiting.join(2)
    assert answered == []
    assert server.ask("/thinwire/update", {})[0] == 503
    (faults / "fault").unlink()
    (step,) = until(server, run, version, "--attest")
    assert (step["healed"], step["attested"]["exact"]) == (True, True)
    waiting.join(60)
    assert len(answered) == 1
    assert answered[0] != before
    assert answered[0] == server.generate(PROMPTS[0])
    assert server.get("/weight_info") == {"weight_version": str(version)}


@pytest.mark.timeout(600)
def test_a_rank_that_does_not_answer_is_told_and_healed(
    run: Run, server: Server, faults: Path
) -> None:
    (faults / "fault").write_text(f"hang {2 * LIMIT_S}")
    version = run.step()
    code, told = server.ask("/thinwire/update", {})
    assert code == 503
    assert f"has not answered 'apply' in {LIMIT_S} s" in told["error"]["message"]
    assert "was not applied whole" in server.get("/thinwire/status")["poisoned"]
    (step,) = until(server, run, version, "--attest")
    assert (step["healed"], step["attested"]["exact"]) == (True, True)
    assert server.generate(PROMPTS[0])
    log = (run.root / "server.log").read_text()
    assert "requests are held until the engine is healed" in log


@pytest.mark.timeout(600)
def test_a_mirror_is_served_and_followed(run: Run, tmp_path: Path) -> None:
    """The server starts from the very folder that it then follows the run with."""
    folder = run.pulled(2)
    with serving(folder, run, mirror=folder) as other:
        assert other.version() == run.version
        version = run.step()
        assert other.get("/thinwire/update", {})["version"] == version
        assert other.get("/thinwire/attest", {})["exact"]
