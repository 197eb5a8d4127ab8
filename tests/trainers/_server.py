"""A server with a replica behind it, which answers thinwire's routes as the vLLM plugin does."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from servers.json_http import JsonServer
from servers.ports import free_port
from thinwire import Replica, open_bucket
from thinwire.engines.vllm.routes import respond
from thinwire.errors import EnginePoisoned, ThinwireError


class ReplicaServer:
    """Between ``start`` and ``stop``, or inside ``with``; it keeps its port and its mirror.

    Attributes:
        requests: (method, path, body) of every request.
        open: while this is clear, updates take forever.
        poisoned: as an engine that wrote half a version.
        refuses: raised for every update, if set.
        key: that every request has to carry, if set.
    """

    def __init__(self, bucket: Path, mirror: Path) -> None:
        self.bucket, self.mirror = bucket, mirror
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[tuple[str, str, Any]] = []
        self.open = threading.Event()
        self.open.set()
        self.poisoned = False
        self.refuses: ThinwireError | None = None
        self.key = ""
        self._replica: Replica | None = None
        self._http: JsonServer | None = None
        self._turn = threading.Lock()

    @property
    def version(self) -> int | None:
        return None if self._replica is None else self._replica.version

    def bits(self) -> dict[str, np.ndarray[Any, Any]]:
        """What the replica holds."""
        assert self._replica is not None
        return {
            spec.name: tensor.view(np.int16).copy()
            for spec, tensor in zip(self._replica.schema, self._replica.mirror.tensors)
        }

    def start(self) -> ReplicaServer:
        self._replica = Replica(open_bucket(self.bucket), self.mirror)
        self._http = JsonServer(self.port, self.answer)
        return self

    def stop(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            self.open.set()
            http.stop()
        replica, self._replica = self._replica, None
        if replica is not None:
            with self._turn:
                replica.close()

    def __enter__(self) -> ReplicaServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --- answers --------------------------------------------------------------------------

    def answer(self, method: str, path: str, data: bytes, key: str | None) -> tuple[int, Any]:
        self.requests.append((method, path, json.loads(data or b"{}")))
        if (method, path) == ("POST", "/inference/v1/generate"):
            return self._generate(json.loads(data))
        handlers = {
            ("POST", "/thinwire/update"): self._update,
            ("GET", "/thinwire/status"): self._status,
            ("POST", "/thinwire/heal"): self._heal,
        }
        handler = handlers.get((method, path))
        if handler is None:
            return 404, {"detail": "Not Found"}
        known = [self.key] if self.key else []
        # the plugin's own errors and codes; there is no engine whose updater it could be given
        told = respond(handler, None, data, keys=known, authorization=key)  # type: ignore[arg-type]
        return asyncio.run(told)

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        """What vLLM answers, with tokens drawn at random."""
        if self.version is None:
            return 503, {}
        tokens = random.choices(range(97, 123), k=body["sampling_params"]["max_tokens"])
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -5.0} for _ in tokens]},
            "weight_versions": [{"version": str(self.version), "start": 0, "end": len(tokens)}],
        }
        return 200, {"choices": [choice]}

    async def _update(self, _: object, body: dict[str, Any]) -> dict[str, Any]:
        self.open.wait()
        if self.refuses is not None:
            raise self.refuses
        if self.poisoned:
            raise EnginePoisoned("half a version")
        with self._turn:
            assert self._replica is not None
            moved = bool(self._replica.sync(body.get("version")))
            return {"version": self._replica.version, "moved": moved}

    async def _status(self, _: object, body: dict[str, Any]) -> dict[str, Any]:
        return {"version": self.version, "poisoned": "half" * self.poisoned}

    async def _heal(self, _: object, body: dict[str, Any]) -> dict[str, Any]:
        self.poisoned = False
        return {"version": self.version}
