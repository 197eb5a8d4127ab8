"""The envelope of every record in a run: two lines of JSON that check each other.

Line 1 is canonical JSON: one object, keys sorted, no spaces, nothing but integers, strings, lists
and objects, so that equal values have equal bytes. Line 2 is an object that holds the SHA-256 of
line 1 (without its newline). A reader accepts nothing that would not be written the same way.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from thinwire.errors import CorruptPayload, Misuse, UnsupportedFormat

__all__ = ["MAJOR", "MAX_RECORD", "open_record", "record_hash", "seal_record"]

MAJOR = 1
MAX_RECORD = 512 << 20
"""Bytes; the schema of a model with millions of tensors fits."""


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return isinstance(value, str) or type(value) is int


def seal_record(kind: str, body: dict[str, Any]) -> bytes:
    """The bytes of a record of the given kind.

    Args:
        body: integers, strings, lists and objects only; ``format`` and ``major`` are added.

    Raises:
        Misuse: it holds something else, so that no reader would take the record.
    """
    if not _plain(body):
        raise Misuse(f"a {kind} record holds integers, strings, lists and objects only")
    line = _canonical({**body, "format": f"thinwire-{kind}", "major": MAJOR})
    seal = _canonical({"sha256": hashlib.sha256(line).hexdigest()})
    return line + b"\n" + seal + b"\n"


def record_hash(data: bytes) -> str:
    """SHA-256, in hex, of a sealed record's line 1: what children refer to."""
    return hashlib.sha256(data.partition(b"\n")[0]).hexdigest()


def open_record(kind: str, data: bytes) -> dict[str, Any]:
    """The body of a sealed record, checked.

    Raises:
        CorruptPayload: anything about the envelope is not as it would have been written.
        UnsupportedFormat: a newer major version wrote it.
    """
    what = f"{kind} record"
    if len(data) > MAX_RECORD:
        raise CorruptPayload(f"{what}: {len(data)} bytes are more than any real one has")
    lines = data.split(b"\n")
    if len(lines) != 3 or lines[2]:
        raise CorruptPayload(f"{what}: expected two lines, each ended by a newline")
    body, seal = (_parse(what, line) for line in lines[:2])
    if seal.get("sha256") != hashlib.sha256(lines[0]).hexdigest():
        raise CorruptPayload(f"{what}: line 1 does not have the SHA-256 that line 2 says")
    if body.get("format") != f"thinwire-{kind}":
        raise CorruptPayload(f"{what}: format is {str(body.get('format'))[:40]!r}")
    if body.get("major") != MAJOR:
        raise UnsupportedFormat(f"{what}: major version {body.get('major')!r}, this reads {MAJOR}")
    return body


def _parse(what: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode())
        if isinstance(value, dict) and _plain(value) and _canonical(value) == line:
            return value
    except (ValueError, RecursionError):
        pass
    raise CorruptPayload(f"{what}: not canonical JSON")
