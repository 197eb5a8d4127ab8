"""Bytes under keys: the interface to a store, the stores that come along, and ``open_bucket``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from thinwire.bucket.base import (
    Bucket,
    Capabilities,
    Data,
    ObjectInfo,
    check_key,
    data_size,
    iter_data,
)
from thinwire.bucket.local import LocalBucket
from thinwire.bucket.memory import MemoryBucket
from thinwire.errors import Misuse

__all__ = [
    "Bucket",
    "Capabilities",
    "Data",
    "LocalBucket",
    "MemoryBucket",
    "ObjectInfo",
    "check_key",
    "data_size",
    "iter_data",
    "open_bucket",
]

# One slash is enough: Path("s3://x") has lost the second, and "s3:/x" is nobody's folder.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


def open_bucket(url: str | os.PathLike[str] | Bucket) -> Bucket:
    """The bucket at ``url``; nothing is read, written or connected to yet.

    Where it says so, more can be said after a ``?``, as in ``s3://b/run1?region=eu-west-1``.

    ==========================  =================================================================
    ``hf://buckets/org/name/p`` a Hugging Face bucket and a prefix in it
    ``s3://name/prefix``        S3 and what speaks its protocol
    ``gs://name/prefix``        Google Cloud Storage
    ``az://container/prefix``   Azure Blob Storage
    ``file:///data/run1``       a directory
    ``/data/run1``, ``./run1``  the same; ``~`` is expanded, and a ``Path`` does as well
    ``memory://name``           this process's store of that name
    ``memory://``               a fresh store in memory
    a :class:`Bucket`           itself
    ==========================  =================================================================

    Raises:
        Misuse: an unknown scheme or a malformed URL.
    """
    if isinstance(url, Bucket):
        return url
    location = os.fspath(url)
    if not isinstance(location, str) or not location or "\0" in location:
        raise Misuse(f"not a bucket URL: {url!r}", hint=_known())
    scheme = _SCHEME.match(location)
    if scheme is None:
        return LocalBucket(os.path.expanduser(location))
    opener = _OPENERS.get(scheme[1].lower())
    if opener is None:
        raise Misuse(f"unknown bucket scheme {scheme[1]!r} in {location!r}", hint=_known())
    if not location.startswith("//", scheme.end() - 1):
        raise Misuse(f"not a bucket URL: {url!r}", hint="write URLs as text, with two slashes")
    return opener(location)


def _open_local(url: str) -> Bucket:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise Misuse(f"not a local bucket: {url!r}", hint="write file:///absolute/path")
    return LocalBucket(unquote(parts.path))


def _open_memory(url: str) -> Bucket:
    name = url.partition("://")[2].rstrip("/")
    return MemoryBucket.named(name) if name else MemoryBucket()


def _open_objects(url: str) -> Bucket:
    from thinwire.bucket.objects import open_objects

    return open_objects(url)


def _open_hub(url: str) -> Bucket:
    from thinwire.bucket.hub import open_hub

    return open_hub(url)


_OPENERS: dict[str, Callable[[str], Bucket]] = {
    "az": _open_objects,
    "file": _open_local,
    "gs": _open_objects,
    "hf": _open_hub,
    "memory": _open_memory,
    "s3": _open_objects,
}


def _known() -> str:
    schemes = ", ".join(f"{scheme}://" for scheme in sorted(_OPENERS))
    return f"use a folder's path or one of {schemes}"
