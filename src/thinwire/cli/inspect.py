"""``thinwire inspect``: what a file, a folder or a bucket is, and what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from thinwire.cli.console import count, emit, json_option, plain, print_table, size, when

__all__ = ["inspect"]

_SHOWN = 12


@click.command()
@click.argument("target")
@json_option
def inspect(target: str, as_json: bool) -> None:
    """Say what TARGET is and what is in it.

    TARGET is a payload, a record (run.json, a commit, a manifest, a mirror's state.json), a shard
    of a checkpoint, a checkpoint folder, a mirror folder, or a bucket.

    \b
    JSON: kind (payload, shard, run, commit, anchor, state, checkpoint, mirror or
      bucket), then by kind
      payload: metadata, changed, tensors [{name, dtype, changed, bytes}], bytes
      shard: metadata, tensors [{name, dtype, shape, bytes}], bytes
      run, commit, anchor, state: the record's own keys
      checkpoint: shards [{path, tensors, bytes}], elements, tensors, bytes
      mirror: run, version, commit, elements, tensors, bytes, files [{path, size, …}]
      bucket: url, run, base, head, elements, tensors, bytes, aliases, commit
    """
    document = _described(target)
    if as_json:
        emit(document)
    else:
        _print(document, target)


def _described(target: str) -> dict[str, Any]:
    from thinwire.cli import describe
    from thinwire.mirror_folder import is_mirror

    path = Path(target)
    if path.is_file():
        return describe.file(path)
    if is_mirror(path):
        return describe.mirror(path)
    if path.is_dir() and not (path / "run.json").exists() and any(path.glob("*.safetensors")):
        return describe.checkpoint(path)
    return describe.bucket(target)


_TITLES = {
    "payload": "a delta's payload",
    "shard": "a safetensors file of a checkpoint",
    "run": "the record of a run",
    "commit": "the record of a version",
    "anchor": "the manifest of a whole checkpoint",
    "state": "the state of a mirror",
    "checkpoint": "a checkpoint folder",
    "mirror": "a mirror folder",
    "bucket": "a run's bucket",
}


def _print(document: Mapping[str, Any], target: str) -> None:
    click.echo(f"{target}: {_TITLES[document['kind']]}")
    tables = []
    for key, value in document.items():
        if key == "kind":
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            tables.append((key, value))
        elif isinstance(value, (list, dict)):
            _print_nested(key, value)
        else:
            click.echo(f"  {plain(key)}: {_text(key, value)}")
    for key, rows in tables:
        click.echo(f"\n{key}:")
        headers = tuple(rows[0])
        print_table(headers, [[_text(h, row.get(h)) for h in headers] for row in rows])


def _print_nested(key: str, value: list[Any] | dict[str, Any]) -> None:
    if not value:
        return
    lines = (
        [f"{plain(k)}: {_text(k, v)}" for k, v in value.items()]
        if isinstance(value, dict)
        else value
    )
    click.echo(f"  {key}:")
    for line in lines[:_SHOWN]:
        click.echo(f"    {_text('', line)}")
    if len(lines) > _SHOWN:
        click.echo(f"    … and {len(lines) - _SHOWN} more (--json shows all)")


_COUNTED = ("changed", "elements", "tensors")


def _text(key: str, value: Any) -> str:
    if key == "shape":
        return "×".join(map(str, value)) or "scalar"
    if value in (None, "", [], {}):
        return "-"
    if key == "time_ms":
        return when(value)
    if key in ("bytes", "size"):
        return f"{count(value)} ({size(value)})"
    if isinstance(value, (list, dict)):
        return f"{len(value)} entries (--json shows all)"
    return count(value) if key in _COUNTED else plain(str(value))
