"""The records that make a run: what it is, its versions, and its whole checkpoints.

Pure values and their bytes; nothing here touches a bucket.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from thinwire.errors import CorruptPayload, ThinwireError
from thinwire.log.keys import MAX_VERSION
from thinwire.log.records import open_record, record_hash, seal_record
from thinwire.schema import Schema

__all__ = ["AnchorFile", "Commit", "Manifest", "PayloadRef", "RunInfo", "Tip", "new_nonce"]

T = TypeVar("T")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NONCE = re.compile(r"[0-9a-f]{32}")


def new_nonce() -> str:
    """A random 128-bit id, 32 hex digits: for runs and for writers."""
    return secrets.token_hex(16)


class Tip(NamedTuple):
    """A point in a run's history: the run, a version of it, and the hash of its record.

    Version -1 is the run before its first version: the hash is that of ``run.json``.
    """

    run: str
    version: int
    hash: str


@dataclass(frozen=True)
class PayloadRef:
    """An object that a commit needs: its key, its size in bytes and its SHA-256 in hex."""

    key: str
    size: int
    sha256: str


@dataclass(frozen=True)
class RunInfo:
    """``run.json``: written once, create-only.

    Attributes:
        run: random id.
        writer: nonce of the writer that created the run.
        schema: tensors and ties.
        base: where version 0's weights come from when the bucket does not hold them; or "".
        time_ms: Unix time of creation, milliseconds; informative.
    """

    run: str
    writer: str
    schema: Schema
    base: str = ""
    time_ms: int = 0

    def encode(self) -> bytes:
        """The bytes of ``run.json``."""
        return seal_record(
            "run",
            {
                "base": self.base,
                "run": self.run,
                "schema": self.schema.to_json(),
                "time_ms": self.time_ms,
                "writer": self.writer,
            },
        )

    @property
    def hash(self) -> str:
        """What version 0 names as its parent."""
        return record_hash(self.encode())

    @property
    def tip(self) -> Tip:
        """The run before its first version."""
        return Tip(self.run, -1, self.hash)

    @classmethod
    def decode(cls, data: bytes) -> RunInfo:
        """Inverse of :meth:`encode`, for untrusted bytes.

        Raises:
            CorruptPayload, UnsupportedFormat
        """
        body = open_record("run", data)
        run = _checked(
            "run record",
            lambda: cls(
                _match(_NONCE, body["run"]),
                _match(_NONCE, body["writer"]),
                Schema.from_json(body["schema"]),
                _text(body["base"]),
                _count(body["time_ms"]),
            ),
        )
        if run.hash != record_hash(data):
            run = _ForeignRun(**_fields(run), stored=record_hash(data))
        return run


@dataclass(frozen=True)
class _ForeignRun(RunInfo):
    """A run with keys this version does not know: its hash is that of the stored bytes."""

    stored: str = ""

    @property
    def hash(self) -> str:
        return self.stored


@dataclass(frozen=True)
class Commit:
    """``commits/<version>.json``: its presence is the version.

    Attributes:
        run: the run it belongs to.
        version: 0, 1, 2 …
        parent: hash of the parent commit's line 1; of run.json's for version 0.
        writer: nonce of the writer; a new one takes the run over.
        payloads: what has to be applied to the parent's state; for version 0 the manifest of its
            anchor, or nothing if the run has a base.
        digest: state digest after applying them (§ State digest of the format page).
        changed: elements that differ from the parent's state.
        tensors: tensors that do.
        step: the trainer's optimizer step, if it said.
        time_ms: Unix time, milliseconds; informative.
        codec: of the payloads; informative.
    """

    run: str
    version: int
    parent: str
    writer: str
    payloads: tuple[PayloadRef, ...]
    digest: str
    changed: int = 0
    tensors: int = 0
    step: int | None = None
    time_ms: int = 0
    codec: str = ""

    def encode(self) -> bytes:
        """The bytes of the commit file."""
        body: dict[str, Any] = {
            "changed": self.changed,
            "codec": self.codec,
            "digest": self.digest,
            "parent": self.parent,
            "payloads": [{"key": p.key, "sha256": p.sha256, "size": p.size} for p in self.payloads],
            "run": self.run,
            "tensors": self.tensors,
            "time_ms": self.time_ms,
            "version": self.version,
            "writer": self.writer,
        }
        if self.step is not None:
            body["step"] = self.step
        return seal_record("commit", body)

    @property
    def hash(self) -> str:
        """What the next version names as its parent."""
        return record_hash(self.encode())

    @property
    def tip(self) -> Tip:
        """The run at this version."""
        return Tip(self.run, self.version, self.hash)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payloads together."""
        return sum(p.size for p in self.payloads)

    @classmethod
    def decode(cls, data: bytes) -> Commit:
        """Inverse of :meth:`encode`, for untrusted bytes.

        Raises:
            CorruptPayload, UnsupportedFormat
        """
        body = open_record("commit", data)
        commit = _checked(
            "commit record",
            lambda: cls(
                _match(_NONCE, body["run"]),
                _count(body["version"], MAX_VERSION),
                _match(_SHA256, body["parent"]),
                _match(_NONCE, body["writer"]),
                tuple(
                    PayloadRef(_text(p["key"]), _count(p["size"]), _match(_SHA256, p["sha256"]))
                    for p in _list(body["payloads"])
                ),
                _match(_SHA256, body["digest"]),
                _count(body["changed"]),
                _count(body["tensors"]),
                _integer(body["step"]) if "step" in body else None,
                _count(body["time_ms"]),
                _text(body["codec"]),
            ),
        )
        # keys that a newer minor version added are ignored, but they belong to the hash
        if commit.hash != record_hash(data):
            commit = _Foreign(**_fields(commit), stored=record_hash(data))
        return commit


@dataclass(frozen=True)
class _Foreign(Commit):
    """A commit with keys this version does not know: its hash is that of the stored bytes."""

    stored: str = ""

    @property
    def hash(self) -> str:
        return self.stored


@dataclass(frozen=True)
class AnchorFile:
    """A file of a whole checkpoint: relative name, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``manifest.json`` of an anchor: written last, it completes the checkpoint.

    Attributes:
        run, version: what the checkpoint is.
        digest: its state digest.
        files: everything in the folder but the manifest, weights and assets.
    """

    run: str
    version: int
    digest: str
    files: tuple[AnchorFile, ...]

    def encode(self) -> bytes:
        """The bytes of the manifest."""
        files = [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in self.files]
        return seal_record(
            "anchor",
            {"digest": self.digest, "files": files, "run": self.run, "version": self.version},
        )

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Inverse of :meth:`encode`, for untrusted bytes.

        Raises:
            CorruptPayload, UnsupportedFormat
        """
        body = open_record("anchor", data)
        return _checked(
            "anchor record",
            lambda: cls(
                _match(_NONCE, body["run"]),
                _count(body["version"], MAX_VERSION),
                _match(_SHA256, body["digest"]),
                tuple(
                    AnchorFile(_text(f["path"]), _count(f["size"]), _match(_SHA256, f["sha256"]))
                    for f in _list(body["files"])
                ),
            ),
        )


def _fields(record: RunInfo | Commit) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _checked(what: str, build: Callable[[], T]) -> T:
    try:
        return build()
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, ThinwireError) else repr(error)
        raise CorruptPayload(f"{what}: {detail[:200]}") from None


def _match(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is not of the form {pattern.pattern}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{str(value)[:80]!r} is not a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:80]!r} is not a string")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise ValueError(f"{str(value)[:80]!r} is not a 64-bit integer")
    return value


def _count(value: Any, limit: int = (1 << 63) - 1) -> int:
    if not 0 <= _integer(value) <= limit:
        raise ValueError(f"{str(value)[:80]!r} is not a count up to {limit}")
    return int(value)
