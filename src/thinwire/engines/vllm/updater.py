"""How a whole engine, all its ranks at once, moves to a version. Knows no vLLM.

Staging goes on while requests are served. Then requests are held where they are, every rank
writes, what was computed from the old weights is forgotten, and requests go on. This runs in the
server's own process: whoever asked for the update may be gone by then.

If the ranks do not all arrive, nothing is resumed: an engine with half a version serves nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from thinwire import errors
from thinwire.digest import TensorDigest
from thinwire.engines.attest import Reading, sum_readings
from thinwire.engines.regions import Region

__all__ = ["Ranks", "Updater"]

_LOOK_S = 0.02


class Ranks(Protocol):
    """An engine as an updater needs it."""

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

    Attributes:
        poisoned: why the engine must not serve; empty if it may.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
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
            status = await self._ranks.call({"do": "status"})
            apply_s = max(s.get("seconds", {}).get("apply_s", 0.0) for s in status)
            self._seconds = {"stage_s": stage_s, "paused_s": paused_s, "apply_s": apply_s}
            return {"version": target, "moved": True, **self._seconds}

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
        _raise_first(await self._ranks.call({"do": "stage", "version": version}))
        answers = await self._settled()
        _raise_staging(answers)
        return answers

    async def _settled(self) -> list[dict[str, Any]]:
        """Wait until no rank is staging."""
        while True:
            answers = await self._ranks.call({"do": "status"})
            _raise_first(answers)
            if not any(answer["staging"] for answer in answers):
                return answers
            await asyncio.sleep(_LOOK_S)

    async def _paused_apply(self, version: int) -> float:
        began = time.perf_counter()
        untouched = True
        try:
            await self._ranks.pause()
            untouched = False
            answers = await self._ranks.call({"do": "apply", "version": version})
            if all(s.get("version") == version and not s.get("poisoned") for s in answers):
                await self._ranks.forget()
                await self._ranks.name(version)
                await self._ranks.resume()
                return time.perf_counter() - began
            states = await self._ranks.call({"do": "status"})
            untouched = not any(
                "failed" in s or s["poisoned"] or s["version"] == version for s in states
            )
            _raise_first(answers)
            raise errors.EnginePoisoned(f"ranks disagree after version {version}")
        except BaseException as error:
            if untouched:
                await self._ranks.resume()
            else:
                self.poisoned = f"version {version} was not applied whole: {error}"
            raise

    async def heal(self) -> dict[str, Any]:
        """Write everything from the mirror and prove it, with requests held; then let them go on.

        Raises:
            What went wrong: the engine is poisoned as before, or more so.
        """
        async with self._turn:
            self.poisoned = self.poisoned or "it is being healed"
            await self._ranks.pause()
            answers = await self._ranks.call({"do": "heal"})
            _raise_first(answers)
            found = {answer["version"] for answer in answers}
            if len(found) != 1:
                raise errors.EnginePoisoned(f"ranks are at versions {sorted(found)}")
            await self._ranks.forget()
            await self._ranks.name(answers[0]["version"])
            self.poisoned = ""
            await self._ranks.resume()
            return {"version": answers[0]["version"]}

    async def status(self) -> dict[str, Any]:
        """The engine's state, and every rank's."""
        answers = await self._ranks.call({"do": "status"})
        found = {answer.get("version") for answer in answers}
        return {
            "version": found.pop() if len(found) == 1 else None,
            "poisoned": self.poisoned,
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
            answers = await self._ranks.call({"do": "read"})
        _raise_first(answers)
        expected: dict[str, list[Any]] = {}
        for answer in answers:
            expected.update(answer["expected"])
        compared: set[str] = set()
        differs = []
        for name, elements, digest in sum_readings([_readings(a) for a in answers]):
            if name in expected:
                compared.add(name)
                numel, lo, hi = expected[name]
                if (elements, digest) != (numel, TensorDigest(int(lo, 16), int(hi, 16))):
                    differs.append(name)
        names = {name for answer in answers for name in answer["readings"]}
        return {
            "version": answers[0]["version"],
            "exact": not differs and len({a["version"] for a in answers}) == 1,
            "tensors": len(compared),
            "differs": sorted(differs),
            "not_compared": sorted(names - compared),
        }


def _reached(answer: dict[str, Any]) -> int:
    staged = answer["staged"]
    return int(answer["version"] if staged is None else staged)


def _readings(answer: dict[str, Any]) -> dict[str, Sequence[Reading]]:
    return {name: [_reading(*row) for row in rows] for name, rows in answer["readings"].items()}


def _reading(offset: int, shape: list[int], stride: list[int], lo: str, hi: str) -> Reading:
    region = Region(offset, tuple(shape), tuple(stride))
    if lo == "contradiction":  # copies that differ have no digest: the sum must match nothing
        return Reading(region, TensorDigest(-1, -1))
    return Reading(region, TensorDigest(int(lo, 16), int(hi, 16)))


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
