"""``thinwire verify``: every byte of a bucket or of a mirror, checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import Bar, emit, json_option, plain, size
from thinwire.cli.exits import RESYNC
from thinwire.cli.group import print_error

if TYPE_CHECKING:
    from thinwire.verify import BucketReport, MirrorReport, Problem

__all__ = ["verify"]


@click.command()
@click.argument("target", metavar="BUCKET|DIR")
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Folder with version 0's weights, where the bucket does not hold them.",
)
@json_option
@click.pass_context
def verify(ctx: click.Context, target: str, base: Path | None, as_json: bool) -> None:
    """Check everything in a bucket, or every byte of a mirror folder.

    A bucket: all records and their chain, all payloads and files, and every version's state by
    replaying the run in memory. A mirror: its records, its journal, all files, all weights.
    Ends with status 4 if anything is damaged.

    \b
    JSON: kind (bucket or mirror), ok, run, problems [{subject, message}]
      bucket: url, head, replayed (newest version whose state was confirmed),
        objects, bytes, orphans (unreferenced, harmless), skipped (not checkable)
      mirror: folder, version, files, bytes, live (another process writes it)
    """
    from thinwire.bucket import open_bucket
    from thinwire.mirror_folder import is_mirror
    from thinwire.verify import verify_bucket, verify_mirror

    if is_mirror(Path(target)):
        with Bar("checking files") as bar:
            mirror = verify_mirror(Path(target), progress=bar)
        document, lines, problems = _mirror_json(mirror), _mirror_lines(mirror), mirror.problems
    else:
        with Bar("checking records") as bar:
            bucket = verify_bucket(open_bucket(target), base=base, progress=bar)
        document, lines, problems = _bucket_json(bucket), _bucket_lines(bucket), bucket.problems
    if as_json:
        emit(document)
    else:
        for problem in problems:
            click.echo(plain(f"damaged: {problem.subject}: {problem.message}"))
        for line in lines:
            click.echo(plain(line))
    if problems:
        found = f"{target}: {len(problems)} problem{'s' * (len(problems) > 1)}"
        print_error(found, _advice(document["kind"]))
        ctx.exit(RESYNC)


def _advice(kind: str) -> str:
    if kind == "mirror":
        return "pull into a fresh folder; keep the damaged one if you want to find the cause"
    return "restore the objects from a backup, or start a run under a new prefix"


def _problems(problems: list[Problem]) -> list[dict[str, str]]:
    return [{"subject": p.subject, "message": p.message} for p in problems]


def _bucket_json(report: BucketReport) -> dict[str, Any]:
    return {
        "kind": "bucket",
        "ok": report.ok,
        "url": report.url,
        "run": report.run,
        "head": report.head,
        "replayed": report.replayed,
        "objects": report.objects,
        "bytes": report.bytes,
        "problems": _problems(report.problems),
        "orphans": report.orphans,
        "skipped": report.skipped,
    }


def _bucket_lines(report: BucketReport) -> list[str]:
    lines = [f"not checked: {what}" for what in report.skipped]
    lines += [f"unreferenced, harmless: {key}" for key in report.orphans]
    if report.ok:
        versions = "no version yet" if report.head is None else f"versions 0 to {report.head}"
        what = f"{report.objects} objects, {size(report.bytes)}"
        lines.append(f"run {report.run}: {versions}, {what}: all good")
    return lines


def _mirror_json(report: MirrorReport) -> dict[str, Any]:
    return {
        "kind": "mirror",
        "ok": report.ok,
        "folder": str(report.folder),
        "run": report.run,
        "version": report.version,
        "files": report.files,
        "bytes": report.bytes,
        "live": report.live,
        "problems": _problems(report.problems),
    }


def _mirror_lines(report: MirrorReport) -> list[str]:
    if not report.ok:
        return []
    what = f"version {report.version} of run {report.run}"
    return [f"{report.folder}: {what}, {report.files} files, {size(report.bytes)}: all good"]
