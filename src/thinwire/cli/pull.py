"""``thinwire pull``: a mirror folder catches up with a run, once or for good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import Bar, count, emit, json_option, size
from thinwire.cli.sizes import size_option

if TYPE_CHECKING:
    from thinwire.replica import Replica
    from thinwire.update import Update

__all__ = ["pull"]


@click.command()
@click.argument("bucket")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--version", type=click.IntRange(min=0), help="Stop at this version.")
@click.option("--follow", is_flag=True, help="Go on with every new version until stopped.")
@click.option("--swap", is_flag=True, help="Write new files, for folders others have mapped.")
@click.option("--adopt", is_flag=True, help="Start over if the bucket now holds another run.")
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Folder with version 0's weights, where the bucket does not hold them.",
)
@click.option(
    "--poll",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="With --follow: seconds between looks.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=86400.0,
    metavar="SECONDS",
    help="With --follow: bear a bucket that does not answer for so long, by default for a day.",
)
@click.option(
    "--bandwidth", type=size_option, metavar="SIZE", help="At most so much per second, as in 20MB."
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    help="Folder for downloads that several mirrors of this host share.",
)
@json_option
def pull(
    bucket: str,
    folder: Path,
    version: int | None,
    follow: bool,
    swap: bool,
    adopt: bool,
    base: Path | None,
    poll: float,
    patience: float,
    bandwidth: int | None,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Bring the mirror in DIR to the newest version of the run in BUCKET.

    DIR is a loadable checkpoint folder. Every version is verified before a byte of it changes.

    \b
    JSON: folder, run, version, commit, updates [{version, step, whole (a whole
      checkpoint was loaded), changed, tensors, payload_bytes, fetch_s, decode_s,
      verify_s, patch_s}]; with --follow one update per line
    """
    from thinwire.bucket import open_bucket
    from thinwire.chain import Chain
    from thinwire.disk import DiskMirror
    from thinwire.replica import Replica

    store = open_bucket(bucket, bandwidth=bandwidth, cache=cache)
    if not follow:
        Chain(store).read_run()  # a wrong URL leaves no empty mirror behind
    with (
        Bar("looking for versions") as bar,
        DiskMirror(folder, swap=swap) as mirror,
        Replica(store, mirror, adopt=adopt, base=base, progress=bar) as replica,
    ):
        if follow:
            for update in replica.follow(poll=poll, until=version, patience=patience):
                bar.clear()
                _show(_described(update), as_json)
            return
        updates = list(_caught_up(replica, version, bar))
        bar.clear()
        held = mirror.held
    if held is None:
        return
    if as_json:
        emit(
            {
                "folder": str(folder),
                "run": held.run,
                "version": held.version,
                "commit": held.hash,
                "updates": updates,
            }
        )
        return
    for described in updates:
        _show(described, as_json=False)
    click.echo(f"{folder} holds version {held.version}{'' if updates else ' already'}")


def _caught_up(replica: Replica, target: int | None, bar: Bar) -> Iterator[dict[str, Any]]:
    for update in replica.catch_up(target):
        yield _described(update)
        bar(f"applied version {update.version}", 0, 0)


def _described(update: Update) -> dict[str, Any]:
    stats, commit = update.stats, update.commit
    return {
        "version": update.version,
        "step": commit.step,
        "whole": update.patches is None,
        "changed": stats.changed,
        "tensors": commit.tensors,
        "payload_bytes": stats.payload_bytes,
        "fetch_s": stats.fetch_s,
        "decode_s": stats.decode_s,
        "verify_s": stats.verify_s,
        "patch_s": stats.patch_s,
    }


def _show(update: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(update, line=True)
    else:
        step = "" if update["step"] is None else f" (step {update['step']})"
        what = "whole checkpoint" if update["whole"] else f"{count(update['changed'])} changed"
        moved = f"{what}, {size(update['payload_bytes'])}"
        click.echo(f"version {update['version']}{step}: {moved}")
