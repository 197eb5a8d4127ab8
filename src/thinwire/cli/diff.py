"""``thinwire diff``: how two checkpoints of one model differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import Bar, count, emit, json_option, percent, print_table, share

if TYPE_CHECKING:
    from thinwire.patch import Bits, Patch

__all__ = ["diff"]


@dataclass(frozen=True)
class _Row:
    name: str
    dtype: str
    shape: list[int]
    elements: int
    changed: int
    changed_fraction: float
    one_ulp: int
    one_ulp_fraction: float
    largest_step: int


@click.command()
@click.argument("checkpoint_a", type=click.Path(path_type=Path))
@click.argument("checkpoint_b", type=click.Path(path_type=Path))
@click.option("--dtype", help="Compare as served in this dtype, such as bf16.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Only the N tensors with the largest changed share; 0 for all, in order.",
)
@json_option
def diff(
    checkpoint_a: Path, checkpoint_b: Path, dtype: str | None, top: int, as_json: bool
) -> None:
    """Say which weights differ between CHECKPOINT_A and CHECKPOINT_B, and by how much.

    Bits are compared, not values. A ULP is one unit in the last place: the step to the next
    number that the dtype can hold.

    \b
    JSON: elements, bytes, changed, changed_fraction, one_ulp (changed by exactly
      one ULP up or down), one_ulp_fraction (of those changed), tensors_changed,
      tensors [{name, dtype, shape, elements, changed, changed_fraction, one_ulp,
      one_ulp_fraction, largest_step (ULP)}] (changed ones only)
    """
    from thinwire.checkpoint import Checkpoint
    from thinwire.diff import copy_out
    from thinwire.diff import diff as changes
    from thinwire.weights import Weights

    with Bar("comparing"):
        old = Weights.of(Checkpoint.open(checkpoint_a).tensors(), dtype=dtype)
        new = Weights.of(Checkpoint.open(checkpoint_b).tensors(), dtype=dtype)
        old.schema.require_same(new.schema)
        before = [t.flat() for t in old.tensors] if dtype is None else copy_out(old)
        rows = [_row(patch, before[patch.ordinal]) for patch in changes(before, new)]
    schema = old.schema
    changed, one_ulp = sum(r.changed for r in rows), sum(r.one_ulp for r in rows)
    tensors_changed = len(rows)
    if top:
        rows = sorted(rows, key=lambda row: -row.changed_fraction)[:top]
    document: dict[str, Any] = {
        "elements": schema.numel,
        "bytes": schema.nbytes,
        "changed": changed,
        "changed_fraction": share(changed, schema.numel),
        "one_ulp": one_ulp,
        "one_ulp_fraction": share(one_ulp, changed),
        "tensors_changed": tensors_changed,
        "tensors": [asdict(row) for row in rows],
    }
    if as_json:
        emit(document)
        return
    if rows:
        headers = ("tensor", "dtype", "shape", "changed", "%", "±1 ULP", "largest step")
        print_table(headers, map(_cells, rows), left=3)
    click.echo(
        f"{count(changed)} of {count(schema.numel)} elements changed "
        f"({percent(document['changed_fraction'])}), "
        f"{percent(document['one_ulp_fraction'])} of them by ±1 ULP"
    )


def _row(patch: Patch, before: Bits) -> _Row:
    from thinwire.ulp import ulp_steps

    steps = ulp_steps(before[patch.positions], patch.bits, patch.spec.dtype)
    one = int(((steps == 1) | (steps == -1)).sum())
    largest = max(int(steps.max()), -int(steps.min()))
    return _Row(
        name=patch.name,
        dtype=patch.spec.dtype.name,
        shape=list(patch.spec.shape),
        elements=patch.spec.numel,
        changed=len(patch),
        changed_fraction=share(len(patch), patch.spec.numel),
        one_ulp=one,
        one_ulp_fraction=share(one, len(patch)),
        largest_step=largest,
    )


def _cells(row: _Row) -> tuple[str, ...]:
    return (
        row.name,
        row.dtype,
        "×".join(map(str, row.shape)) or "scalar",
        count(row.changed),
        percent(row.changed_fraction),
        percent(row.one_ulp_fraction),
        count(row.largest_step),
    )
