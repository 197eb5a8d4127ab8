"""All ranks move together or the engine serves nothing; whoever asked does not matter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from thinwire.engines.vllm.updater import Updater
from thinwire.errors import CorruptPayload, EnginePoisoned, Misuse, ThinwireError

T = TypeVar("T")


class Rank:
    """A session's behaviour, without weights."""

    def __init__(self, *, writes: bool, head: Callable[[], int]) -> None:
        self.writes, self.head = writes, head
        self.version, self.staged, self.mirror = 0, -1, 0
        self.error = self.poisoned = ""
        self.breaks = self.refuses = False
        self.busy = 0

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        do, version = request["do"], request.get("version")
        if do == "stage":
            self.error, self.busy = "", 2
            if self.refuses:
                self.error = "CorruptPayload: not the payload"
            elif version is not None or self.writes:
                self.mirror = self.head() if version is None else version
                self.staged = self.mirror if self.mirror != self.version else -1
        elif do == "apply" and self.breaks:
            self.poisoned = "applied in part"
            return {"failed": "EnginePoisoned", "message": self.poisoned, "hint": ""}
        elif do == "apply" and version != self.version:
            if self.staged != version:
                return {"failed": "Misuse", "message": "not staged", "hint": "stage it"}
            self.version, self.staged = version, -1
        elif do == "heal":
            self.version, self.poisoned = self.mirror, ""
        self.busy = max(0, self.busy - (do == "status"))
        return {
            "version": self.version,
            "mirror": self.mirror,
            "writes": self.writes,
            "staging": bool(self.busy),
            "staged": None if self.busy or self.staged < 0 else self.staged,
            "error": "" if self.busy else self.error,
            "poisoned": self.poisoned,
            "refused": {},
            "seconds": {},
        }


class Engine:
    """Ranks, and a diary of what was done to requests."""

    def __init__(self, count: int = 2) -> None:
        self.newest = 1
        self.ranks = [Rank(writes=not i, head=lambda: self.newest) for i in range(count)]
        self.diary: list[str] = []

    async def call(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        if request["do"] == "apply":
            self.diary.append("apply")
        return [rank.call(request) for rank in self.ranks]

    async def pause(self) -> None:
        self.diary.append("pause")

    async def resume(self) -> None:
        self.diary.append("resume")

    async def forget(self) -> None:
        self.diary.append("forget")

    async def name(self, version: int) -> None:
        self.diary.append(f"name {version}")


def run(action: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(action, 30))


WHOLE = ["pause", "apply", "forget", "name 1", "resume"]


@pytest.mark.parametrize("version", [1, None])
def test_staged_first_then_paused_written_forgotten_named_resumed(version: int | None) -> None:
    engine = Engine()
    told = run(Updater(engine).update(version))
    assert (told["version"], told["moved"]) == (1, True)
    assert engine.diary == WHOLE
    assert [rank.version for rank in engine.ranks] == [1, 1]


def test_nothing_new_pauses_nothing() -> None:
    engine = Engine()
    engine.newest = 0
    assert run(Updater(engine).update()) == {"version": 0, "moved": False}
    assert engine.diary == []


def test_what_fails_while_staging_leaves_the_engine_serving() -> None:
    engine = Engine()
    updater = Updater(engine)
    engine.ranks[1].refuses = True

    async def twice() -> None:
        with pytest.raises(CorruptPayload, match="rank 1: not the payload"):
            await updater.update(1)
        assert engine.diary == []
        engine.ranks[1].refuses = False
        await updater.update(1)

    run(twice())
    assert engine.diary == WHOLE


@pytest.mark.parametrize("broken", [[1], [0, 1]])
def test_a_rank_that_breaks_stops_the_engine_until_it_is_healed(broken: list[int]) -> None:
    engine = Engine()
    updater = Updater(engine)
    for index in broken:
        engine.ranks[index].breaks = True

    async def break_and_heal() -> None:
        with pytest.raises(EnginePoisoned):
            await updater.update(1)
        assert engine.diary == ["pause", "apply"]  # not resumed
        assert updater.poisoned
        assert (await updater.status())["poisoned"] == updater.poisoned
        with pytest.raises(EnginePoisoned):
            await updater.update(1)
        for rank in engine.ranks:
            rank.breaks = False
        assert await updater.heal() == {"version": 1}
        assert engine.diary[2:] == ["pause", "forget", "name 1", "resume"]
        engine.newest = 2
        await updater.update()

    run(break_and_heal())
    assert [rank.version for rank in engine.ranks] == [2, 2]


def test_if_no_rank_has_begun_requests_go_on() -> None:
    engine = Engine()
    updater = Updater(engine)

    async def unstaged() -> None:
        real = engine.call

        async def call(request: dict[str, Any]) -> list[dict[str, Any]]:
            if request["do"] == "apply":
                for rank in engine.ranks:
                    rank.staged = -1
            return await real(request)

        engine.call = call  # type: ignore[method-assign]
        with pytest.raises(Misuse, match="not staged"):
            await updater.update(1)

    run(unstaged())
    assert engine.diary == ["pause", "apply", "resume"]
    assert updater.poisoned == ""


def test_an_answer_that_never_comes_poisons() -> None:
    engine = Engine()
    updater = Updater(engine)

    async def lost() -> None:
        real = engine.call

        async def call(request: dict[str, Any]) -> list[dict[str, Any]]:
            if request["do"] == "apply":
                raise ConnectionError("a worker died")
            return await real(request)

        engine.call = call  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await updater.update(1)

    run(lost())
    assert engine.diary == ["pause"]
    assert "a worker died" in updater.poisoned


def test_whoever_asked_may_be_gone() -> None:
    engine = Engine()
    updater = Updater(engine)

    async def cancelled() -> None:
        task = asyncio.ensure_future(updater.update(1))
        for _ in range(2):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await updater.update(1))["moved"] is False  # it waits for its turn: all is done

    run(cancelled())
    assert engine.diary == WHOLE


def test_errors_that_are_nobodys_keep_their_name() -> None:
    engine = Engine()
    real = engine.call

    async def call(request: dict[str, Any]) -> list[dict[str, Any]]:
        await real(request)
        return [{"failed": "ZeroDivisionError", "message": "by zero", "hint": ""}]

    engine.call = call  # type: ignore[method-assign]
    with pytest.raises(ThinwireError, match="rank 0: ZeroDivisionError: by zero"):
        run(Updater(engine).update())
