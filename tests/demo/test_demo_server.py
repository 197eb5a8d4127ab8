"""A real server process with the tiny model, followed over HTTP and through its bucket."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import transformers

from thinwire import Publisher, open_bucket
from thinwire.demo.client import RolloutClient, ServerUnavailable
from thinwire.demo.events import Applied, Ready
from thinwire.demo.processes import Children
from thinwire.demo.proof import fingerprint, folder_sha256
from thinwire.demo.settings import Settings, child_environment

TOKEN = "a-token-for-tests"
LIMITS = {"body_bytes": 20_000, "prompts": 4, "sequences": 16, "max_tokens": 32, "waiting": 2}


@dataclass
class Served:
    """A running server, what follows it, and the trainer's side of its bucket."""

    url: str
    children: Children
    publisher: Publisher
    model: Any
    mirror: Path

    def ask(
        self,
        method: str = "POST",
        path: str = "/v1/completions",
        body: bytes = b"",
        **headers: str,
    ) -> tuple[int, Any]:
        host = urlsplit(self.url).netloc
        connection = http.client.HTTPConnection(host, timeout=60)
        try:
            given = {"Authorization": f"Bearer {TOKEN}", **headers}
            connection.request(method, path, body=body, headers=given)
            response = connection.getresponse()
            assert response.getheader("Content-Type") == "application/json"
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, **fields: Any) -> tuple[int, Any]:
        return self.ask(body=json.dumps(fields).encode())

    def publish(self) -> Applied:
        """Change the masters, publish, and wait until the server has the version."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)
        version = self.publisher.publish(self.model).result().version
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for _, event in self.children.events(0.1):
                if isinstance(event, Applied) and event.version == version:
                    return event
        raise TimeoutError(f"version {version} was not applied")


@pytest.fixture(scope="module")
def served(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    bucket = open_bucket(folder / "bucket")
    settings = Settings.of(bucket=bucket.url, quick=True, steps=1, seed=0)
    children = Children(folder)
    try:
        with Publisher(bucket, model, dtype="bf16", assets=tiny_dir) as publisher:
            mirror = folder / "mirror"
            config = {
                "settings": settings.to_json(),
                "token": TOKEN,
                "mirror": str(mirror),
                "limits": LIMITS,
            }
            children.start("server", "server", config, child_environment(1, bucket.url))
            found = (e for _, e in children.events(60) if isinstance(e, Ready))
            yield Served(next(found).url, children, publisher, model, mirror)
            children.expect_end("server")
            children.send("server", {"stop": True})
            for _ in children.events(2):
                pass  # raises if the server ended with an error
    finally:
        children.end(patience_s=5)


def test_completions(served: Served) -> None:
    status, body = served.complete(
        prompt=["abcd>", "efgh>"], n=3, max_tokens=6, seed=1, logprobs=True
    )
    assert status == 200
    assert [c["prompt_index"] for c in body["choices"]] == [0, 0, 0, 1, 1, 1]
    for choice in body["choices"]:
        assert 1 <= len(choice["token_ids"]) <= 6
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert all(x <= 0 for x in choice["logprobs"]["token_logprobs"])
    assert body["usage"]["prompt_tokens"] == 10
    again = served.complete(prompt=["abcd>", "efgh>"], n=3, max_tokens=6, seed=1)[1]
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in body["choices"]]
    assert again["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"bearer {TOKEN}", TOKEN, "Bearer ü"]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/weights"), ("GET", "/nothing")],
)
def test_nothing_without_the_token(served: Served, method: str, path: str, given: str) -> None:
    status, body = served.ask(method, path, b'{"prompt": "a"}', Authorization=given)
    assert status == 401
    assert body["error"]["code"] == "unauthorized"


def test_a_request_without_the_header_at_all(served: Served) -> None:
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b"401" in raw.makefile("rb").readline()


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b"\xff\xfe"])
def test_bad_json(served: Served, body: bytes) -> None:
    status, answer = served.ask(body=body)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": "a", "max_tokens": 33}, 400),
        ({"prompt": [100_000]}, 400),
        ({"prompt": "a", "frequency_penalty": 1}, 400),
        ({"prompt": ["a"] * 5}, 413),
        ({"prompt": ["a"] * 4, "n": 5}, 413),
        ({"prompt": "a" * 250}, 413),
    ],
)
def test_limits(served: Served, fields: dict[str, Any], status: int) -> None:
    answered, body = served.complete(**fields)
    assert answered == status
    assert body["error"]["message"]


@pytest.mark.parametrize("size", [20_001, 3_000_000])
def test_a_body_that_is_too_large(served: Served, size: int) -> None:
    status, body = served.ask(body=b" " * size)
    assert (status, body["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/../weights", 404),
        ("POST", "/weights", 405),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
    ],
)
def test_other_paths_and_methods(served: Served, method: str, path: str, status: int) -> None:
    assert served.ask(method, path)[0] == status


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: -1\r\n",
        b"Content-Length: many\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"",
    ],
)
def test_bodies_of_unclear_length(served: Served, head: bytes) -> None:
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as raw:
        lead = f"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
        raw.sendall(lead + head + b"\r\n")
        raw.shutdown(socket.SHUT_WR)
        assert raw.makefile("rb").readline().split()[1] in (b"400", b"411")


def test_it_listens_on_loopback_only(served: Served) -> None:
    assert urlsplit(served.url).hostname == "127.0.0.1"


def test_a_connection_is_kept_for_the_next_request(served: Served) -> None:
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=30)
    for _ in range(2):
        connection.request("GET", "/health", headers={"Authorization": f"Bearer {TOKEN}"})
        response = connection.getresponse()
        assert json.loads(response.read())["status"] == "ok"
    connection.close()


def test_more_requests_than_may_wait_are_told_so(served: Served) -> None:
    def ask(seed: int) -> int:
        return served.complete(prompt="abcd>", n=16, max_tokens=32, seed=seed)[0]

    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(ask, range(24)))
    assert set(statuses) == {200, 429}


def test_the_client_tells_what_went_wrong(served: Served) -> None:
    with pytest.raises(ServerUnavailable, match="401"):
        RolloutClient(served.url, "wrong").health()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerUnavailable, match="503"):
            RolloutClient(url, TOKEN, patience=0.3).health()


def test_weights_arrive_through_the_bucket_alone(served: Served) -> None:
    client = RolloutClient(served.url, TOKEN)
    before = client.weights()
    applied = served.publish()
    after = client.weights()
    expected = fingerprint(served.model)
    assert before["weight_version"] < after["weight_version"] == applied.version
    assert before["sha256"] != after["sha256"] == expected.sha256
    assert after["state_digest"] == expected.state_digest
    assert folder_sha256(served.mirror) == expected.sha256
    assert 0 < applied.pause_ms <= applied.apply_ms + 1
    rollouts = client.complete([[97, 62]], n=2, max_tokens=3, temperature=1.0, seed=0)
    assert rollouts.version == applied.version


def test_a_batch_is_written_by_one_version(served: Served) -> None:
    def ask(seed: int) -> Any:
        return served.complete(prompt=["abcd>"] * 4, n=4, max_tokens=32, seed=seed)[1]

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, seed) for seed in range(16)]
        for _ in range(4):
            served.publish()
        versions = [answer.result()["weight_version"] for answer in answers]
    assert all(v["started"] == v["ended"] for v in versions)


def test_the_token_is_not_in_the_process_table(served: Served) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("needs /proc")
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found.append(Path("/proc", entry, "cmdline").read_bytes())
            except OSError:
                continue
    assert any(b"thinwire.demo.worker\0server" in line for line in found)
    assert not any(TOKEN.encode() in line for line in found)
