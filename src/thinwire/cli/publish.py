"""``thinwire publish``: a checkpoint folder becomes the next version of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import Bar, count, emit, json_option, percent, share, size
from thinwire.cli.sizes import size_option

if TYPE_CHECKING:
    from thinwire.bucket import Bucket
    from thinwire.log.commit import Commit
    from thinwire.receipt import PublishStats
    from thinwire.weights import FlatTensor

__all__ = ["publish"]


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT_DIR", type=click.Path(path_type=Path))
@click.argument("bucket")
@click.option("--step", type=int, help="The trainer's optimizer step, kept with the version.")
@click.option("--dtype", help="Serving dtype of a new run, such as bf16; a run keeps its own.")
@click.option("--codec", default="auto", show_default=True, help="How the delta is written.")
@click.option(
    "--assets/--no-assets",
    default=True,
    show_default=True,
    help="Whether config and tokenizer files travel with version 0.",
)
@click.option(
    "--resume",
    type=click.Choice(["auto", "require", "new"]),
    default="auto",
    show_default=True,
    help="Continue a run or start one; insist on continuing; insist on starting.",
)
@click.option(
    "--base",
    default="",
    metavar="NAME",
    help="Version 0 is this checkpoint, which replicas have: upload no weights for it.",
)
@click.option(
    "--bandwidth", type=size_option, metavar="SIZE", help="At most so much per second, as in 20MB."
)
@json_option
def publish(
    checkpoint: Path,
    bucket: str,
    step: int | None,
    dtype: str | None,
    codec: str,
    assets: bool,
    resume: Any,
    base: str,
    bandwidth: int | None,
    as_json: bool,
) -> None:
    """Publish the weights in CHECKPOINT_DIR to BUCKET.

    The first call uploads them whole, as version 0; every further one ships what changed since
    the version before. Works without torch.

    \b
    JSON: run, version, commit, step, new_run, codec, changed, elements, tensors,
      payload_bytes (version 0: the whole checkpoint), full_bytes, ratio (payload to
      full), digest, seconds {diff, encode, upload, commit} (null for version 0)
    """
    from thinwire.bucket import MemoryBucket, innermost, open_bucket
    from thinwire.chain import Chain
    from thinwire.checkpoint import Checkpoint
    from thinwire.errors import Misuse
    from thinwire.publisher import Publisher

    store = open_bucket(bucket, bandwidth=bandwidth)
    if isinstance(innermost(store), MemoryBucket):
        raise Misuse(
            "a memory:// bucket ends with this command", hint="publish to a folder or a store"
        )
    weights = _with_ties(dict(Checkpoint.open(checkpoint).tensors()), store)
    stats: PublishStats | None = None
    with Bar("reading the run") as bar:
        with Publisher(
            store,
            weights,
            assets=checkpoint if assets else None,
            dtype=dtype,
            resume=resume,
            fence=False,
            codec=codec,
            base=base,
            step=step,
            progress=bar,
        ) as publisher:
            bar("publishing", 0, 0)
            if publisher.started_run:
                commit = Chain(store).read(publisher.version)
            else:
                receipt = publisher.publish(weights, step=step)
                commit, stats = receipt.result(), receipt.stats()
            schema = publisher.schema
        moved = payload_bytes(store, commit)
    document = {
        "run": commit.run,
        "version": commit.version,
        "commit": commit.hash,
        "step": commit.step,
        "new_run": stats is None,
        "codec": commit.codec,
        "changed": commit.changed,
        "elements": schema.numel,
        "tensors": commit.tensors,
        "payload_bytes": moved,
        "full_bytes": schema.nbytes,
        "ratio": None if moved is None else share(moved, schema.nbytes),
        "digest": commit.digest,
        "seconds": None if stats is None else _seconds(stats),
    }
    if as_json:
        emit(document)
    else:
        click.echo(_sentence(document, store.url))
    if stats is None and dtype is None and any(spec.dtype.name == "F32" for spec in schema):
        click.echo(
            "note: the run serves fp32, of which nearly every weight changes at every step; "
            "--dtype bf16 makes deltas small",
            err=True,
        )


def payload_bytes(bucket: Bucket, commit: Commit) -> int | None:
    """Bytes of a version's payloads; for version 0 those of the whole anchor, None if damaged."""
    from thinwire.chain import read_bounded
    from thinwire.errors import KeyNotFound, Resync
    from thinwire.log.commit import Manifest

    if commit.version > 0 or not commit.payloads:
        return commit.payload_bytes
    ref = commit.payloads[0]
    try:
        manifest = Manifest.decode(read_bounded(bucket, ref.key, ref.size))
    except (KeyNotFound, Resync):
        return None
    return commit.payload_bytes + sum(file.size for file in manifest.files)


def _with_ties(stored: dict[str, FlatTensor], bucket: Bucket) -> Mapping[str, FlatTensor]:
    """A checkpoint stores a tied weight once: give it the further names that the run knows."""
    from thinwire.chain import Chain
    from thinwire.errors import BucketNotFound, RunNotFound

    try:
        aliases = Chain(bucket).read_run().schema.aliases
    except (RunNotFound, BucketNotFound):
        return stored
    names = {alias: name for alias, name in aliases.items() if alias not in stored}
    return stored | {alias: stored[name] for alias, name in names.items() if name in stored}


def _seconds(stats: PublishStats) -> dict[str, float]:
    return {
        "diff": stats.diff_s,
        "encode": stats.encode_s,
        "upload": stats.upload_s,
        "commit": stats.commit_s,
    }


def _sentence(document: Mapping[str, Any], url: str) -> str:
    if document["new_run"]:
        what = f"{count(document['elements'])} elements, {size(document['payload_bytes'])}"
        return f"version 0 of a new run in {url}: {what}"
    changed = percent(share(document["changed"], document["elements"]))
    payload = (
        f"{size(document['payload_bytes'])}, {percent(document['ratio'])} of a full checkpoint"
    )
    return (
        f"version {document['version']}: {count(document['changed'])} of "
        f"{count(document['elements'])} elements changed ({changed}); {payload}"
    )
