"""A replica's copy of the checkpoint: what it holds, and how a version gets into it.

``DiskMirror`` is a loadable Hugging Face folder. New bits go to a fsynced journal before any byte
of the checkpoint changes, so a kill at any moment leaves either the old version or the journal to
finish the new one from. Scattered changes touch every page of the files, so those are fsynced by
journal size, not per version: files, then the state file, then the journal is emptied.

``MemoryMirror`` is the same for hosts without disk.

Nothing that serves may see the mirror's memory: patching it would change a live model in the
middle of a forward pass. Copy out under :meth:`Mirror.reading`.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np

from thinwire.checkpoint import is_weights
from thinwire.codec import wire
from thinwire.digest import TensorDigest, digest_tensors, state_digest
from thinwire.errors import DigestMismatch, Misuse
from thinwire.log.commit import AnchorFile, Commit, Tip
from thinwire.patch import Bits, Patch, apply_patch
from thinwire.schema import Schema, TensorSpec
from thinwire.workers import parallel_map

__all__ = ["Fetch", "MemoryMirror", "Mirror", "NoMirror"]

Fetch = Callable[[AnchorFile], Iterator[bytes]]
"""Yields a checkpoint file's bytes, verified."""


class Mirror(abc.ABC):
    """Common to all mirrors. One owner writes; others may read under :meth:`reading`.

    Attributes:
        held: what it holds; None before the first checkpoint is in.
        schema: its tensors; set together with ``held``.
        digests: per tensor, in schema order.
    """

    held: Tip | None = None
    schema: Schema
    digests: list[TensorDigest]

    @property
    @abc.abstractmethod
    def tensors(self) -> Sequence[Bits]:
        """Per tensor ``(numel,)`` bits, in schema order: read them, do not keep or write them."""

    @abc.abstractmethod
    def load(
        self, commit: Commit, schema: Schema, files: Sequence[AnchorFile], fetch: Fetch
    ) -> None:
        """Take in a whole checkpoint, replacing what was held once it has proved right.

        Raises:
            DigestMismatch: the files are not the state that the commit promises.
            CorruptPayload, MirrorCorrupt, and what ``fetch`` raises.
        """

    @abc.abstractmethod
    def apply(
        self, commit: Commit, patches: Sequence[Patch], digests: Sequence[TensorDigest]
    ) -> None:
        """Move to the next version.

        Args:
            patches: checked patches whose resulting digests have been verified.
            digests: per tensor, after the patches.
        """

    @abc.abstractmethod
    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Within this context nothing is patched: copy tensors out, then leave it."""

    def rescan(self) -> None:
        """Read every element and compare with the digests.

        Raises:
            DigestMismatch: naming the first tensor that is not what it should be.
        """
        with self.reading():
            if self.held is None or len(self.tensors) != len(self.schema):
                raise Misuse("the mirror holds nothing yet, or is closed")
            found = digest_tensors(self.tensors)
        for spec, want, have in zip(self.schema, self.digests, found):
            if want != have:
                raise DigestMismatch(f"{spec.name} is not what version {self.held.version} holds")

    def close(self) -> None:
        """Make everything durable and let go of files and locks."""
        return

    def __enter__(self) -> Mirror:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_state(commit: Commit, schema: Schema, tensors: Sequence[Bits]) -> list[TensorDigest]:
    """Digests of all tensors, if together they are the commit's state.

    Raises:
        DigestMismatch: they are not.
    """
    digests = digest_tensors(tensors)
    if state_digest(schema, digests) != commit.digest:
        raise DigestMismatch(
            f"the checkpoint is not version {commit.version}: its state digest differs"
        )
    return digests


def check_tensors(schema: Schema, entries: Mapping[str, wire.Entry]) -> None:
    """Check that files hold exactly the schema's tensors.

    Raises:
        SchemaMismatch: they do not.
    """
    found = tuple(TensorSpec(e.name, e.dtype, e.shape) for e in entries.values())
    schema.require_same(Schema(found, schema.aliases))


def patch_all(tensors: Sequence[Bits], patches: Sequence[Patch]) -> None:
    """Scatter patches of different tensors, on several threads."""
    parallel_map(lambda patch: apply_patch(tensors[patch.ordinal], patch), patches)


class NoMirror(Mirror):
    """In the place of a mirror where a host has no room for one: it holds a version, not its bits.

    Nothing is fetched for version 0, and updates cannot be verified here: the engine has to hold
    the weights, and verifies each update against its own bits.
    """

    @property
    def tensors(self) -> Sequence[Bits]:
        return ()

    def load(
        self, commit: Commit, schema: Schema, files: Sequence[AnchorFile], fetch: Fetch
    ) -> None:
        self.schema, self.digests, self.held = schema, [], commit.tip

    def apply(
        self, commit: Commit, patches: Sequence[Patch], digests: Sequence[TensorDigest]
    ) -> None:
        self.held = commit.tip

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def rescan(self) -> None:
        raise Misuse("there is no mirror to scan", hint="attest the engine instead")


class MemoryMirror(Mirror):
    """A mirror in this process's memory."""

    def __init__(self) -> None:
        self._tensors: list[Bits] = []
        self._lock = threading.RLock()

    @property
    def tensors(self) -> Sequence[Bits]:
        return self._tensors

    def load(
        self, commit: Commit, schema: Schema, files: Sequence[AnchorFile], fetch: Fetch
    ) -> None:
        entries: dict[str, wire.Entry] = {}
        found: dict[str, Bits] = {}
        for file in files:
            if not is_weights(file.path):
                continue
            try:
                data = np.empty(file.size, np.uint8)
            except MemoryError:
                raise Misuse(
                    f"{file.path}: {file.size} bytes do not fit in memory",
                    hint="use a mirror on disk",
                ) from None
            at = 0
            for piece in fetch(file):
                data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            header = wire.parse_header(data.data, file.size)
            entries.update(header.entries)
            for entry in header.entries.values():
                found[entry.name] = data[entry.start : entry.stop].view(entry.dtype.bits)
        check_tensors(schema, entries)
        tensors = [found[spec.name] for spec in schema]
        digests = check_state(commit, schema, tensors)
        with self._lock:
            self._tensors, self.digests, self.schema = tensors, digests, schema
            self.held = commit.tip

    def adopt(
        self, commit: Commit, schema: Schema, tensors: list[Bits], digests: list[TensorDigest]
    ) -> None:
        """Take over arrays whose digests are known to be the commit's state."""
        self._tensors, self.digests, self.schema = tensors, digests, schema
        self.held = commit.tip

    def apply(
        self, commit: Commit, patches: Sequence[Patch], digests: Sequence[TensorDigest]
    ) -> None:
        with self._lock:
            try:
                patch_all(self._tensors, patches)
            except BaseException:
                self.held, self._tensors = None, []  # half a version: start over from an anchor
                raise
            self.digests = list(digests)
            self.held = commit.tip

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._lock:
            yield
