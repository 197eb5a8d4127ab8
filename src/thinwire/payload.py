"""Deltas on their way: encoded and named; fetched, checked against their commit, and decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from thinwire import codec as codecs
from thinwire.bucket import Bucket
from thinwire.errors import CorruptPayload, KeyNotFound, VersionGone
from thinwire.log import keys
from thinwire.log.commit import Commit, PayloadRef
from thinwire.patch import Bits, Patch, StepPatch
from thinwire.schema import Schema

__all__ = [
    "decode_payload_steps",
    "decode_payloads",
    "encode_payloads",
    "fetch_payload",
    "fetch_payloads",
    "payload_limit",
]

_OVERHEAD = 200_000_000


P = TypeVar("P", Patch, Patch | StepPatch)


def encode_payloads(
    patches: Sequence[Patch],
    *,
    codec: str,
    run: str,
    version: int,
    base: Sequence[Bits],
    threads: int | None = None,
) -> tuple[list[PayloadRef], list[memoryview]]:
    """A version's payload as consecutive buffers, and what its commit says of it.

    Args:
        patches: in schema order; without any there is no payload.
        codec: name of a codec.
        base: per tensor ``(numel,)`` bits of the version before.
    """
    if not patches:
        return [], []
    metadata = {"run": run, "version": str(version), "base": str(version - 1)}
    buffers = codecs.encode(patches, codec=codec, metadata=metadata, base=base, threads=threads)
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    sha256 = digest.hexdigest()
    size = sum(buffer.nbytes for buffer in buffers)
    return [PayloadRef(keys.delta_key(version, sha256), size, sha256)], buffers


def payload_limit(schema: Schema) -> int:
    """Bytes that no version of a run can exceed: every element with a 64-bit index, and headers."""
    return schema.nbytes + 8 * schema.numel + _OVERHEAD


def fetch_payloads(bucket: Bucket, commit: Commit, limit: int) -> list[bytearray]:
    """The bytes of a version's payloads, checked against the commit that names them.

    Args:
        limit: bytes that the payloads of one version of this run cannot exceed together.

    Raises:
        VersionGone: one is not there any more.
        CorruptPayload: one is not what the commit names, or what it names is impossible.
    """
    if commit.payload_bytes > limit:
        raise CorruptPayload(
            f"version {commit.version} claims {commit.payload_bytes} bytes of payload, "
            f"its tensors allow {limit}"
        )
    if len({ref.key for ref in commit.payloads}) != len(commit.payloads):
        raise CorruptPayload(f"version {commit.version} names a payload twice")
    return [fetch_payload(bucket, ref, commit.version, limit) for ref in commit.payloads]


def fetch_payload(bucket: Bucket, ref: PayloadRef, version: int, limit: int) -> bytearray:
    """A delta's bytes, checked against the commit that names it.

    Args:
        limit: bytes that no payload of this run can exceed.

    Raises:
        VersionGone: it is not there any more.
        CorruptPayload: it is not what the commit names.
    """
    if keys.delta_version(ref.key) != version or ref.size > limit:
        raise CorruptPayload(f"version {version} names an impossible payload: {ref.key!r}")
    data = bytearray()
    try:
        for piece in bucket.stream(ref.key):
            if len(data) + len(piece) > ref.size:
                bucket.forget(ref.key)
                raise CorruptPayload(f"{ref.key} is longer than the {ref.size} bytes it should be")
            data += piece
    except KeyNotFound:
        raise VersionGone(f"the payload of version {version} is gone: {ref.key}") from None
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
        bucket.forget(ref.key)
        raise CorruptPayload(f"{ref.key} is not the payload that version {version} names")
    return data


def decode_payload_steps(payloads: Sequence[bytearray], schema: Schema) -> list[Patch | StepPatch]:
    """Like :func:`decode_payloads` without the version before: changes as ULP steps.

    Raises:
        CorruptPayload, UnsupportedFormat
        Misuse: a payload cannot be read without a mirror.
    """
    views = [memoryview(data).toreadonly() for data in payloads]
    return _once_each([patch for view in views for patch in codecs.decode_steps(view, schema)])


def decode_payloads(
    payloads: Sequence[bytearray], schema: Schema, base: Sequence[Bits] | None
) -> list[Patch]:
    """The patches of a version's payloads, checked, in schema order.

    Args:
        base: per tensor ``(numel,)`` bits of the version before; None to read only payloads that
            do not need it.

    Raises:
        CorruptPayload, UnsupportedFormat
        Misuse: a payload needs the base.
    """
    views = [memoryview(data).toreadonly() for data in payloads]
    patches = [patch for view in views for patch in codecs.decode(view, schema, base)]
    return _once_each(patches)


def _once_each(patches: list[P]) -> list[P]:
    ordinals = [patch.ordinal for patch in patches]
    if len(set(ordinals)) != len(ordinals):
        raise CorruptPayload("two payloads of one version change the same tensor")
    return sorted(patches, key=lambda patch: patch.ordinal)
