"""Deltas against whole checkpoints: the same training twice, and what it takes.

    python -m wordle.control --quick --report wordle-control

Games are played once, and every sample that the trainer takes is recorded. Then the record is
trained on twice: with deltas through a bucket, and with whole checkpoints that vLLM reloads, each
to two servers of its own. After every sync the trainer's masters and each server's weights, by
vLLM's own checksums, have to be the same. The exit status is 4 if they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.demo.processes import Interrupted, interruptible
from thinwire.errors import Misuse
from thinwire.machine import machine
from wordle.children import Child, ChildEnded, Children
from wordle.control_docs import tables
from wordle.control_verdict import Way, judge
from wordle.launch import ENVIRONMENT, SERVERS, TRAINER, Launch, Pythons, warmed_up
from wordle.recipe import FULL, QUICK, Recipe
from wordle.run_folder import drop, fresh, locked
from wordle.watch import Tail

__all__ = ["main"]

_USAGE, _NOT_IDENTICAL = 2, 4
_LR = 1e-6
_STEPS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run all of it."""
    given = _parser().parse_args(argv)
    report: Path = given.report.resolve()
    try:
        with interruptible(), contextlib.ExitStack() as held:
            try:
                pythons = Pythons.found()
                held.enter_context(locked(report))
                fresh(report / "work")
            except (Misuse, OSError) as error:
                print(f"wordle control: {error}", file=sys.stderr)
                return _USAGE
            return _attempt(given, pythons, report)
    except Interrupted as signal:
        print(f"wordle control: stopped by {signal}; all processes have ended", file=sys.stderr)
        return 128 + signal.signum


def _attempt(given: argparse.Namespace, pythons: Pythons, report: Path) -> int:
    recipe = QUICK if given.quick else FULL
    training = replace(recipe.training, steps=given.steps, lr=given.lr, save_every=given.steps + 1)
    recipe = replace(recipe, training=training)
    work = report / "work"
    checkpoint = (given.models or report.parent / "wordle-models").resolve() / recipe.model.key
    rollouts = given.rollouts.resolve() if given.rollouts else report / "rollouts.jsonl"
    with Children(report / "logs") as children:
        warmup = warmed_up(children, pythons, recipe, checkpoint)
    seconds: dict[str, float] = {}
    ways: dict[str, Way] = {}
    for way in ("delta", "full") if given.rollouts else ("record", "delta", "full"):
        began = time.monotonic()
        ways[way] = _train(way, pythons, recipe, checkpoint, work, rollouts, report / "logs")
        seconds[way] = time.monotonic() - began
        print(f"{way}: {len(ways[way].syncs)} syncs in {seconds[way]:.0f} s", file=sys.stderr)
    document = {
        "recipe": recipe.name,
        "lr": given.lr,
        "steps": given.steps,
        "machine": machine(()),
        "parameters": warmup["parameters"],
        "samples": len(rollouts.read_bytes().splitlines()) - 2,
        "seconds": seconds,
        "verdict": judge(ways, given.steps),
        "ways": {name: [_without_sums(s) for s in way.syncs] for name, way in ways.items()},
    }
    (report / "control.json").write_text(json.dumps(document, indent=1) + "\n")
    made = tables(document)
    (report / "control.md").write_text(made + "\n")
    print(made)
    if not given.keep:
        drop(work)
    return 0 if document["verdict"]["identical"] else _NOT_IDENTICAL


def _train(
    way: str,
    pythons: Pythons,
    recipe: Recipe,
    checkpoint: Path,
    work: Path,
    rollouts: Path,
    logs: Path,
) -> Way:
    """One training, with its own servers, from their start to their end."""
    work = work / way
    work.mkdir()
    # two cores are a thread for each process: sums do not depend on how threads share them
    launch = Launch(pythons, recipe, str(work / "bucket"), work, checkpoint, cores=2)
    names = [*SERVERS, *([ENVIRONMENT] if way == "record" else [])]
    with Children(logs / way) as children:
        if way == "record":
            children.start(launch.environment())
        for name in SERVERS:
            children.start(_server(launch.server(name), follows=way != "full"))
        children.start(_trainer(launch.trainer(), way, rollouts))
        while (ended := children.ended(TRAINER)) is None:
            children.check(*names)
            time.sleep(0.2)
        if ended:
            children.check(TRAINER)
    return Way.told(Tail(launch.steps_file))


def _server(child: Child, *, follows: bool) -> Child:
    """With the routes that hold, reload and check; for whole checkpoints, without a bucket.

    It still is a server that could take deltas: then both kinds keep weights in the same layout.
    """
    env = {**child.env, "VLLM_SERVER_DEV_MODE": "1"}
    if not follows:
        del env["THINWIRE_BUCKET"], env["THINWIRE_MIRROR"]
    return replace(child, env=env)


def _trainer(child: Child, way: str, rollouts: Path) -> Child:
    python, *_, settings = child.argv
    return replace(child, argv=[python, "-m", "wordle.control_train", way, settings, rollouts])


def _without_sums(sync: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sync.items() if key not in ("event", "checksums")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wordle.control", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="smaller batches")
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"optimizer steps ({_STEPS})")
    parser.add_argument("--lr", type=float, default=_LR, help=f"learning rate ({_LR:g})")
    parser.add_argument("--report", type=Path, default=Path("wordle-control"), help="folder")
    parser.add_argument("--models", type=Path, help="folder of warmed-up models")
    parser.add_argument("--rollouts", type=Path, help="a record to train on; none is made")
    parser.add_argument("--keep", action="store_true", help="keep buckets and checkpoints")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ChildEnded as error:
        sys.exit(f"wordle control: {error}")
