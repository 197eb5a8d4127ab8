"""Routes on vLLM's API server: move to a version, tell, attest, heal.

====================================  ==========================================================
``POST /thinwire/update``             ``{"version": 7}``, or ``{}`` for the newest; answers when it
                                      serves
``GET /thinwire/status``              versions, what is staged, seconds, what is refused
``POST /thinwire/attest``             reads every weight back; holds up the engine meanwhile
``POST /thinwire/heal``               after a failed update: everything from the mirror, proved
====================================  ==========================================================

Errors are ``{"error": {"type", "message", "hint"}}``: 409 if the engine serves on as before, 503 if
it serves nothing, or nothing new yet, 400 for a request that makes no sense.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from thinwire.engines.vllm import versions
from thinwire.engines.vllm.updater import Updater
from thinwire.errors import EnginePoisoned, Misuse, Retryable, ThinwireError

__all__ = ["AsyncRanks", "Routes"]


class AsyncRanks:
    """The ranks behind vLLM's asynchronous engine client."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def call(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's answer."""
        answers: list[dict[str, Any]] = await self._engine.collective_rpc(
            "thinwire", args=(request,)
        )
        return answers

    async def pause(self) -> None:
        """Hold requests where they are."""
        await versions.pause(self._engine)

    async def resume(self) -> None:
        """Let requests go on."""
        await self._engine.resume_generation()

    async def forget(self) -> None:
        """Prefixes, and what running requests have computed so far, are computed anew."""
        await self._engine.reset_prefix_cache(reset_running_requests=True)

    async def name(self, version: int) -> None:
        """Say which version serves from now on."""
        await versions.name_version(self._engine, str(version))


class Routes:
    """vLLM's ``EndpointPlugin``."""

    name = "thinwire"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the routes."""
        app.add_api_route("/thinwire/update", _route(_update), methods=["POST"])
        app.add_api_route("/thinwire/status", _route(_status), methods=["GET"])
        app.add_api_route("/thinwire/attest", _route(_attest), methods=["POST"])
        app.add_api_route("/thinwire/heal", _route(_heal), methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine, and tell it which version it has started with."""
        state.thinwire = Updater(AsyncRanks(engine_client))
        config = getattr(engine_client, "vllm_config", None)
        transfer = getattr(config, "weight_transfer_config", None)
        if transfer is not None and transfer.backend == self.name:
            version = (await state.thinwire.status())["version"]
            if version is not None:
                await versions.name_version(engine_client, str(version))


Handler = Callable[[Updater, dict[str, Any]], Awaitable[dict[str, Any]]]


async def _update(updater: Updater, body: dict[str, Any]) -> dict[str, Any]:
    version = body.get("version")
    if version is not None and (type(version) is not int or version < 0):
        raise Misuse(f"{version!r} is no version")
    return await updater.update(version)


async def _status(updater: Updater, body: dict[str, Any]) -> dict[str, Any]:
    return await updater.status()


async def _attest(updater: Updater, body: dict[str, Any]) -> dict[str, Any]:
    return await updater.attest()


async def _heal(updater: Updater, body: dict[str, Any]) -> dict[str, Any]:
    return await updater.heal()


def _route(handler: Handler) -> Any:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def route(request: Any) -> Any:
        try:
            data = await request.body()
            body = json.loads(data) if data else {}
            if not isinstance(body, dict):
                raise Misuse("the body is no JSON object")
            return JSONResponse(await handler(request.app.state.thinwire, body))
        except json.JSONDecodeError as error:
            return JSONResponse(_told(Misuse(f"the body is no JSON: {error}")), 400)
        except ThinwireError as error:
            return JSONResponse(_told(error), _code(error))

    route.__annotations__ = {"request": Request}
    return route


def _told(error: ThinwireError) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": str(error), "hint": error.hint}}


def _code(error: ThinwireError) -> int:
    if isinstance(error, (EnginePoisoned, Retryable)):
        return 503
    return 400 if isinstance(error, Misuse) else 409
