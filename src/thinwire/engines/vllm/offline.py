"""The same for vLLM's ``LLM`` in one's own process: no server, no routes."""

from __future__ import annotations

import asyncio
from typing import Any

from thinwire.engines.vllm.updater import Updater

__all__ = ["attest_llm", "heal_llm", "llm_status", "update_llm"]


class _OfflineRanks:
    """The ranks behind an ``LLM``, which generates nothing while it is asked something else."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def call(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._llm.collective_rpc("thinwire", args=(request,))
        return answers

    async def pause(self) -> None:
        return

    async def resume(self) -> None:
        return

    async def forget(self) -> None:
        self._llm.reset_prefix_cache(reset_running_requests=True)

    async def name(self, version: int) -> None:
        if hasattr(self._llm, "update_weight_version"):
            self._llm.update_weight_version(str(version))


def update_llm(llm: Any, version: int | None = None) -> dict[str, Any]:
    """Move an ``LLM`` made with ``weight_transfer_config={"backend": "thinwire"}`` to a version.

    Args:
        version: None for the newest.

    Raises:
        As for :meth:`~thinwire.engines.vllm.updater.Updater.update`.
    """

    async def update() -> dict[str, Any]:
        return await Updater(_OfflineRanks(llm)).update(version)

    return asyncio.run(update())


def llm_status(llm: Any) -> dict[str, Any]:
    """Versions, what is staged, what is refused, seconds."""

    async def status() -> dict[str, Any]:
        return await Updater(_OfflineRanks(llm)).status()

    return asyncio.run(status())


def attest_llm(llm: Any) -> dict[str, Any]:
    """Read every weight back and compare with the version's digests."""

    async def attested() -> dict[str, Any]:
        return await Updater(_OfflineRanks(llm)).attest()

    return asyncio.run(attested())


def heal_llm(llm: Any) -> dict[str, Any]:
    """After an update that failed half-way: write everything from the mirror, and prove it."""

    async def healed() -> dict[str, Any]:
        return await Updater(_OfflineRanks(llm)).heal()

    return asyncio.run(healed())
