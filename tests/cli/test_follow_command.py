"""``thinwire follow``: real servers with a session each follow a bucket, whatever happens."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines._http import EngineServer  # noqa: E402
from engines._run import Run  # noqa: E402
from servers.ports import free_port  # noqa: E402
from thinwire.bucket import open_bucket  # noqa: E402
from thinwire.engines.client import UpdateClient  # noqa: E402
from thinwire.engines.follow import Arrival, Follower, Trouble  # noqa: E402
from thinwire.engines.scatter import Staged  # noqa: E402
from thinwire.errors import HistoryRewritten, Misuse  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    yield run
    run.publisher.close()


@pytest.fixture
def servers(run: Run) -> Iterator[list[EngineServer]]:
    with EngineServer(run, "one") as one, EngineServer(run, "two") as two:
        yield [one, two]


def urls(servers: list[EngineServer]) -> list[str]:
    return [part for server in servers for part in ("--url", server.url)]


def wait(condition: Callable[[], object], patience: float = 20) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


class Background:
    """A follower in a thread, with fast looks and retries."""

    def __init__(self, run: Run, servers: list[EngineServer], **options: Any) -> None:
        self.events: list[Arrival | Trouble] = []
        self.error: BaseException | None = None
        self.stop = threading.Event()
        options = {"poll": 0.02, "retry": 0.05, "look": 0.1, **options}
        timeout = options.pop("timeout", 20)
        self.follower = Follower(
            open_bucket(run.url),
            [UpdateClient(server.url, timeout=timeout) for server in servers],
            self.events.append,
            **options,
        )
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.follower.run(self.stop)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def __enter__(self) -> Background:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()

    def troubles(self, server: EngineServer) -> list[str]:
        return [e.message for e in self.events if isinstance(e, Trouble) and e.url == server.url]


def test_every_server_serves_every_version(cli: Any, run: Run, servers: list[EngineServer]) -> None:
    for version in (1, 2):
        run.step()
        out = cli("follow", run.root / "bucket", *urls(servers), "--until", version).stdout
        lines = sorted(out.splitlines())
        assert len(lines) == 2
        for server, line in zip(sorted(servers, key=lambda s: s.url), lines):
            assert line.startswith(f"{server.url}: version {version}, staged in ")
            assert "paused" in line
            assert server.is_at(version)
            assert server.named == version


def test_json_and_attestation(cli: Any, run: Run, servers: list[EngineServer]) -> None:
    run.step()
    out = cli("follow", run.root / "bucket", *urls(servers), "--until", 1, "--attest", "--json")
    rows = [json.loads(line) for line in out.stdout.splitlines()]
    assert {row["url"] for row in rows} == {server.url for server in servers}
    for row in rows:
        assert (row["version"], row["moved"], row["healed"]) == (1, True, False)
        assert row["stage_s"] > 0
        assert row["paused_s"] >= row["apply_s"] > 0
        assert row["attested"]["exact"]
    again = cli("follow", run.root / "bucket", *urls(servers[:1]), "--until", 1).stdout
    assert again == f"{servers[0].url}: version 1, already\n"


def test_until_is_not_passed(cli: Any, run: Run, servers: list[EngineServer]) -> None:
    run.step()
    run.step()
    cli("follow", run.root / "bucket", *urls(servers), "--until", 1)
    assert all(server.is_at(1) for server in servers)


def test_a_dead_server_holds_up_nobody_and_is_brought_back(
    run: Run, servers: list[EngineServer]
) -> None:
    alive, dead = servers
    dead.stop()
    with Background(run, servers) as background:
        for version in (1, 2, 3):
            run.step()
            wait(lambda v=version: alive.is_at(v))
        assert len(background.troubles(dead)) == 1
        dead.start()  # from version 0: it catches up by itself
        run.step()
        wait(lambda: alive.is_at(4) and dead.is_at(4))
        alive.stop()
        run.step()
        wait(lambda: dead.is_at(5))
        alive.start()
    assert background.error is None


def test_a_slow_server_holds_up_nobody(run: Run, servers: list[EngineServer]) -> None:
    quick, slow = servers
    slow.slow.clear()
    with Background(run, servers, timeout=0.5) as background:
        for version in (1, 2, 3):
            run.step()
            wait(lambda v=version: quick.is_at(v))
        wait(lambda: background.troubles(slow))
        slow.slow.set()
        wait(lambda: slow.is_at(3))


def test_a_poisoned_server_is_healed(
    run: Run, servers: list[EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Staged.write
    broken = 2

    def write(staged: Staged) -> None:
        nonlocal broken
        if broken:
            broken -= 1
            whole(Staged(staged._changes[:1]))
            raise RuntimeError("the device is gone")
        whole(staged)

    monkeypatch.setattr(Staged, "write", write)
    with Background(run, servers) as background:
        run.step()
        wait(lambda: all(server.is_at(1) for server in servers))
        assert broken == 0
        wait(lambda: len([e for e in background.events if isinstance(e, Arrival)]) >= 4)
    assert [e.healed for e in background.events if isinstance(e, Arrival) and e.version] == [
        True
    ] * 2


def test_a_server_poisoned_by_somebody_else_is_healed(
    run: Run, servers: list[EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Background(run, servers) as background:
        wait(lambda: len(background.events) == 2)
        one = servers[0]
        one.updater.poisoned = one.session.poisoned = "half a version"
        one.held = True
        with torch.no_grad():
            one.module.qkv.fill_(1)
        wait(lambda: one.is_at(0))


def test_memory_that_has_rotted_is_found_and_healed(run: Run, servers: list[EngineServer]) -> None:
    one = servers[0]
    with Background(run, servers[:1], attest=True) as background:
        wait(lambda: background.events)
        with torch.no_grad():
            one.module.norm.zero_()
        run.step(0.01)
        wait(lambda: one.is_at(1))
        wait(lambda: len(background.events) == 3)
    (trouble,) = background.troubles(one)
    assert "norm: healing" in trouble
    assert background.events[-1].attested["exact"]


def test_killed_at_random_moments(
    run: Run, servers: list[EngineServer], process: Callable[..., Any]
) -> None:
    rng = random.Random(7)
    for _ in range(3):
        version = run.step()
        follower = process("follow", run.root / "bucket", *urls(servers), "--poll", 0.02)
        time.sleep(0.3 + rng.random() * 0.5)
        follower.send_signal(signal.SIGKILL)
        follower.communicate(timeout=20)
        wait(lambda: not any(server.held for server in servers))
        # an update that was asked for goes on, so the version may change while one looks
        wait(lambda: all(server.is_at(server.session.version) for server in servers))
    follower = process("follow", run.root / "bucket", *urls(servers), "--until", version)
    out, err = follower.communicate(timeout=30)
    assert (follower.returncode, err) == (0, "")
    assert len(out.splitlines()) == 2
    assert all(server.is_at(version) for server in servers)


def test_a_run_that_begins_later(run: Run, servers: list[EngineServer], tmp_path: Path) -> None:
    away = tmp_path / "away"
    (run.root / "bucket").rename(away)
    with Background(run, servers, until=0, patience=20) as background:
        wait(lambda: background.events)
        (trouble,) = background.events
        assert "trying again for up to 20 s" in trouble.hint
        away.rename(run.root / "bucket")
        background.thread.join(20)
    assert background.error is None
    assert len(background.events) == 3


def test_a_bucket_that_tells_of_changes_is_not_polled(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", url=f"memory://{tmp_path.name}")
    with EngineServer(run, "one") as server, Background(run, [server], poll=3600):
        wait(lambda: ("POST", "/thinwire/update") in server.requests)
        for version in (1, 2):
            run.step()
            wait(lambda v=version: server.is_at(v))
    run.publisher.close()


def test_patience_ends(cli: Any, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    options = ["--url", url, "--patience", 0.2, "--poll", 0.05]
    result = cli("follow", tmp_path / "nowhere", *options, status=2)
    assert "trying again for up to 0 s" in result.stderr
    assert "error: no bucket at" in result.stderr


def test_a_history_that_is_rewritten(
    run: Run, servers: list[EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.step()
    monkeypatch.setattr("thinwire.engines.follow._CONFIRM_EVERY_S", 0.05)
    with Background(run, servers) as background:
        wait(lambda: all(server.is_at(1) for server in servers))
        (run.root / "bucket/commits/0000000001.json").unlink()
        wait(lambda: background.error is not None)
    assert isinstance(background.error, HistoryRewritten)


def test_the_key(cli: Any, run: Run) -> None:
    with EngineServer(run, "guarded", keys=["first", "s3cret"]) as server:
        run.step()
        base = ["follow", run.root / "bucket", "--url", server.url, "--until", 1]
        cli(*base, "--api-key", "s3cret")
        assert server.is_at(1)
        for key in ("wrong", ""):
            assert UpdateClient(server.url, token=key)._ask("GET", "/thinwire/status")[0] == 401
        for method, path in (
            ("POST", "/thinwire/update"),
            ("POST", "/thinwire/heal"),
            ("POST", "/thinwire/attest"),
        ):
            code, told = UpdateClient(server.url)._ask(method, path, {})
            assert (code, told["error"]["type"]) == (401, "Unauthorized")
        assert "wants its API key" in cli.fails("attest", "--url", server.url, status=5)


def test_what_makes_no_sense(cli: Any, tmp_path: Path) -> None:
    url = "http://127.0.0.1:1"
    assert "named twice" in cli.fails(
        "follow", tmp_path, "--url", url, "--url", url + "/", status=2
    )
    assert "not a server's URL" in cli.fails("follow", tmp_path, "--url", "host:80", status=2)
    with pytest.raises(Misuse, match="no server"):
        Follower(open_bucket(tmp_path), [], print)
