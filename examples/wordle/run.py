"""Asynchronous GRPO on Wordle, with a bucket between the trainer and its servers.

    python -m wordle.run --quick --report wordle-report

Starts the environment, two vLLM servers, ``thinwire follow`` and the trainer; shows what happens;
proves at the end that the trainer, the mirrors and the engines hold the same bits; and writes a
report. It carries neither weights nor versions: it only reads what the others write down.

The exit status is 4 if anything is not bit-identical, 2 if it cannot run as it was asked to, 1 if
it failed, and 128 more than the signal that stopped it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.demo.processes import Interrupted, interruptible
from thinwire.demo.shared import empty_bucket
from thinwire.errors import ThinwireError
from wordle.children import Children
from wordle.kills import Kill, parse_kill
from wordle.launch import SERVERS, WARM_UP, Launch, Pythons, warmed_up
from wordle.ledger import Ledger, totals
from wordle.proof import prove
from wordle.recipe import FULL, QUICK, Recipe
from wordle.report import render, summary_lines
from wordle.run_folder import drop, fresh, locked, replace_text
from wordle.run_loop import NAMES, Run, seconds
from wordle.view import Display

__all__ = ["main", "troubles"]

_FAILED, _USAGE, _NOT_IDENTICAL = 1, 2, 4
_FEW_FAILURES = 0.01


@dataclass(frozen=True)
class Plan:
    """What was asked for.

    Attributes:
        report, models: folders, of the report and of warmed-up models.
        bucket: URL of the run; None: a folder in the report's.
    """

    recipe: Recipe
    pythons: Pythons
    report: Path
    models: Path
    kills: tuple[Kill, ...]
    bucket: str | None
    seed: int
    keep: bool

    @property
    def work(self) -> Path:
        """Folder of what the processes leave, which is removed at the end."""
        return self.report / "work"

    @property
    def written(self) -> list[Path]:
        """Files that an earlier run may have left."""
        logs = [self.report / "logs" / f"{name}.log" for name in (*NAMES, WARM_UP, "run")]
        return [self.report / "run.json", self.report / "index.html", *logs]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        with interruptible():
            return _main(given)
    except Interrupted as signal:
        print(f"wordle: stopped by {signal}; all processes have ended", file=sys.stderr)
        return 128 + signal.signum


def _main(given: argparse.Namespace) -> int:
    with contextlib.ExitStack() as held:
        try:
            plan = _planned(given)
            bucket = str(plan.work / "bucket") if plan.bucket is None else empty_bucket(plan.bucket)
            held.enter_context(locked(plan.report))
            fresh(plan.work, plan.written)
        except (ThinwireError, ValueError, OSError) as error:
            hint = getattr(error, "hint", "")
            print(f"wordle: {error}{'; ' if hint else ''}{hint}", file=sys.stderr)
            return _USAGE
        return _attempt(plan, bucket)


def _planned(given: argparse.Namespace) -> Plan:
    """Raises ValueError, FileNotFoundError: it cannot be done."""
    recipe = QUICK if given.quick else FULL
    training = {k: v for k, v in (("steps", given.steps), ("lr", given.lr)) if v is not None}
    recipe = replace(recipe, training=replace(recipe.training, **training))
    report: Path = given.report.resolve()
    return Plan(
        recipe,
        Pythons.found(),
        report,
        (given.models or report.parent / "wordle-models").resolve(),
        tuple(parse_kill(text, NAMES, recipe.training.steps) for text in given.kill),
        given.bucket,
        given.seed,
        given.keep,
    )


def _attempt(plan: Plan, bucket: str) -> int:
    """Run it, and write a report however it ends."""
    run: dict[str, Any] = {
        "recipe": asdict(plan.recipe),
        "seed": plan.seed,
        "bucket": bucket,
        "kills": [asdict(kill) for kill in plan.kills],
        "cores": os.cpu_count() or 1,
        "proof": None,
    }
    try:
        _go(plan, bucket, run)
    except Exception as error:  # noqa: BLE001 - told in one line; the report has no proof
        (plan.report / "logs" / "run.log").write_text(traceback.format_exc())
        print(f"wordle: {type(error).__name__}: {error}", file=sys.stderr)
        return _FAILED
    finally:
        replace_text(plan.report / "run.json", json.dumps(run, indent=1) + "\n")
        replace_text(plan.report / "index.html", render(run))
    if not plan.keep:
        drop(plan.work)
    for line in (*summary_lines(run), f"report: {plan.report / 'index.html'}"):
        print(line)
    if not run["proof"]["bit_identical"]:
        return _NOT_IDENTICAL
    wrong = troubles(run)
    for line in wrong:
        print(f"wordle: {line}", file=sys.stderr)
    return _FAILED if wrong else 0


def troubles(run: Mapping[str, Any]) -> list[str]:
    """What is wrong with a run whose weights are right."""
    t, limit = run["totals"], run["recipe"]["training"]["max_staleness"]
    found = []
    # a model that learns calls a tool wrongly now and then; what fails more often is broken
    if t["tool_failures"] > _FEW_FAILURES * t["guesses"]:
        found.append(f"{t['tool_failures']:.0f} tool calls failed; see the trainer's log")
    if t["max_staleness"] > limit:
        found.append(f"games were {t['max_staleness']:.0f} versions behind, more than {limit}")
    return found


def _go(plan: Plan, bucket: str, run: dict[str, Any]) -> None:
    """From the warm-up to the proof; adds to ``run`` what becomes known."""
    recipe, checkpoint = plan.recipe, plan.models / plan.recipe.model.key
    with Children(plan.report / "logs") as children:
        run["releases"] = plan.pythons.releases()
        run["warmup"] = warmup = warmed_up(children, plan.pythons, recipe, checkpoint)
        launch = Launch(
            plan.pythons, recipe, bucket, plan.work, checkpoint, cores=run["cores"], seed=plan.seed
        )
        names = {url: name for name, url in launch.urls.items()}
        ledger = Ledger(names, full_bytes=int(warmup["serving_bytes"]))
        began = time.time()
        with Display(ledger) as display:
            _introduce(display, recipe, bucket, plan.report, warmup)
            try:
                steps = recipe.training.steps
                Run(steps, launch, children, ledger, display, plan.kills).go()
                mirrors = {name: launch.mirror(name) for name in SERVERS}
                run["proof"] = prove(ledger.end or {}, bucket, launch.urls, mirrors, display.say)
            finally:
                run.update(ledger.to_json(), totals=totals(ledger), seconds=seconds(ledger, began))


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
    parser.add_argument("--quick", action="store_true", help="ten steps of smaller batches")
    parser.add_argument("--steps", type=_count, help="optimizer steps")
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
        help=f"SIGKILL {', '.join(NAMES)} after a step, and start it again; repeatable",
    )
    return parser


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
