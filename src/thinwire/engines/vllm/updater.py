"""How a whole engine, all its ranks at once, moves to a version. Knows no vLLM.

Staging goes on while requests are served. Then requests are held where they are, every rank
writes, what was computed from the old weights is forgotten, and requests go on. This runs in the
server's own process: whoever asked for the update may be gone by then.

If the ranks do not all arrive, nothing is resumed: an engine with half a version serves nothing.
Every request to the engine has a limit, so that the outcome is known in bounded time: requests go
on, or the engine is poisoned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from thinwire import errors
from thinwire.engines.readings import add_up

__all__ = ["Ranks", "Updater"]

T = TypeVar("T")

_LOOK_S = 0.02
_log = logging.getLogger("thinwire")


class Ranks(Protocol):
    """An engine as an updater needs it. Holding twice is the same as once."""

    async def call(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's answer."""

    async def pause(self) -> None:
        """Hold requests where they are."""

    async def resume(self) -> None:
        """Let requests go on."""

    async def forget(self) -> None:
        """Drop what was computed from the weights so far and would be used again."""

    async def name(self, version: int) -> None:
        """Say which version serves from now on."""


class Updater:
    """Moves an engine from version to version, one update at a time.

    Args:
        limit: seconds that the engine may take to answer one request; ten times that where every
            weight is read or written. A rank that does not answer while requests are held poisons
            the engine: that is told and can be healed, a hold without end could not.

    Attributes:
        poisoned: why the engine must not serve; empty if it may.
    """

    def __init__(self, ranks: Ranks, *, limit: float = 120.0) -> None:
        self._ranks = ranks
        self._limit = limit
        self._turn = asyncio.Lock()
        self.poisoned = ""
        self._seconds: dict[str, float] = {}

    async def update(self, version: int | None = None) -> dict[str, Any]:
        """Move to a version; None: the newest. Goes on even if the caller is cancelled.

        Returns:
            The version, whether anything moved, and seconds: staging, paused, applying.

        Raises:
            EnginePoisoned: the engine serves nothing until :meth:`heal`.
            What went wrong on a rank, if the engine serves on as before.
        """
        return await asyncio.shield(asyncio.ensure_future(self._update(version)))

    async def _update(self, version: int | None) -> dict[str, Any]:
        async with self._turn:
            if self.poisoned:
                raise errors.EnginePoisoned(self.poisoned)
            began = time.perf_counter()
            target, moves = await self._stage(version)
            stage_s = time.perf_counter() - began
            if not moves:
                return {"version": target, "moved": False}
            paused_s = await self._paused_apply(target)
            status = await self._call({"do": "status"})
            apply_s = max(s.get("seconds", {}).get("apply_s", 0.0) for s in status)
            self._seconds = {"stage_s": stage_s, "paused_s": paused_s, "apply_s": apply_s}
            return {"version": target, "moved": True, **self._seconds}

    # --- the engine, which may not answer -----------------------------------------------

    async def _call(self, request: dict[str, Any], *, times: int = 1) -> list[dict[str, Any]]:
        return await self._within(self._ranks.call(request), request["do"], times)

    async def _within(self, action: Coroutine[Any, Any, T], what: str, times: int = 1) -> T:
        """Wait for an action, but not for ever. It is not cancelled: it may be half done."""
        task = asyncio.ensure_future(action)
        await asyncio.wait({task}, timeout=times * self._limit)
        if task.done():
            return task.result()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise errors.Retryable(
            f"the engine has not answered {what!r} in {times * self._limit:.0f} s",
            hint="see the server's log",
        )

    async def _hold(self) -> None:
        await self._within(self._ranks.pause(), "pause")

    async def _let_go(self) -> None:
        await self._within(self._ranks.resume(), "resume")

    async def _arrive(self, version: int) -> None:
        await self._within(self._ranks.forget(), "forget")
        await self._within(self._ranks.name(version), "name")

    def _poison(self, why: str) -> None:
        self.poisoned = why
        _log.error("thinwire: requests are held until the engine is healed: %s", why)

    async def _stage(self, version: int | None) -> tuple[int, bool]:
        """Have every rank stage the same version; return it, and whether any has to move."""
        await self._settled()  # an earlier request's staging, whatever came of it
        answers = await self._staged(version)
        if version is None:
            version = max(_reached(a) for a in answers if a["writes"])
            if any(_reached(a) != version for a in answers):
                answers = await self._staged(version)
        late = [a for a in answers if _reached(a) != version]
        if late:
            raise errors.DigestMismatch(
                f"a rank is at version {_reached(late[0])} instead of {version}"
            )
        return version, any(a["version"] != version for a in answers)

    async def _staged(self, version: int | None) -> list[dict[str, Any]]:
        _raise_first(await self._call({"do": "stage", "version": version}))
        answers = await self._settled()
        _raise_staging(answers)
        return answers

    async def _settled(self) -> list[dict[str, Any]]:
        """Wait until no rank is staging."""
        while True:
            answers = await self._call({"do": "status"})
            _raise_first(answers)
            if not any(answer["staging"] for answer in answers):
                return answers
            await asyncio.sleep(_LOOK_S)

    async def _paused_apply(self, version: int) -> float:
        """Whatever happens: requests go on, or the engine is poisoned and says so."""
        began = time.perf_counter()
        untouched = True
        try:
            await self._hold()
            untouched = False
            answers = await self._call({"do": "apply", "version": version})
            if all(s.get("version") == version and not s.get("poisoned") for s in answers):
                await self._arrive(version)
                await self._let_go()
                return time.perf_counter() - began
            states = await self._call({"do": "status"})
            untouched = not any(
                "failed" in s or s["poisoned"] or s["version"] == version for s in states
            )
            _raise_first(answers)
            raise errors.EnginePoisoned(f"ranks disagree after version {version}")
        except BaseException as error:
            if not untouched:
                self._poison(f"version {version} was not applied whole: {error}")
                raise
            await self._release_untouched()
            raise

    async def _release_untouched(self) -> None:
        try:
            await self._let_go()
        except BaseException as error:
            self._poison(f"requests could not be let go: {error}")
            raise

    async def heal(self) -> dict[str, Any]:
        """Write everything from the mirror and prove it, with requests held; then let them go on.

        Goes on even if the caller is cancelled.

        Raises:
            What went wrong: the engine is poisoned as before, or more so.
        """
        return await asyncio.shield(asyncio.ensure_future(self._heal()))

    async def _heal(self) -> dict[str, Any]:
        async with self._turn:
            await self._settled()
            serving = not self.poisoned
            try:
                await self._hold()
            except BaseException:
                if serving:
                    await self._release_untouched()
                raise
            try:
                self.poisoned = self.poisoned or "it is being healed"
                answers = await self._call({"do": "heal"}, times=10)
                _raise_first(answers)
                found = {answer["version"] for answer in answers}
                if len(found) != 1:
                    raise errors.EnginePoisoned(f"ranks are at versions {sorted(found)}")
                await self._arrive(answers[0]["version"])
                await self._let_go()
            except BaseException as error:
                self._poison(f"healing failed: {error}")
                raise
            self.poisoned = ""
            return {"version": answers[0]["version"]}

    async def status(self) -> dict[str, Any]:
        """The engine's state, and every rank's; without ranks if they do not answer."""
        silent = ""
        try:
            answers = await self._call({"do": "status"})
        except errors.Retryable as error:
            answers, silent = [], str(error)
        found = {answer.get("version") for answer in answers}
        return {
            "version": found.pop() if len(found) == 1 else None,
            "poisoned": self.poisoned,
            "silent": silent,
            "seconds": self._seconds,
            "ranks": answers,
        }

    async def attest(self) -> dict[str, Any]:
        """Read every weight in every rank's memory; compare their sums with the version's.

        Returns:
            The version, whether all is exact, what differs, and what was not compared (tensors
            that are cast or refused).
        """
        async with self._turn:
            answers = await self._call({"do": "read"}, times=10)
        _raise_first(answers)
        found = add_up(answers)
        agreed = len({answer["version"] for answer in answers}) == 1
        return {
            "version": answers[0]["version"],
            "exact": agreed and not found["differs"],
            **found,
        }


def _reached(answer: dict[str, Any]) -> int:
    staged = answer["staged"]
    return int(answer["version"] if staged is None else staged)


def _raise_first(answers: Sequence[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        if "failed" in answer:
            _raise(rank, answer["failed"], answer["message"], answer["hint"])


def _raise_staging(answers: Sequence[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        if answer["error"]:
            kind, _, message = answer["error"].partition(": ")
            _raise(rank, kind, message, "")


def _raise(rank: int, kind: str, message: str, hint: str) -> None:
    known = getattr(errors, kind, None)
    if not (isinstance(known, type) and issubclass(known, errors.ThinwireError)):
        known, message = errors.ThinwireError, f"{kind}: {message}"
    raise known(f"rank {rank}: {message}", hint=hint or None)
