"""``thinwire log``: the versions of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import (
    Bar,
    count,
    emit,
    json_option,
    percent,
    print_table,
    share,
    size,
    when,
)
from thinwire.cli.publish import payload_bytes

if TYPE_CHECKING:
    from thinwire.bucket import Bucket
    from thinwire.log.commit import Commit, RunInfo

__all__ = ["log"]

_HEADERS = ("version", "step", "time", "changed", "%", "tensors", "payload", "of full")


@click.command()
@click.argument("bucket")
@click.option(
    "-n",
    "--number",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="How many versions, newest first; 0 for all.",
)
@json_option
def log(bucket: str, number: int, as_json: bool) -> None:
    """List the versions of the run in BUCKET, newest first.

    Version 0 is a whole checkpoint; all others are deltas. The chain between the versions shown
    is checked.

    \b
    JSON: url, run, base, head, elements, tensors, full_bytes, versions [{version,
      step, time_ms, changed, changed_fraction, tensors, payload_bytes, ratio (to
      full_bytes), codec, writer, commit, digest}]
    """
    from thinwire.bucket import open_bucket
    from thinwire.chain import Chain
    from thinwire.log.plan import check_child

    store = open_bucket(bucket)
    chain = Chain(store)
    with Bar("looking for versions") as bar:
        run = chain.read_run()
        head = chain.sure_head()
        versions = range(head if head is not None else -1, -1, -1)
        commits: list[Commit] = []
        for version in versions[: number or None]:
            commit = chain.read(version)
            if commits:
                check_child(commits[-1], commit.tip)
            commits.append(commit)
            bar("reading commits", len(commits), min(number or len(versions), len(versions)))
        if commits and commits[-1].version == 0:
            check_child(commits[-1], run.tip)
        rows = [_row(store, run, commit) for commit in commits]
    if as_json:
        emit(
            {
                "url": store.url,
                "run": run.run,
                "base": run.base,
                "head": head,
                "elements": run.schema.numel,
                "tensors": len(run.schema),
                "full_bytes": run.schema.nbytes,
                "versions": rows,
            }
        )
        return
    whole = f"{count(run.schema.numel)} elements, {size(run.schema.nbytes)}"
    click.echo(f"run {run.run}: {len(run.schema)} tensors, {whole}")
    if rows:
        print_table((*_HEADERS, "codec", "writer"), map(_cells, rows), left=0)
    else:
        click.echo("no version yet")


def _row(bucket: Bucket, run: RunInfo, commit: Commit) -> dict[str, Any]:
    moved = payload_bytes(bucket, commit)
    return {
        "version": commit.version,
        "step": commit.step,
        "time_ms": commit.time_ms,
        "changed": commit.changed,
        "changed_fraction": share(commit.changed, run.schema.numel),
        "tensors": commit.tensors,
        "payload_bytes": moved,
        "ratio": None if moved is None else share(moved, run.schema.nbytes),
        "codec": commit.codec,
        "writer": commit.writer,
        "commit": commit.hash,
        "digest": commit.digest,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["version"]),
        "" if row["step"] is None else str(row["step"]),
        when(row["time_ms"]),
        count(row["changed"]),
        percent(row["changed_fraction"]),
        str(row["tensors"]),
        size(row["payload_bytes"]),
        percent(row["ratio"]),
        row["codec"] or "-",
        row["writer"][:8],
    )
