"""The bucket that processes of a demo share: there, reachable for all, and without a run."""

from __future__ import annotations

import contextlib

from thinwire.bucket import LocalBucket, MemoryBucket, innermost, open_bucket
from thinwire.errors import BucketNotFound, KeyNotFound, Misuse, RunExists
from thinwire.log.keys import RUN

__all__ = ["empty_bucket"]


def empty_bucket(url: str) -> str:
    """The bucket's full URL; a folder is made now, since servers may look before the trainer.

    So is a Hub bucket, by the trainer's first write; any other has to be there.

    Raises:
        Misuse: it holds a run already, or processes cannot share it.
        Bucket errors: it cannot be reached.
    """
    with open_bucket(url) as store:
        kept = innermost(store)
        if isinstance(kept, MemoryBucket):
            raise Misuse("processes cannot share a memory:// bucket", hint="pass a folder or a URL")
        if isinstance(kept, LocalBucket):
            kept.root.mkdir(parents=True, exist_ok=True)
        made_by_writing = (BucketNotFound,) if store.url.startswith("hf://") else ()
        with contextlib.suppress(KeyNotFound, *made_by_writing):
            store.head(RUN)
            raise RunExists(f"{store.url} already holds a run", hint="pass an empty prefix")
        return store.url
