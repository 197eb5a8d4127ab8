"""Bytes under keys: the interface to a store, the stores that come along, and ``open_bucket``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from thinwire.bucket._objects_url import redacted
from thinwire.bucket.base import (
    Bucket,
    Capabilities,
    Data,
    ObjectInfo,
    check_key,
    data_size,
    iter_data,
)
from thinwire.bucket.cache import CachedBucket
from thinwire.bucket.local import LocalBucket
from thinwire.bucket.memory import MemoryBucket
from thinwire.bucket.metrics import MeteredBucket, Metrics
from thinwire.bucket.retry import RetryingBucket, RetryPolicy
from thinwire.bucket.throttle import ThrottledBucket
from thinwire.bucket.wrapper import WrappedBucket, innermost
from thinwire.errors import Misuse

__all__ = [
    "Bucket",
    "CachedBucket",
    "Capabilities",
    "Data",
    "LocalBucket",
    "MemoryBucket",
    "MeteredBucket",
    "Metrics",
    "ObjectInfo",
    "RetryPolicy",
    "RetryingBucket",
    "ThrottledBucket",
    "WrappedBucket",
    "check_key",
    "data_size",
    "innermost",
    "iter_data",
    "open_bucket",
]

CACHE_LIMIT = 20 * 10**9
"""Bytes that ``open_bucket(cache=…)`` keeps unless told otherwise."""

# One slash is enough: Path("s3://x") has lost the second, and "s3:/x" is nobody's folder.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


def open_bucket(
    url: str | os.PathLike[str] | Bucket,
    *,
    deadline: float | None = None,
    bandwidth: float | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int = CACHE_LIMIT,
    metrics: Metrics | None = None,
) -> Bucket:
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

    Each option puts a wrapper around the store; without options a local folder, a store in memory
    and a :class:`Bucket` are given back bare (:func:`innermost` finds what is inside). From the
    inside out: counting, pacing, retries, cache. So every try is counted and paced, and what the
    cache serves is neither.

    Args:
        deadline: seconds for which a store that does not answer is tried again, see
            :class:`RetryPolicy`. None: 60 for stores over a network, no retries for others.
            0: no retries.
        bandwidth: bytes per second, both directions together, see :class:`ThrottledBucket`.
        cache: a folder for copies of payloads and checkpoints, see :class:`CachedBucket`.
        cache_limit: bytes that the copies may take.
        metrics: counts every request.

    Raises:
        Misuse: an unknown scheme, a malformed URL, or an option that makes no sense.
    """
    bucket, remote = _opened(url)
    if deadline is None:
        deadline = RetryPolicy.deadline if remote else 0.0
    policy = RetryPolicy(deadline=deadline)
    if metrics is not None:
        bucket = MeteredBucket(bucket, metrics)
    if bandwidth is not None:
        bucket = ThrottledBucket(bucket, bandwidth)
    if policy.deadline:
        bucket = RetryingBucket(bucket, policy)
    if cache is not None:
        bucket = CachedBucket(bucket, cache, cache_limit)
    return bucket


def _opened(url: str | os.PathLike[str] | Bucket) -> tuple[Bucket, bool]:
    """The bare bucket, and whether it is reached over a network."""
    if isinstance(url, Bucket):
        return url, False
    location = os.fspath(url)
    if not isinstance(location, str) or not location or "\0" in location:
        raise Misuse(f"not a bucket URL: {_shown(url)}", hint=_known())
    scheme = _SCHEME.match(location)
    if scheme is None:
        return LocalBucket(os.path.expanduser(location)), False
    name = scheme[1].lower()
    opener = _OPENERS.get(name)
    if opener is None:
        raise Misuse(f"unknown bucket scheme {scheme[1]!r} in {_shown(url)}", hint=_known())
    if not location.startswith("//", scheme.end() - 1):
        hint = "write URLs as text, with two slashes"
        raise Misuse(f"not a bucket URL: {_shown(url)}", hint=hint)
    return opener(location), name not in ("file", "memory")


def _open_local(url: str) -> Bucket:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise Misuse(f"not a local bucket: {error}", hint="write file:///absolute/path") from None
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise Misuse(f"not a local bucket: {redacted(url)!r}", hint="write file:///absolute/path")
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


def _shown(url: object) -> str:
    """``url`` for a message, without what may be a secret in it."""
    return repr(redacted(os.fspath(url)) if isinstance(url, (str, os.PathLike)) else url)


def _known() -> str:
    schemes = ", ".join(f"{scheme}://" for scheme in sorted(_OPENERS))
    return f"use a folder's path or one of {schemes}"
