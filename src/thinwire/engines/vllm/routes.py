"""Routes on vLLM's API server: move to a version, tell, attest, heal.

====================================  ==========================================================
``POST /thinwire/update``             ``{"version": 7}``, or ``{}`` for the newest; answers when it
                                      serves
``GET /thinwire/status``              versions, what is staged, seconds, what is refused
``POST /thinwire/attest``             reads every weight back; holds up the engine meanwhile
``POST /thinwire/heal``               after a failed update: everything from the mirror, proved
====================================  ==========================================================

Errors are ``{"error": {"type", "message", "hint"}}``: 409 if the engine serves on as before, 503 if
it serves nothing, or nothing new yet, 400 for a request that makes no sense, 401 without the key.

A server's ``--api-key`` guards these routes as well: vLLM's own check covers only some paths, none
of them a plugin's.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from thinwire.engines.vllm import versions
from thinwire.engines.vllm.settings import positive_seconds
from thinwire.engines.vllm.updater import Updater
from thinwire.errors import EnginePoisoned, Misuse, Retryable, ThinwireError

__all__ = ["HANDLERS", "AsyncRanks", "Handler", "Routes", "respond"]


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
        for (method, path), handler in HANDLERS.items():
            app.add_api_route(path, _route(handler), methods=[method])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine, and tell it which version it has started with."""
        limit = positive_seconds("THINWIRE_PAUSE_LIMIT", 120.0)
        state.thinwire = Updater(AsyncRanks(engine_client), limit=limit)
        state.thinwire_keys = versions.api_keys(args)
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


HANDLERS: dict[tuple[str, str], Handler] = {
    ("POST", "/thinwire/update"): _update,
    ("GET", "/thinwire/status"): _status,
    ("POST", "/thinwire/attest"): _attest,
    ("POST", "/thinwire/heal"): _heal,
}
"""By method and path."""


async def respond(
    handler: Handler,
    updater: Updater,
    data: bytes,
    *,
    keys: Sequence[str] = (),
    authorization: str | None = None,
) -> tuple[int, dict[str, Any]]:
    """Handle a request, whatever the web framework.

    Args:
        data: the request's body.
        keys: one of which the request has to carry, if there are any.
        authorization: the request's header of that name.

    Returns:
        Status code and JSON document.
    """
    try:
        if keys and not _authorized(keys, authorization):
            told = {"type": "Unauthorized", "message": "the API key is missing or wrong"}
            return 401, {"error": {**told, "hint": "send it as a bearer token"}}
        body = json.loads(data) if data else {}
        if not isinstance(body, dict):
            raise Misuse("the body is no JSON object")
        return 200, await handler(updater, body)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return 400, _told(Misuse(f"the body is no JSON: {error}"))
    except ThinwireError as error:
        return _code(error), _told(error)


def _authorized(keys: Sequence[str], authorization: str | None) -> bool:
    scheme, _, sent = (authorization or "").partition(" ")
    fits = [hmac.compare_digest(sent.encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(fits)


def _route(handler: Handler) -> Any:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def route(request: Any) -> Any:
        state = request.app.state
        code, document = await respond(
            handler,
            state.thinwire,
            await request.body(),
            keys=state.thinwire_keys,
            authorization=request.headers.get("authorization"),
        )
        return JSONResponse(document, code)

    route.__annotations__ = {"request": Request}
    return route


def _told(error: ThinwireError) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": str(error), "hint": error.hint}}


def _code(error: ThinwireError) -> int:
    if isinstance(error, (EnginePoisoned, Retryable)):
        return 503
    return 400 if isinstance(error, Misuse) else 409
