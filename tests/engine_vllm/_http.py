"""A real `vllm serve` that follows a run, and a client of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_vllm._runs import Run, environment
from servers.ports import HOST, ServerProcess, answers, free_port


class Server:
    """What a client can ask."""

    def __init__(self, port: int, model: str, key: str = "") -> None:
        self.port = port
        self.model = model
        self.key = key
        self.url = f"http://{HOST}:{port}"

    def ask(
        self, path: str, body: Any = None, *, timeout: float = 120, key: str | None = None
    ) -> tuple[int, Any]:
        """Status code and JSON; POST if there is a body."""
        headers = {"Content-Type": "application/json"}
        if key or (key is None and self.key):
            headers["Authorization"] = f"Bearer {key or self.key}"
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def get(self, path: str, body: Any = None) -> Any:
        """The JSON of a request that succeeds."""
        code, found = self.ask(path, body)
        if code != 200:
            raise RuntimeError(f"{path}: {code} {found}")
        return found

    def generate(self, prompt: str, tokens: int = 12) -> Any:
        """Greedy tokens and the logprobs of the most likely ones."""
        (choice,) = self.get(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "logprobs": 3,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )["choices"]
        steps = choice["logprobs"]
        return [
            choice["token_ids"],
            steps["token_logprobs"],
            [sorted(top.values()) for top in steps["top_logprobs"]],
        ]

    def checksums(self) -> Any:
        """vLLM's own sums of what is in memory; None before 0.32."""
        code, found = self.ask("/weight_checker", {"action": "checksum"})
        if code not in (200, 404):
            raise RuntimeError(f"/weight_checker: {code} {found}")
        return found if code == 200 else None

    def update_and_vanish(self, version: int, after: float) -> None:
        """Ask for a version and be gone before the answer."""
        body = json.dumps({"version": version}).encode()
        with socket.create_connection((HOST, self.port)) as connection:
            head = [
                "POST /thinwire/update HTTP/1.1",
                "Host: x",
                f"Authorization: Bearer {self.key}",
                f"Content-Length: {len(body)}",
            ]
            connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
            time.sleep(after)

    def version(self) -> int:
        """The version that serves."""
        return int(self.get("/thinwire/status")["version"])

    def thinwire(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a thinwire command that speaks to this server."""
        program = [sys.executable, "-c", "from thinwire.cli import main; main()"]
        return subprocess.Popen(
            [*program, *map(str, arguments), "--url", self.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "VLLM_API_KEY": self.key},
        )

    def wait_for(self, version: int, patience: float = 60) -> None:
        """Wait until a version serves."""
        end = time.monotonic() + patience
        while self.version() != version:
            if time.monotonic() > end:
                raise RuntimeError(f"version {version} does not come")
            time.sleep(0.05)


@contextmanager
def serving(
    model: Path, run: Run | None, *options: str, mirror: Path | None = None, **more: str
) -> Iterator[Server]:
    """A server of ``model`` for as long as the context lasts; ``VLLM_API_KEY`` guards it."""
    port = free_port()
    if run is not None:
        more["THINWIRE_BUCKET"] = str(run.bucket)
        more["THINWIRE_MIRROR"] = str(mirror or run.root / "mirror")
    root = model.parent if run is None else run.root
    process = ServerProcess(
        [
            sys.executable,
            Path(__file__).parents[2] / "examples" / "wordle" / "vllm_server.py",
            *("serve", str(model), "--host", HOST, "--port", str(port)),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256"),
            *("--max-num-seqs", "4", "--gpu-memory-utilization", "0.1", "--seed", "0"),
            *("--weight-transfer-config", '{"backend": "thinwire"}', *options),
        ],
        ready=lambda: answers(f"http://{HOST}:{port}/health"),
        log=root / "server.log",
        environment=environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_SERVER_DEV_MODE="1", **more
        ),
        patience=180,
    )
    with process:
        yield Server(port, str(model), more.get("VLLM_API_KEY", ""))


def spoil(path: Path) -> bytes:
    """Change a byte in the middle of a file; return what it held."""
    data = path.read_bytes()
    spoiled = bytearray(data)
    spoiled[len(data) // 2] ^= 1
    path.write_bytes(spoiled)
    return data
