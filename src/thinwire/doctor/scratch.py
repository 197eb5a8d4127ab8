"""Removing what was written under a scratch prefix, and in a local bucket its folders as well."""

from __future__ import annotations

import contextlib
import shutil

from thinwire.bucket import Bucket, LocalBucket, innermost
from thinwire.errors import BucketNotFound

__all__ = ["clear"]


def clear(bucket: Bucket, *, above: int = 1) -> None:
    """Delete every object of a bucket that serves as a scratch place and nothing else.

    Args:
        above: of a local bucket the folder goes as well, and so many of those around it if that
            leaves them empty.

    Raises:
        AccessDenied, BucketUnavailable: something is left.
    """
    inner = innermost(bucket)
    if isinstance(inner, LocalBucket):
        shutil.rmtree(inner.root, ignore_errors=True)
        with contextlib.suppress(OSError):
            for folder in list(inner.root.parents)[:above]:
                folder.rmdir()
        return
    with contextlib.suppress(BucketNotFound):
        for info in [*bucket.list()]:
            bucket.delete(info.key)
