"""``thinwire bench codec``: bytes per version and time, on real states and beside other schemes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import Bar, percent, print_table, size
from thinwire.machine import machine

if TYPE_CHECKING:
    from thinwire.cli.bench_rivals import Delta
    from thinwire.cli.bench_synthetic import Shape

__all__ = ["codec"]

_PACKAGES = ("numpy", "numba", "torch", "zstandard", "fireworks-delta-compression")
_SHARE = 0.01
_ARC_ELEMENTS = 32_000_000


@click.command()
@click.option(
    "--states",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder of pairs of states, as benchmarks/make_states.py writes them.",
)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results there, too.",
)
@click.option("--quick", is_flag=True, help="20 M parameters in place of 596 M.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Runs of each timed step; medians count.",
)
@click.option(
    "--only",
    type=click.Choice(["pairs", "synthetic", "drawn"]),
    multiple=True,
    help="Measure this part only; the other parts stay as they are in the JSON file.",
)
def codec(
    states: Path,
    file: Path | None,
    quick: bool,
    threads: int,
    repeat: int,
    only: tuple[str, ...],
) -> None:
    """Compare the codecs with the entropy bound, other schemes, and a copy in memory.

    Needs the extra `bench`. The package of Fireworks unpickles what it reads; here it reads only
    what it has just written.

    \b
    JSON: environment, pairs [...], changed_shares [...], synthetic [...], drawn {...},
      speed {steps {...}, arc_v3 [...]}, targets [{what, value, limit, kind, met}], targets_met
    """
    from thinwire.cli.bench_sizes import find_pairs
    from thinwire.cli.bench_synthetic import full_shape, quick_shape
    from thinwire.cli.bench_targets import judge

    document: dict[str, Any] = {}
    if only and file is not None and file.exists():
        document = json.loads(file.read_text())
    parts = set(only or ("pairs", "synthetic", "drawn"))
    pairs = find_pairs(states)
    shape = quick_shape() if quick else full_shape()
    document["environment"] = {**machine(_PACKAGES), "threads": threads, "repeat": repeat}
    with Bar("reading states") as bar:
        if "pairs" in parts:
            document |= _measure_pairs(pairs, bar)
        if "synthetic" in parts:
            document |= _measure_synthetic(repeat, bar)
        if "drawn" in parts:
            document |= _measure_drawn(pairs, shape, threads, repeat, bar)
    document.setdefault("pairs", [])
    document["targets"] = judge(document)
    document["targets_met"] = all(target["met"] for target in document["targets"])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n")
    _print(document)


def _measure_pairs(pairs: list[Path], bar: Bar) -> dict[str, Any]:
    from thinwire.cli.bench_rivals import RIVALS
    from thinwire.cli.bench_sizes import pair_rows, shares

    rows = []
    for row in pair_rows(pairs, RIVALS):
        rows.append(row)
        bar(row["pair"], len(rows), len(pairs))
    return {"pairs": rows, "changed_shares": shares(pairs)}


def _measure_synthetic(repeat: int, bar: Bar) -> dict[str, Any]:
    """Sizes and single-threaded speed of 20 M synthetic elements."""
    from thinwire.cli.bench_rivals import RIVALS
    from thinwire.cli.bench_sizes import size_row
    from thinwire.cli.bench_speed import both_ways
    from thinwire.cli.bench_synthetic import CASES, quick_shape, synthetic

    rivals: dict[str, Callable[[Delta], int]] = {"xor_zstd": RIVALS["xor_zstd"]}
    rows = []
    for name, density in CASES:
        delta = synthetic(quick_shape(), name, density)
        row = {"dtype": name, "density": density, **size_row(delta, rivals)}
        names = ["compact", "packed"]
        row["speed"] = both_ways(delta, names, threads=1, repeat=repeat, progress=bar)
        rows.append(row)
    return {"synthetic": rows}


def _measure_drawn(
    pairs: list[Path], shape: Shape, threads: int, repeat: int, bar: Bar
) -> dict[str, Any]:
    """Size and speed of a large model changed as the real pair nearest to 1 % was."""
    from thinwire.cli.bench_drawn import drawn
    from thinwire.cli.bench_sizes import OURS, load_pair, model_of, size_row, tallies
    from thinwire.cli.bench_speed import arc_speed, both_ways, part_of

    found = {}
    for pair in pairs:
        real = load_pair(pair)
        found[pair] = sum(map(len, real.patches)) / real.schema.numel

    def distance(pair: Path) -> float:
        return abs(math.log(max(found[pair], 1e-9) / _SHARE))

    pair = min(found, key=distance)
    (measured,) = tallies(load_pair(pair))
    delta = drawn(shape, measured, _SHARE)
    what = f"{delta.schema.numel / 1e6:.0f} M parameters, 1 % changed"
    sizes = {"what": what, "from_pair": pair.name, "from_share": found[pair]}
    steps = both_ways(delta, OURS, threads=threads, repeat=repeat, progress=bar)
    part = part_of(delta, _ARC_ELEMENTS)
    arc = [{"on": f"part of {what}", **arc_speed(part, threads, repeat, bar)}]
    for model in sorted({model_of(p) for p in pairs}):
        pair = min((p for p in pairs if model_of(p) == model), key=distance)
        arc.append({"on": pair.name, **arc_speed(load_pair(pair), threads, repeat, bar)})
    speed = {"what": what, "threads": threads, "repeat": repeat, "steps": steps, "arc_v3": arc}
    return {"drawn": sizes | size_row(delta, {}), "speed": speed}


def _print(document: dict[str, Any]) -> None:
    for row in document["pairs"]:
        click.echo(
            f"{row['pair']}: {percent(row['share'])} changed, bound {size(row['bound']['bytes'])}"
        )
        print_table(
            ("scheme", "bytes", "per change", "× bound"),
            [
                (
                    name,
                    size(nbytes),
                    f"{row['per_change'][name]:.3f}",
                    f"{nbytes / max(1, row['bound']['bytes']):.3f}",
                )
                for name, nbytes in row["sizes"].items()
            ],
        )
    print_table(
        ("target", "value", "limit", ""),
        [
            (
                target["what"],
                f"{target['value']:.4g}",
                f"{'≤' if target['kind'] == 'most' else '≥'} {target['limit']:g}",
                "met" if target["met"] else "missed",
            )
            for target in document["targets"]
        ],
    )
