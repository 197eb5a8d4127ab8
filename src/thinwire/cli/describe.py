"""What ``thinwire inspect`` finds out, as JSON-able values; nothing is printed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire import codec
from thinwire.bucket import open_bucket
from thinwire.chain import Chain
from thinwire.checkpoint import Checkpoint
from thinwire.codec import wire
from thinwire.errors import InvalidCheckpoint, Misuse
from thinwire.log.records import MAX_RECORD, open_record
from thinwire.mirror_folder import locked, read_held
from thinwire.schema import Schema

__all__ = ["bucket", "checkpoint", "file", "mirror"]

_RECORDS = {"thinwire-run": "run", "thinwire-commit": "commit", "thinwire-anchor": "anchor"}
_STATE = "thinwire-mirror"


def file(path: Path) -> dict[str, Any]:
    """A record, a payload or a shard.

    Raises:
        Misuse: it is none of them.
        CorruptPayload, UnsupportedFormat: it is one, and damaged, or written by a newer version.
    """
    with path.open("rb") as opened:
        start = opened.read(2)
    if start[:1] == b"{" and path.stat().st_size <= MAX_RECORD:
        return _record(path)
    try:
        header = wire.read_header(path)
    except InvalidCheckpoint as error:
        raise Misuse(
            f"{path} is neither a record nor a safetensors file: {error}",
            hint="pass a payload, a record, a shard, a folder or a bucket",
        ) from None
    known = header.metadata.get("format") == codec.FORMAT
    return _payload(header) if known else _shard(header)


def _record(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        named = json.loads(data.partition(b"\n")[0])["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        named = ""
    if named == _STATE:
        return {"kind": "state", **_without_envelope(open_record("mirror", data))}
    kind = _RECORDS.get(named) if isinstance(named, str) else None
    if kind is None:
        raise Misuse(
            f"{path} is not a record of thinwire, or too damaged to tell",
            hint="run `thinwire verify` on the bucket or the mirror that it belongs to",
        )
    return {"kind": kind, **_without_envelope(open_record(kind, data))}


def _without_envelope(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "format"}


def _payload(header: wire.Header) -> dict[str, Any]:
    """A delta, by its header. Coded ones keep no names: what they change, only the run can tell."""
    if header.metadata.get("codec") != "raw":
        return {**_shard(header), "kind": "payload", "changed": None}
    rows = [
        {
            "name": name.removesuffix(".values"),
            "dtype": entry.dtype.name,
            "changed": entry.shape[0] if entry.shape else 0,
            "bytes": sum(
                part.stop - part.start
                for suffix in (".values", ".indices")
                if (part := header.entries.get(name.removesuffix(".values") + suffix))
            ),
        }
        for name, entry in sorted(header.entries.items())
        if name.endswith(".values")
    ]
    return {
        "kind": "payload",
        "metadata": dict(header.metadata),
        "changed": sum(row["changed"] for row in rows),
        "bytes": header.size,
        "tensors": rows,
    }


def _shard(header: wire.Header) -> dict[str, Any]:
    rows = [
        {
            "name": entry.name,
            "dtype": entry.dtype.name,
            "shape": list(entry.shape),
            "bytes": entry.stop - entry.start,
        }
        for entry in header.entries.values()
    ]
    return {
        "kind": "shard",
        "metadata": dict(header.metadata),
        "bytes": header.size,
        "tensors": rows,
    }


def checkpoint(folder: Path) -> dict[str, Any]:
    """A folder of shards."""
    opened = Checkpoint.open(folder)
    return {
        "kind": "checkpoint",
        **_totals(opened.schema()),
        "shards": [
            {"path": name, "tensors": len(header.entries), "bytes": header.size}
            for name, header in opened.headers.items()
        ],
    }


def mirror(folder: Path) -> dict[str, Any]:
    """A mirror folder, by its state file and journal; weights are not read."""
    with locked(folder, exclusive=False):
        state = read_held(folder, torn=True)
    return {
        "kind": "mirror",
        "run": state.held.run,
        "version": state.held.version,
        "commit": state.held.hash,
        **_totals(state.schema),
        "files": list(state.files),
    }


def bucket(url: str) -> dict[str, Any]:
    """The run in a bucket, by its record and its newest commit."""
    store = open_bucket(url)
    chain = Chain(store)
    run = chain.read_run()
    head = chain.sure_head()
    newest = None if head is None else chain.read(head)
    return {
        "kind": "bucket",
        "url": store.url,
        "run": run.run,
        "base": run.base,
        "time_ms": run.time_ms,
        "head": head,
        **_totals(run.schema),
        "aliases": dict(run.schema.aliases),
        "commit": None
        if newest is None
        else {
            "version": newest.version,
            "step": newest.step,
            "changed": newest.changed,
            "tensors": newest.tensors,
            "bytes": newest.payload_bytes,
            "codec": newest.codec,
            "digest": newest.digest,
            "time_ms": newest.time_ms,
        },
    }


def _totals(schema: Schema) -> dict[str, int]:
    return {"elements": schema.numel, "tensors": len(schema), "bytes": schema.nbytes}
