"""``thinwire bench``: how fast this machine does what a publish and a pull do."""

from __future__ import annotations

from typing import Any

import click

from thinwire.cli.bench_bucket import bucket
from thinwire.cli.bench_codec import codec
from thinwire.cli.bench_vllm import vllm
from thinwire.cli.console import Bar, count, emit, json_option, print_table, size

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure on this machine."""


bench.add_command(bucket)
bench.add_command(codec)
bench.add_command(vllm)


@bench.command()
@click.option("--quick", is_flag=True, help="20 M parameters in place of 596 M.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Runs of each step; medians are shown.",
)
@click.option(
    "--density",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Share of elements that change, at random positions.",
)
@json_option
def diff(quick: bool, threads: int, repeat: int, density: float, as_json: bool) -> None:
    """Time diff, digest, verify and apply against one copy of the checkpoint in memory.

    The weights have the shapes of Qwen3-0.6B in bf16. Everything runs on the same number of
    threads in the same process; a publish's peak memory is measured in a process of its own.

    \b
    JSON: parameters, bytes, changed, density, threads, repeat, targets_met,
      copy, diff, digest, apply, encode {seconds (median), gb_per_s, ratio (to copy),
      target (null: none)},
      memory {baseline_bytes, delta_bytes (positions and new elements), payload_bytes,
      peak_extra_bytes, ratio (to baseline and delta together), target} (null where the
      system does not tell)
    """
    from thinwire.cli.bench_memory import measure_in_child
    from thinwire.cli.bench_steps import measure

    with Bar("making weights") as bar:
        document = measure(
            quick=quick, threads=threads, repeat=repeat, density=density, progress=bar
        )
        bar("measuring memory", 0, 0)
        document["memory"] = measure_in_child(quick=quick, threads=threads, density=density)
    goals = [*(document[step] for step in _STEPS), document["memory"]]
    document["targets_met"] = all(
        goal["ratio"] <= goal["target"] for goal in goals if goal and goal["target"] is not None
    )
    if as_json:
        emit(document)
    else:
        _print(document)


_STEPS = {
    "copy": "copy of the checkpoint in memory",
    "diff": "diff and copy-out",
    "digest": "digest rescan",
    "apply": "verify and apply the delta",
    "encode": "encode and hash the delta",
}


def _print(document: dict[str, Any]) -> None:
    click.echo(
        f"{count(document['parameters'])} parameters, {size(document['bytes'])}, "
        f"{count(document['changed'])} changed, {document['threads']} threads, "
        f"median of {document['repeat']}"
    )
    print_table(
        ("step", "seconds", "GB/s", "× copy", "target"),
        [
            (
                what,
                f"{document[step]['seconds']:.4f}",
                f"{document[step]['gb_per_s']:.2f}",
                f"{document[step]['ratio']:.2f}",
                _target(document[step]),
            )
            for step, what in _STEPS.items()
        ],
    )
    memory = document["memory"]
    if memory is None:
        click.echo("peak memory of a publish: not known on this system")
        return
    click.echo(
        f"peak extra memory of a publish: {size(memory['peak_extra_bytes'])} for a baseline of "
        f"{size(memory['baseline_bytes'])} and a delta of {size(memory['delta_bytes'])}: "
        f"{memory['ratio']:.3f}× ({_target(memory)})"
    )


def _target(goal: dict[str, Any]) -> str:
    if goal["target"] is None:
        return ""
    return f"≤ {goal['target']}: {'met' if goal['ratio'] <= goal['target'] else 'missed'}"
