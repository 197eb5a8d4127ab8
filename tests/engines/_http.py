"""The plugin's routes over a session on a plain module, behind a real HTTP server: all but vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from engines._run import Run
from engines._server import Server
from servers.json_http import JsonServer
from servers.ports import free_port
from thinwire.engines.session import Session
from thinwire.engines.vllm.requests import answer
from thinwire.engines.vllm.routes import HANDLERS, respond
from thinwire.engines.vllm.updater import Updater


class EngineServer:
    """Between ``start`` and ``stop``, or inside ``with``; it keeps its port and its mirror.

    Attributes:
        requests: (method, path) of every request.
        held: whether requests for tokens would be held now.
        holds: how often they were.
        named: the version that it was last told it serves.
        slow: while this is clear, staging takes for ever.
    """

    def __init__(self, run: Run, name: str, *, keys: Sequence[str] = ()) -> None:
        self.run, self.mirror, self.keys = run, name, keys
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[tuple[str, str]] = []
        self.held, self.holds = False, 0
        self.named = -1
        self.slow = threading.Event()
        self.slow.set()

    def start(self) -> EngineServer:
        self.module = Server()
        self.module.load_weights(self.run.states[0].pairs())
        self.session = Session(self.module, self.module.load_weights, self.run.host(self.mirror))
        self.session.start(self.run.base)
        self.loop = asyncio.new_event_loop()
        self.updater = Updater(self, limit=20)
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._http = JsonServer(self.port, self.handle)
        return self

    def stop(self) -> None:
        self.slow.set()
        self._http.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.session.close()

    def __enter__(self) -> EngineServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def is_at(self, version: int) -> bool:
        """It serves this version, bit by bit."""
        other = Server()
        other.load_weights(self.run.states[version].pairs())
        serves = self.session.version == version and not (self.held or self.updater.poisoned)
        return serves and self.module.bits() == other.bits()

    # --- the engine ---------------------------------------------------------------------

    async def call(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["do"] == "stage":
            await asyncio.to_thread(self.slow.wait)
        return [await asyncio.to_thread(answer, self.session, request)]

    async def pause(self) -> None:
        self.held = True
        self.holds += 1

    async def resume(self) -> None:
        self.held = False

    async def forget(self) -> None:
        return

    async def name(self, version: int) -> None:
        self.named = version

    def handle(
        self, method: str, path: str, body: bytes, authorization: str | None
    ) -> tuple[int, Any]:
        self.requests.append((method, path))
        handler = HANDLERS.get((method, path))
        if handler is None:
            return 404, {"detail": "Not Found"}
        action = respond(handler, self.updater, body, keys=self.keys, authorization=authorization)
        return asyncio.run_coroutine_threadsafe(action, self.loop).result(120)
