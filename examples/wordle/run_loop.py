"""A run from the start of its processes until every server serves what training ended with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.engines.client import UpdateClient
from thinwire.errors import ThinwireError
from wordle.children import Child, Children
from wordle.kills import Kill
from wordle.launch import ENVIRONMENT, FOLLOWER, SERVERS, TRAINER, Launch
from wordle.ledger import Ledger
from wordle.view import Display
from wordle.watch import Meter, Tail

__all__ = ["NAMES", "Run", "seconds"]

NAMES = (*SERVERS, ENVIRONMENT, FOLLOWER, TRAINER)
_SET_UP_S = 900.0
_CATCH_UP_S = 120.0
_ANSWER_S = 10.0


class Run:
    """One run.

    Args:
        steps: optimizer steps.
        launch: how processes are started.
        children: those that were started.
        ledger: what is known.
        display: shows it.
        kills: what is killed, and when.
    """

    def __init__(
        self,
        steps: int,
        launch: Launch,
        children: Children,
        ledger: Ledger,
        display: Display,
        kills: Sequence[Kill],
    ) -> None:
        self._training_steps, self._launch, self._children = steps, launch, children
        self._ledger, self._display = ledger, display
        self._kills = list(kills)
        self._resting: dict[str, float] = {}
        self._restarted = 0.0
        self._steps = Tail(launch.steps_file)
        self._arrivals = Tail(launch.arrivals_file)
        self._games = Tail(launch.games_file)

    def go(self) -> None:
        """Start everything, and wait until all servers serve the last version.

        Raises:
            ChildEnded: a process ended that nobody killed.
            TimeoutError: nothing gets going, or a server does not come to the last version.
        """
        for name in (ENVIRONMENT, *SERVERS, FOLLOWER, TRAINER):
            self._children.start(self._child(name))
        self._display.status("vLLM starts, and waits for version 0")
        with Meter(self._launch.urls) as meter:
            self._train(meter, time.monotonic() + _SET_UP_S)
            self._catch_up(meter)
        for kill in self._kills:
            self._happened(f"{kill} was never due")

    def _child(self, name: str) -> Child:
        specs: dict[str, Callable[[], Child]] = {
            ENVIRONMENT: self._launch.environment,
            FOLLOWER: self._launch.follower,
            TRAINER: self._launch.trainer,
        }
        return specs[name]() if name in specs else self._launch.server(name)

    def _train(self, meter: Meter, set_up_by: float) -> None:
        while self._ledger.end is None:
            self._turn(meter)
            if time.monotonic() > set_up_by and (missing := self._not_up()):
                raise TimeoutError(f"nothing from {missing} after {_SET_UP_S:.0f} s")

    def _catch_up(self, meter: Meter) -> None:
        """Wait until every server serves the last version, and go on serving it."""
        last = int((self._ledger.end or {})["version"])
        self._display.status(f"servers come to version {last}")
        began = time.monotonic()
        self._turn(meter)  # kills what became due with the end
        while self._resting or not self._all_serve(last):
            if time.monotonic() > max(began, self._restarted) + _CATCH_UP_S and not self._resting:
                raise TimeoutError(f"a server is not at version {last} after {_CATCH_UP_S:.0f} s")
            self._turn(meter)

    def _not_up(self) -> str:
        """Those of which nothing has been heard yet."""
        arrived = {name for found in self._ledger.arrivals.values() for name in found}
        silent = [name for name in SERVERS if name not in arrived]
        return ", ".join([*silent, *(() if self._ledger.rows else (TRAINER,))])

    def _all_serve(self, last: int) -> bool:
        """By what the follower has told, and by what the servers say now."""
        arrived = len(self._ledger.arrivals.get(last, {})) == len(SERVERS)
        return arrived and all(_served(url) == last for url in self._launch.urls.values())

    # --- while it runs ------------------------------------------------------------------

    def _turn(self, meter: Meter) -> None:
        self._listen(meter)
        self._strike()
        self._start_again()
        self._check()
        time.sleep(0.1)

    def _listen(self, meter: Meter) -> None:
        for event in self._steps:
            self._stepped(event)
        for event in self._arrivals:
            self._ledger.arrived(event, time.time())
        self._ledger.games.extend(self._games)
        self._ledger.samples.extend(meter.take())
        self._display.refresh()

    def _stepped(self, event: Any) -> None:
        before = self._ledger.newest
        self._ledger.step(event)
        if self._ledger.newest is not before:
            self._display.status(f"step {event['step']} of {self._training_steps}")

    def _strike(self) -> None:
        """Kill what is due."""
        newest = self._ledger.newest
        for kill in [k for k in self._kills if newest is not None and newest.step >= k.step]:
            self._kills.remove(kill)
            if self._is_over(kill.name):
                self._happened(f"{kill} not done: training has ended")
                continue
            self._children.kill(kill.name)
            self._resting[kill.name] = time.monotonic() + kill.rest_s
            self._happened(f"{kill.name} killed")

    def _start_again(self) -> None:
        """Start what has rested, but no trainer that had ended when it was killed."""
        for name in [n for n, until in self._resting.items() if until <= time.monotonic()]:
            del self._resting[name]
            if self._is_over(name):
                self._happened(f"{name} not started again: training has ended")
                continue
            self._children.restart(name)
            self._restarted = time.monotonic()
            self._happened(f"{name} started again")

    def _is_over(self, name: str) -> bool:
        return name == TRAINER and self._ledger.end is not None

    def _happened(self, what: str) -> None:
        self._ledger.happened(what, time.time())
        self._display.say(what, "run")

    def _check(self) -> None:
        """Whatever nobody killed has to be there; the trainer may end once it said so."""
        if self._children.ended(TRAINER) is not None:
            for event in self._steps:  # its last words, which came since it was listened to
                self._stepped(event)
        for name in NAMES:
            if name not in self._resting and not self._is_over(name):
                self._children.check(name)


def seconds(ledger: Ledger, began: float) -> dict[str, float]:
    """``setup``, until the first version, and ``run``, from there until all servers serve the last.

    What has not come to its end is left out.

    Args:
        began: clock time.
    """
    first = min((row.at for row in ledger.rows.values()), default=None)
    if first is None:
        return {}
    last = ledger.arrivals.get(int((ledger.end or {}).get("version", -1)), {})
    ended = max((arrival.at for arrival in last.values()), default=None)
    return {"setup": first - began, **({} if ended is None else {"run": ended - first})}


def _served(url: str) -> int | None:
    """None also if it does not answer: it may be starting."""
    try:
        return UpdateClient(url, timeout=_ANSWER_S).version()
    except ThinwireError:
        return None
