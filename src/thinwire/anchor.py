"""Whole checkpoints in a bucket, in the Hugging Face layout: writing them and fetching them.

An anchor's folder is named by its version and the hash of its manifest, and the manifest, written
last, names every file with its size and SHA-256. Two writers therefore never touch each other's
files, and a half-written anchor is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from thinwire.bucket import Bucket, Data, check_key, data_size, iter_data
from thinwire.chain import read_bounded, upload
from thinwire.checkpoint import (
    INDEX,
    OTHER_WEIGHTS,
    Checkpoint,
    asset_files,
    index_json,
    is_weights,
    lay_out,
)
from thinwire.errors import CorruptPayload, InvalidKey, KeyNotFound, Misuse, VersionGone
from thinwire.log import keys
from thinwire.log.commit import AnchorFile, Commit, Manifest, PayloadRef, RunInfo
from thinwire.patch import Bits
from thinwire.schema import Schema

__all__ = [
    "Progress",
    "fetch_file",
    "fetch_manifest",
    "first_files",
    "folder_files",
    "write_anchor",
]

Progress = Callable[[str, int, int], None]
"""Told what is being moved, bytes so far and bytes in all."""

MAX_ASSET = 1 << 30
"""Bytes of a single file beside the weights."""

_MAX_HEADERS = 200_000_000
_SMALL = 64 << 20
_MAX_MANIFEST = 64 << 20


def _sha256(data: Data) -> str:
    digest = hashlib.sha256()
    for piece in iter_data(data):
        digest.update(piece)
    return digest.hexdigest()


def write_anchor(
    bucket: Bucket,
    run: str,
    version: int,
    schema: Schema,
    tensors: Sequence[Bits],
    digest: str,
    *,
    assets: Path | None = None,
    max_shard: int,
    progress: Progress | None = None,
) -> PayloadRef:
    """Store a whole checkpoint; return the reference to its manifest.

    Args:
        tensors: per tensor ``(numel,)`` bits, in schema order; written without copies.
        digest: their state digest.
        assets: a folder whose config, tokenizer and generation files travel along.
        max_shard: bytes of tensor data per file.

    Raises:
        InvalidCheckpoint: ``assets`` is not a folder.
        InvalidKey: an asset's file name cannot be stored.
        Misuse: an asset is larger than readers accept.
        Bucket errors.
    """
    shards = lay_out(schema, max_shard=max_shard)
    contents: dict[str, Data] = {
        shard.name: [
            memoryview(shard.head),
            *(tensors[k].data.cast("B") for k in shard.ordinals if tensors[k].size),
        ]
        for shard in shards
    }
    if len(shards) > 1:
        contents[INDEX] = index_json(schema, shards)
    for path in asset_files(assets) if assets is not None else []:
        contents[_asset_name(path)] = _asset(path)
    files = tuple(
        AnchorFile(name, data_size(data), _sha256(data)) for name, data in sorted(contents.items())
    )
    manifest = Manifest(run, version, digest, files).encode()
    sha256 = hashlib.sha256(manifest).hexdigest()
    prefix = keys.anchor_prefix(version, sha256)
    done, total = 0, sum(file.size for file in files)
    for file in files:
        upload(bucket, prefix + file.path, contents[file.path], file.size)
        done += file.size
        if progress is not None:
            progress("upload anchor", done, total)
    upload(bucket, prefix + keys.MANIFEST, manifest, len(manifest))
    return PayloadRef(prefix + keys.MANIFEST, len(manifest), sha256)


def _asset_name(path: Path) -> str:
    hint = "move it elsewhere, or publish without assets"
    try:
        name = check_key(path.name)
    except InvalidKey:
        raise InvalidKey(f"{path}: its name cannot be stored", hint=hint) from None
    if data_size(path) > MAX_ASSET:
        raise Misuse(f"{path}: an asset has at most {MAX_ASSET} bytes", hint=hint)
    return name


def _asset(path: Path) -> Data:
    """A file's content, read once where it is small: it may be rewritten while it is uploaded."""
    return path.read_bytes() if path.stat().st_size <= _SMALL else path


def fetch_manifest(bucket: Bucket, ref: PayloadRef, schema: Schema) -> Manifest:
    """An anchor's manifest, checked against the reference and for plausibility.

    Raises:
        VersionGone: it is not there any more.
        CorruptPayload: it is not what the reference says, or lists impossible files.
    """
    if ref.size > _MAX_MANIFEST:
        raise CorruptPayload(f"{ref.key}: {ref.size} bytes are more than any manifest has")
    try:
        data = read_bounded(bucket, ref.key, ref.size)
    except KeyNotFound:
        raise VersionGone(f"the anchor {ref.key} is gone") from None
    except CorruptPayload:
        bucket.forget(ref.key)
        raise
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
        bucket.forget(ref.key)
        raise CorruptPayload(f"{ref.key} is not the manifest that its commit names")
    manifest = Manifest.decode(data)
    names = [file.path for file in manifest.files]
    if len(set(names)) != len(names):
        raise CorruptPayload(f"{ref.key} lists a file twice")
    for file in manifest.files:
        try:
            check_key(file.path)
        except InvalidKey as error:
            raise CorruptPayload(f"{ref.key}: {error}") from None
        if (
            "/" in file.path
            or file.path.endswith(OTHER_WEIGHTS)
            or (not is_weights(file.path) and file.size > MAX_ASSET)
        ):
            raise CorruptPayload(f"{ref.key} lists an impossible file: {file.path!r}")
    weights = sum(file.size for file in manifest.files if is_weights(file.path))
    if not schema.nbytes <= weights <= schema.nbytes + _MAX_HEADERS:
        raise CorruptPayload(f"{ref.key}: {weights} bytes of weights do not fit the schema")
    return manifest


def fetch_file(bucket: Bucket, ref: PayloadRef, file: AnchorFile) -> Iterator[bytes]:
    """One file of an anchor in pieces; the last one comes only after size and SHA-256 match.

    Args:
        ref: of the manifest that lists the file.

    Raises:
        VersionGone: the file is not there any more.
        CorruptPayload: its bytes are not those the manifest names.
    """
    key = ref.key.removesuffix(keys.MANIFEST) + file.path
    digest, seen, held = hashlib.sha256(), 0, b""
    try:
        for piece in bucket.stream(key):
            seen += len(piece)
            if seen > file.size:
                bucket.forget(key)
                raise CorruptPayload(f"{key} is longer than the {file.size} bytes it should have")
            digest.update(piece)
            if held:
                yield held
            held = piece
    except KeyNotFound:
        raise VersionGone(f"{key} is gone") from None
    if seen != file.size or digest.hexdigest() != file.sha256:
        bucket.forget(key)
        raise CorruptPayload(f"{key} is not the file that its manifest names")
    yield held


def folder_files(
    folder: Path,
) -> tuple[list[AnchorFile], Callable[[AnchorFile], Iterator[bytes]]]:
    """A local checkpoint folder in the place of an anchor: its files, and how to read them.

    Raises:
        InvalidCheckpoint: it is not a readable safetensors checkpoint.
    """
    names = [*Checkpoint.open(folder).headers, *(path.name for path in asset_files(folder))]
    if (folder / INDEX).exists():
        names.append(INDEX)
    files = [
        AnchorFile(name, (folder / name).stat().st_size, _sha256(folder / name)) for name in names
    ]

    def read(file: AnchorFile) -> Iterator[bytes]:
        return (bytes(piece) for piece in iter_data(folder / file.path))

    return files, read


def first_files(
    bucket: Bucket, run: RunInfo, commit: Commit, base: Path | None, progress: Progress | None
) -> tuple[Sequence[AnchorFile], Callable[[AnchorFile], Iterator[bytes]]]:
    """Version 0's files, from the bucket or from ``base``, and how to read them.

    Args:
        commit: of version 0.
        base: a folder with its weights, for runs whose bucket does not hold them.

    Raises:
        Misuse: the bucket does not hold them and there is no base.
        CorruptPayload, VersionGone: as for :func:`fetch_manifest`.
        InvalidCheckpoint: ``base`` is not a readable safetensors checkpoint.
    """
    if not commit.payloads:
        if base is None:
            raise Misuse(
                f"version 0 is not in the bucket: it is {run.base!r}",
                hint="get that checkpoint and pass its folder as base",
            )
        return folder_files(base)
    ref = commit.payloads[0]
    if len(commit.payloads) != 1 or keys.anchor_version(ref.key) != 0:
        raise CorruptPayload(f"version 0 names {ref.key!r} where its anchor should be")
    manifest = fetch_manifest(bucket, ref, run.schema)
    if (manifest.run, manifest.version, manifest.digest) != (run.run, 0, commit.digest):
        raise CorruptPayload(f"{ref.key} is the anchor of something else")
    total = sum(file.size for file in manifest.files)
    done = 0

    def fetch(file: AnchorFile) -> Iterator[bytes]:
        nonlocal done
        for piece in fetch_file(bucket, ref, file):
            done += len(piece)
            if progress is not None:
                progress("fetch anchor", done, total)
            yield piece

    return manifest.files, fetch
