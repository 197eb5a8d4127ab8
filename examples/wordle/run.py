"""Asynchronous GRPO on Wordle, with a bucket between the trainer and its servers.

    python -m wordle.run --quick --report wordle-report

Starts the environment, two vLLM servers, ``thinwire follow`` and the trainer; shows what happens;
proves at the end that the trainer, the mirrors and the engines hold the same bits; and writes a
report. It carries neither weights nor versions: it only reads what the others write down.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wordle.children import Children
from wordle.kills import Kill, parse_kill
from wordle.launch import ENVIRONMENT, FOLLOWER, SERVERS, TRAINER, Launch, Pythons, warmup_child
from wordle.ledger import Ledger, totals
from wordle.proof import prove
from wordle.recipe import FULL, QUICK, Recipe
from wordle.report import render, summary_lines
from wordle.view import Display
from wordle.watch import Meter, Tail

__all__ = ["main"]

_NAMES = (*SERVERS, ENVIRONMENT, FOLLOWER, TRAINER)
_CATCH_UP_S = 120.0
_NOT_IDENTICAL = 4


class Run:
    """One run, from the warm-up to the proof.

    Args:
        recipe: what is done.
        launch: how processes are started.
        children: those that were started.
        ledger: what is known.
        display: shows it.
        kills: what is killed, and when.
    """

    def __init__(
        self,
        recipe: Recipe,
        launch: Launch,
        children: Children,
        ledger: Ledger,
        display: Display,
        kills: Sequence[Kill],
    ) -> None:
        self._recipe, self._launch, self._children = recipe, launch, children
        self._ledger, self._display = ledger, display
        self._kills = list(kills)
        self._resting: dict[str, float] = {}
        self._steps = Tail(launch.steps_file)
        self._arrivals = Tail(launch.arrivals_file)
        self._games = Tail(launch.games_file)

    def go(self) -> dict[str, float]:
        """Run until every server serves what training ended with; returns seconds."""
        began = time.monotonic()
        for name in (ENVIRONMENT, *SERVERS, FOLLOWER, TRAINER):
            self._start(name)
        self._display.status("vLLM starts, and waits for version 0")
        with Meter(self._launch.urls) as meter:
            first: float | None = None
            while self._ledger.end is None:
                self._listen(meter)
                self._strike()
                self._check()
                if first is None and self._ledger.rows:
                    first = time.monotonic()
                time.sleep(0.1)
            self._catch_up(meter)
        ended = time.monotonic()
        return {"setup": (first or ended) - began, "run": ended - (first or ended)}

    def _start(self, name: str) -> None:
        specs: dict[str, Callable[[], Any]] = {
            ENVIRONMENT: self._launch.environment,
            FOLLOWER: self._launch.follower,
            TRAINER: self._launch.trainer,
        }
        spec = specs[name]() if name in specs else self._launch.server(name)
        self._children.start(spec)

    # --- while it runs ------------------------------------------------------------------

    def _listen(self, meter: Meter) -> None:
        for event in self._steps:
            before = self._ledger.newest
            self._ledger.step(event)
            if self._ledger.newest is not before:
                self._display.status(f"step {event['step']} of {self._recipe.training.steps}")
        for event in self._arrivals:
            self._ledger.arrived(event, time.time())
        self._ledger.games.extend(self._games)
        self._ledger.samples.extend(meter.take())
        self._display.refresh()

    def _strike(self) -> None:
        """Kill what is due, and start again what has rested."""
        newest = self._ledger.newest
        for kill in [k for k in self._kills if newest is not None and newest.step >= k.step]:
            self._kills.remove(kill)
            self._children.kill(kill.name)
            self._resting[kill.name] = time.monotonic() + kill.rest_s
            self._happened(f"{kill.name} killed")
        for name in [n for n, until in self._resting.items() if until <= time.monotonic()]:
            del self._resting[name]
            self._children.restart(name)
            self._happened(f"{name} started again")

    def _happened(self, what: str) -> None:
        self._ledger.happened(what, time.time())
        self._display.say(what, "run")

    def _check(self) -> None:
        """Whatever nobody killed has to be there; the trainer may end once it said so."""
        for event in self._steps if self._children.ended(TRAINER) is not None else ():
            self._ledger.step(event)
        for name in _NAMES:
            over = name == TRAINER and self._ledger.end is not None
            if name not in self._resting and not over:
                self._children.check(name)

    def _catch_up(self, meter: Meter) -> None:
        """Wait until every server serves the last version."""
        last = int((self._ledger.end or {})["version"])
        self._display.status(f"servers come to version {last}")
        deadline = time.monotonic() + _CATCH_UP_S
        while len(self._ledger.arrivals.get(last, {})) < len(SERVERS):
            self._listen(meter)
            self._strike()
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"a server is not at version {last} after {_CATCH_UP_S:.0f} s")
            time.sleep(0.1)


# --- the command -----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 4 if anything is not bit-identical."""
    given = _parser().parse_args(argv)
    recipe = QUICK if given.quick else FULL
    training = {k: v for k, v in (("steps", given.steps), ("lr", given.lr)) if v is not None}
    recipe = replace(recipe, training=replace(recipe.training, **training))
    try:
        kills = [parse_kill(text, _NAMES) for text in given.kill]
        pythons = Pythons.found()
    except (ValueError, FileNotFoundError) as error:
        print(f"wordle: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    report: Path = given.report.resolve()
    work = report / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    checkpoint = (given.models or report.parent / "wordle-models").resolve() / recipe.model.key
    bucket = given.bucket or str(work / "bucket")
    with Children(report / "logs") as children:
        warmup = _warm_up(children, pythons, recipe, checkpoint)
        launch = Launch(
            pythons, recipe, bucket, work, checkpoint,
            cores=os.cpu_count() or 1, seed=given.seed,
        )  # fmt: skip
        names = {url: name for name, url in launch.urls.items()}
        ledger = Ledger(names, full_bytes=int(warmup["serving_bytes"]))
        with Display(ledger) as display:
            _introduce(display, recipe, bucket, report, warmup)
            seconds = Run(recipe, launch, children, ledger, display, kills).go()
            mirrors = {name: launch.mirror(name) for name in SERVERS}
            proof = prove(ledger.end or {}, bucket, launch.urls, mirrors)
    run = {
        "recipe": asdict(recipe),
        "seed": given.seed,
        "warmup": warmup,
        **ledger.to_json(),
        "totals": totals(ledger),
        "proof": proof,
        "seconds": seconds,
    }
    (report / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    (report / "index.html").write_text(render(run), encoding="utf-8")
    if not given.keep:
        shutil.rmtree(work, ignore_errors=True)
    for line in (*summary_lines(run), f"report: {report / 'index.html'}"):
        print(line)
    return 0 if proof["bit_identical"] else _NOT_IDENTICAL


def _warm_up(
    children: Children, pythons: Pythons, recipe: Recipe, checkpoint: Path
) -> dict[str, Any]:
    """The warmed-up model's figures; made once per recipe."""
    figures = checkpoint / "warmup.json"
    if not figures.is_file():
        child = warmup_child(pythons, recipe, checkpoint, os.environ)
        print(f"warming up {recipe.name}'s model into {checkpoint}", file=sys.stderr)
        children.run(child)
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def _introduce(
    display: Display, recipe: Recipe, bucket: str, report: Path, warmup: dict[str, Any]
) -> None:
    t = recipe.training
    display.say(
        f"thinwire wordle: Qwen3 with {warmup['parameters'] / 1e6:.2f} M weights, {t.steps} steps "
        f"of {t.batch} games, learning rate {t.lr:g}"
    )
    display.say("  trainer (TRL, fp32) --deltas--> bucket --deltas--> 2 x vLLM (bf16)")
    display.say("     ^--- games, over HTTP ------------- tool calls --> Wordle (OpenEnv)")
    display.say(f"bucket {bucket}; logs in {report / 'logs'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wordle.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a smaller model, a few steps")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the trainer and the games")
    parser.add_argument("--bucket", help="URL; an empty prefix. Default: a folder in the report's")
    parser.add_argument("--report", type=Path, default=Path("wordle-report"), help="folder")
    parser.add_argument("--models", type=Path, help="folder of warmed-up models")
    parser.add_argument("--keep", action="store_true", help="keep bucket, mirrors and checkpoints")
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="NAME@STEP",
        help=f"SIGKILL {', '.join(_NAMES)} after a step, and start it again; repeatable",
    )
    return parser


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
