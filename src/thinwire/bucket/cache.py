"""A disk cache for what never changes, so that the replicas of one host fetch it about once.

Only objects that are named by their content are kept: payloads and whole checkpoints. ``run.json``
and the commits are always read from the store, or a rewritten history would go unseen.

Several threads and processes may share the folder. One of those that want the same object
fetches it and the others wait for its copy, as long as more of it keeps coming; when nothing has
come for a few seconds, or it is not there after a minute, they fetch it themselves. That is a
courtesy, not a promise.

The cache cannot fail: with a full disk or a folder that may not be written everything passes
through. What it holds is checked by its own SHA-256 at every use, and a delta also by the hash in
its name before it is kept. Who finds that a checkpoint's file arrived wrong says ``forget``.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from thinwire.bucket._entries import Entry, EntryFolder, Lead
from thinwire.bucket.base import CHUNK, Bucket, Data, check_key
from thinwire.bucket.wrapper import WrappedBucket
from thinwire.errors import Misuse

__all__ = ["CachedBucket", "named_by_content"]

_NAMED = re.compile(r"deltas/[0-9]{10}-([0-9a-f]{32})\.safetensors")
_LOOK_S = 0.02
_LONGEST_WAIT_S = 60.0


def named_by_content(key: str) -> bool:
    """Whether ``key`` is in a folder where names say what an object holds."""
    return key.startswith(("deltas/", "anchors/"))


class CachedBucket(WrappedBucket):
    """``inner``, with copies of immutable objects in ``folder``.

    Args:
        folder: made on first use. It may serve many buckets and processes, each with its own
            limit; it holds nothing that cannot be deleted at any time.
        limit_bytes: what the complete copies take together; what was not read for longest goes
            first. An object larger than this passes through.
        immutable: which keys name objects that never change.
        patience: seconds without a new piece after which who waits for another's copy fetches
            the object itself.

    Attributes:
        hits, misses: reads of immutable objects that the folder could serve, and that it could not.

    Raises:
        Misuse: ``folder`` is not a folder, or the limit is negative.
    """

    def __init__(
        self,
        inner: Bucket,
        folder: str | os.PathLike[str],
        limit_bytes: int,
        *,
        immutable: Callable[[str], bool] = named_by_content,
        patience: float = 5.0,
    ) -> None:
        super().__init__(inner)
        path = Path(os.path.abspath(os.path.expanduser(folder)))
        if path.exists() and not path.is_dir():
            raise Misuse(f"{path} is not a folder", hint="give the cache a folder of its own")
        if limit_bytes < 0:
            raise Misuse(f"a cache of {limit_bytes} bytes", hint="give a number of bytes")
        self._entries = EntryFolder(path, limit_bytes)
        self._immutable = immutable
        self._patience = patience
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    def get(self, key: str) -> bytes:
        if not self._immutable(check_key(key)):
            return self.inner.get(key)
        return b"".join(self.stream(key))

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        if not self._immutable(check_key(key)):
            return self.inner.stream(key, chunk=chunk)
        return self._cached(key, chunk)

    def put(self, key: str, data: Data) -> None:
        self.inner.put(key, data)
        self._drop(key)

    def delete(self, key: str) -> None:
        self.inner.delete(key)
        self._drop(key)

    def forget(self, key: str) -> None:
        self.inner.forget(key)
        self._drop(check_key(key))

    def _drop(self, key: str) -> None:
        if self._immutable(key):
            self._entries.remove(self._name(key))

    def _name(self, key: str) -> str:
        return hashlib.sha256(f"{self.url}\0{key}".encode()).hexdigest()

    def _cached(self, key: str, chunk: int) -> Iterator[bytes]:
        name = self._name(key)
        entry = self._entries.open(name)
        lead: Lead | None = None
        if entry is None:
            lead = self._wait_for_lead(name)
            entry = self._entries.open(name)  # it may have come meanwhile
        with self._lock:
            self.hits += entry is not None
            self.misses += entry is None
        try:
            if entry is None:
                yield from self._fetched(key, name, chunk, lead)
                return
        finally:
            if lead is not None:
                lead.end()
        yield from self._kept(key, entry, chunk)

    def _wait_for_lead(self, name: str) -> Lead | None:
        """The lead, or None if another has it and nothing came for too long."""
        seen, since = None, time.monotonic()
        end = since + _LONGEST_WAIT_S
        while True:
            lead = self._entries.lead(name)
            if lead is not None:
                return lead
            pulse = self._entries.pulse(name)
            if pulse != seen:
                seen, since = pulse, time.monotonic()
            elif time.monotonic() - since > self._patience:
                return None
            if time.monotonic() > end:
                return None
            time.sleep(_LOOK_S)

    def _fetched(self, key: str, name: str, chunk: int, lead: Lead | None) -> Iterator[bytes]:
        """From the store, kept on the way. What is left early is not kept."""
        writer = self._entries.write(name)
        try:
            for piece in self.inner.stream(key, chunk=chunk):
                if lead is not None:
                    lead.pulse()
                writer.write(piece)
                yield piece
            named = _NAMED.fullmatch(key)
            writer.commit(named[1] if named else "")
        finally:
            writer.abandon()

    def _kept(self, key: str, entry: Entry, chunk: int) -> Iterator[bytes]:
        given = 0
        try:
            for piece in entry.pieces(chunk):
                given += len(piece)
                yield piece
            return
        except OSError:
            pass  # the disk fails in the middle: the store has the rest
        skip = given
        for piece in self.inner.stream(key, chunk=chunk):
            rest = piece[skip:]
            skip = max(0, skip - len(piece))
            if rest:
                yield rest
