"""All ranks move together or the engine serves nothing; whoever asked does not matter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from thinwire.engines.vllm.updater import Updater
from thinwire.errors import CorruptPayload, EnginePoisoned, Misuse, Retryable, ThinwireError

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


def hang(engine: Engine, what: str) -> Callable[[], None]:
    """Let the engine never answer this; returns how to undo it."""
    method = "call" if what in ("apply", "status") else what
    real = getattr(engine, method)

    async def never(*arguments: Any) -> Any:
        if method == "call" and arguments[0]["do"] != what:
            return await real(*arguments)
        return await asyncio.Event().wait()

    setattr(engine, method, never)
    return lambda: setattr(engine, method, real)


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


@pytest.mark.parametrize(
    ("hangs", "told"),
    [("apply", "'apply'"), ("forget", "'forget'"), ("name", "'name'"), ("resume", "'resume'")],
)
def test_an_engine_that_does_not_answer_while_held_is_poisoned_and_can_be_healed(
    hangs: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    updater = Updater(engine, limit=0.1)
    restore = hang(engine, hangs)

    async def hung() -> None:
        with pytest.raises(ThinwireError, match=f"not answered {told}"):
            await updater.update(1)
        assert told in updater.poisoned
        with pytest.raises(EnginePoisoned):
            await updater.update(1)
        restore()
        assert await updater.heal() == {"version": 1}
        assert engine.diary[-1] == "resume"
        assert not updater.poisoned

    run(hung())
    assert "requests are held until the engine is healed" in caplog.text


def test_an_engine_that_cannot_be_held_serves_on() -> None:
    engine = Engine()
    updater = Updater(engine, limit=0.1)
    restore = hang(engine, "pause")

    async def hung() -> None:
        for action in (updater.update, updater.heal):
            with pytest.raises(Retryable, match="not answered 'pause'"):
                await action()
        assert engine.diary == ["resume", "resume"]  # it may be held a moment later
        assert not updater.poisoned
        restore()
        await updater.update(1)

    run(hung())
    assert engine.diary[2:] == WHOLE


def test_a_hold_that_cannot_be_ended_is_told() -> None:
    engine = Engine()
    updater = Updater(engine, limit=0.1)
    hang(engine, "pause")
    restore = hang(engine, "resume")

    async def hung() -> None:
        with pytest.raises(Retryable):
            await updater.update(1)
        assert "could not be let go" in updater.poisoned
        restore()

    run(hung())


def test_a_silent_engine_still_has_a_status() -> None:
    engine = Engine()
    updater = Updater(engine, limit=0.1)
    hang(engine, "status")
    updater.poisoned = "half"
    told = run(updater.status())
    assert (told["version"], told["poisoned"], told["ranks"]) == (None, "half", [])
    assert "'status'" in told["silent"]


def test_a_cancelled_update_leaves_nothing_held_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the caller's cancellation, which does not reach it: that of the update itself."""
    monkeypatch.setattr("thinwire.engines.vllm.updater._LOOK_S", 0)
    ends = set()
    for ticks in range(120):
        engine = Engine()
        updater = Updater(engine)

        async def cancelled(updater: Updater = updater, ticks: int = ticks) -> None:
            task = asyncio.ensure_future(updater._update(1))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        run(cancelled())
        last = next((did for did in reversed(engine.diary) if did in ("pause", "resume")), "")
        assert last != "pause" or updater.poisoned
        ends.add((last, bool(updater.poisoned)))
    assert ends >= {("", False), ("pause", True), ("resume", False)}


def test_healing_goes_on_without_its_caller() -> None:
    engine = Engine()
    updater = Updater(engine)

    async def cancelled() -> None:
        await updater.update(1)
        engine.diary.clear()
        task = asyncio.ensure_future(updater.heal())
        for _ in range(4):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await updater.update(1)

    run(cancelled())
    assert engine.diary == ["pause", "forget", "name 1", "resume"]


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
