"""``thinwire attest``: real servers read their weights back; the status says what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines._http import EngineServer  # noqa: E402
from engines._run import Run  # noqa: E402
from servers.ports import free_port  # noqa: E402


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[EngineServer]]:
    run = Run(tmp_path / "run")
    with EngineServer(run, "one") as one, EngineServer(run, "two") as two:
        yield [one, two]
    run.publisher.close()


def test_exact(cli: Any, servers: list[EngineServer]) -> None:
    one, two = servers
    out = cli("attest", "--url", one.url, "--url", two.url).stdout
    for server, line in zip(servers, out.splitlines(), strict=True):
        assert line.startswith(f"{server.url}: version 0, ")
        assert line.endswith(": all exact")
        assert "not compared" not in line  # the cast ones are compared with the mirror
    document = cli.json("attest", "--url", one.url)
    assert document["exact"]
    assert document["servers"][0]["tensors"] > 15


def test_one_bit_differs(cli: Any, servers: list[EngineServer]) -> None:
    one, two = servers
    one.module.gate_up.data.view(torch.int16)[3, 3] ^= 1
    said = cli("attest", "--url", one.url, "--url", two.url, status=4)
    assert "1 differ\n  differs: gate\n" in said.stdout
    assert f"{two.url}: version 0" in said.stdout
    document = json.loads(cli("attest", "--url", one.url, "--json", status=4).stdout)
    assert document == {
        "exact": False,
        "servers": [{**document["servers"][0], "url": one.url, "differs": ["gate"]}],
    }


def test_a_server_that_is_not_there(cli: Any, servers: list[EngineServer]) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    said = cli("attest", "--url", gone, "--url", servers[0].url, status=3)
    assert "all exact" in said.stdout
    assert "refused" in said.stderr
    document = json.loads(cli("attest", "--url", gone, "--json", status=3).stdout)
    assert document["exact"] is False
    assert "refused" in document["servers"][0]["error"]
