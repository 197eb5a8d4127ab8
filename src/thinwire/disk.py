"""The mirror on disk: a loadable checkpoint folder, its journal, its locks and its state file.

::

    mirror/
      config.json tokenizer.json …           as the anchor had them
      model.safetensors | model-0000i-of-…   the checkpoint, patched in place
      .thinwire/
        state.json     run, version, commit hash, digests, SHA-256s: as of the last checkpointing
        journal        versions since then
        writer         locked by the one process that writes
        patching       locked exclusively while bits change, shared while they are copied out
        incoming/      a checkpoint on its way in
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from thinwire.checkpoint import INDEX, Checkpoint, is_weights
from thinwire.digest import TensorDigest, digest_tensors
from thinwire.errors import (
    CorruptPayload,
    InvalidCheckpoint,
    MirrorCorrupt,
    MirrorInUse,
    Misuse,
    ThinwireError,
)
from thinwire.journal import Entry, Journal, read_entries
from thinwire.log.commit import AnchorFile, Commit
from thinwire.mappings import mapped_elsewhere
from thinwire.mirror import Fetch, Mirror, check_state, check_tensors, patch_all
from thinwire.mirror_folder import (
    CONTROL,
    INCOMING,
    JOURNAL,
    STATE,
    WRITER,
    MirrorState,
    claim,
    damaged_files,
    fsync_file,
    fsync_folder,
    header_hash,
    locked,
    read_state,
    unlock,
    writer_lock,
)
from thinwire.patch import Bits, Patch
from thinwire.schema import Schema
from thinwire.swap import swap_in

__all__ = ["CONTROL", "DiskMirror"]

JOURNAL_LIMIT = 256 << 20
"""Bytes of journal after which the checkpoint files are fsynced and it is emptied."""


class DiskMirror(Mirror):
    """A mirror in a folder; this process is its writer until :meth:`close`.

    Args:
        folder: new or empty, or a mirror from before.
        swap: write changed shards to new files and rename them into place, for folders that
            other processes have mapped; slower, and twice the disk.
        journal_limit: bytes of journal after which the files are fsynced.

    Raises:
        MirrorBusy: another process writes this mirror.
        MirrorInUse: a process has its files mapped, and ``swap`` is off.
        MirrorCorrupt: its files are not those of the version it claims to hold.
        Misuse: the folder holds something else.
    """

    def __init__(
        self, folder: str | Path, *, swap: bool = False, journal_limit: int = JOURNAL_LIMIT
    ) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._control = self.folder / CONTROL
        self._swap = swap
        self._journal_limit = journal_limit
        self._tensors: list[Bits] = []
        self._files: list[dict[str, Any]] = []
        self._journal: Journal | None = None
        self._failed = False
        claim(self.folder)
        self._writer = writer_lock(self.folder)
        self._process = os.getpid()
        self._unlock = weakref.finalize(self, _let_go, self._writer, self._process)
        try:
            if (self._control / STATE).exists():
                self._recover()
        except BaseException:
            self._release()
            raise

    @property
    def tensors(self) -> Sequence[Bits]:
        return self._tensors

    # --- taking in a checkpoint ---------------------------------------------------------

    def load(
        self, commit: Commit, schema: Schema, files: Sequence[AnchorFile], fetch: Fetch
    ) -> None:
        self._require_whole()
        incoming = self._control / INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        try:
            self._take_in(incoming, commit, schema, files, fetch)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def _take_in(
        self,
        incoming: Path,
        commit: Commit,
        schema: Schema,
        files: Sequence[AnchorFile],
        fetch: Fetch,
    ) -> None:
        for file in files:
            with (incoming / file.path).open("wb") as target:
                for piece in fetch(file):
                    target.write(piece)
                target.flush()
                os.fsync(target.fileno())
        try:
            checkpoint = Checkpoint.open(incoming)
            found = {
                e.name: e for header in checkpoint.headers.values() for e in header.entries.values()
            }
        except InvalidCheckpoint as error:
            raise CorruptPayload(f"the anchor is not a checkpoint: {error}") from None
        check_tensors(schema, found)
        surplus = {f.path for f in files if is_weights(f.path)} - set(checkpoint.headers)
        if surplus:  # a loader might prefer it to the shards that are checked
            raise CorruptPayload(f"the anchor's {min(surplus)} is none of the checkpoint's shards")
        mapped = checkpoint.map()
        digests = check_state(commit, schema, [mapped[spec.name] for spec in schema])
        del mapped
        with self._patching():
            self._forget()
            for file in files:
                os.replace(incoming / file.path, self.folder / file.path)
            fsync_folder(self.folder)
            self.held = commit.tip
            self.schema, self.digests = schema, digests
            self._files = [self._describe(file) for file in files]
            self._open_files()
            self._journal = Journal(self._control / JOURNAL)
            self._save_state()

    def _forget(self) -> None:
        """Remove the state, so that a crash from here on leaves an empty mirror, not a mixture."""
        self.held = None
        self._tensors = []
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        for name in (STATE, JOURNAL):
            (self._control / name).unlink(missing_ok=True)
            fsync_folder(self._control)
        for entry in self._files:
            (self.folder / entry["path"]).unlink(missing_ok=True)
        # what a crash in here left behind has no entry
        for path in [self.folder / INDEX, *self.folder.glob("*.safetensors")]:
            path.unlink(missing_ok=True)
        self._files = []

    def _describe(self, file: AnchorFile) -> dict[str, Any]:
        """What lets a file be checked later: a shard by its header, any other as a whole."""
        if not is_weights(file.path):
            return {"path": file.path, "size": file.size, "sha256": file.sha256}
        return {
            "path": file.path,
            "size": file.size,
            "header_sha256": header_hash(self.folder / file.path),
        }

    # --- moving on ----------------------------------------------------------------------

    def apply(
        self, commit: Commit, patches: Sequence[Patch], digests: Sequence[TensorDigest]
    ) -> None:
        self._require_whole()
        if self.held is None or self._journal is None:
            raise Misuse("the mirror holds nothing to patch, or is closed")
        changed = {patch.ordinal: digests[patch.ordinal] for patch in patches}
        entry = Entry(commit.version, commit.hash, self.held.hash, changed, patches)
        with self._patching():
            self._refuse_mapped()
            self._journal.append(entry)
            try:
                self._write(patches)
                self.digests = list(digests)
                self.held = commit.tip
                if self._journal.size > self._journal_limit:
                    self._checkpoint()
            except BaseException:
                self._give_up()
                raise

    def _give_up(self) -> None:
        """Stop writing: only the journal, read when the mirror is opened again, can finish this.

        Half a version may be in the files, or an fsync failed, after which a second one may
        succeed without having written anything.
        """
        self._failed = True
        self.held = None
        self._tensors = []
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _is_ours(self) -> bool:
        """Whether this process is the writer of the folder that is there now."""
        try:
            there = os.stat(self._control / WRITER)
        except OSError:
            return False
        return os.getpid() == self._process and os.path.samestat(there, os.fstat(self._writer))

    def _require_whole(self) -> None:
        if os.getpid() != self._process:
            raise Misuse(
                f"this process is a fork of the one that writes {self.folder}",
                hint="use the mirror in the process that opened it",
            )
        if self._writer >= 0 and not self._is_ours():
            raise MirrorCorrupt(
                f"{self.folder} was moved, replaced or deleted while it was in use",
                hint="open the mirror where it is now, or pull into a fresh folder",
            )
        if self._failed:
            raise MirrorCorrupt(
                f"writing {self.folder} failed half-way",
                hint="open the mirror again: its journal completes what was begun",
            )

    def _write(self, patches: Sequence[Patch]) -> None:
        if self._swap:
            swap_in(self._checkpointed(), patches)
            self._open_files()
        else:
            patch_all(self._tensors, patches)

    def _checkpointed(self) -> Checkpoint:
        try:
            return Checkpoint.open(self.folder)
        except InvalidCheckpoint as error:
            raise MirrorCorrupt(f"{self.folder}: {error}") from None

    def _checkpoint(self) -> None:
        """Files, then the state, then the journal: each durable before the next."""
        for entry in self._files:
            if "header_sha256" in entry:
                fsync_file(self.folder / entry["path"])
        self._save_state()
        if self._journal is not None:
            self._journal.clear()

    def _save_state(self) -> None:
        if self.held is None:
            raise Misuse("the mirror holds nothing to record")
        state = MirrorState(self.held, self.schema, self.digests, self._files)
        temporary = self._control / f"{STATE}.new"
        with temporary.open("wb") as file:
            file.write(state.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._control / STATE)
        fsync_folder(self._control)

    # --- coming back --------------------------------------------------------------------

    def _recover(self) -> None:
        """Open what a former process left: finish what its journal says, drop a torn tail."""
        state = read_state(self.folder)
        self._restore(state)
        with self._patching():
            self._open_files()
            data = (self._control / JOURNAL).read_bytes() if self._has_journal() else b""
            if data:
                self._refuse_mapped()
            sealed = list(read_entries(data, self.schema))
            for entry, _ in sealed:
                after = state.after(entry)
                if after is not None:
                    self._write(entry.patches)
                    state = after
            self._restore(state)
            self._journal = Journal(self._control / JOURNAL)
            if data:
                # whatever is missing or damaged shows here, before anything is built on it
                self._prove()
                self._journal.clear(sealed[-1][1] if sealed else 0)
                self._checkpoint()

    def _has_journal(self) -> bool:
        return (self._control / JOURNAL).exists()

    def _restore(self, state: MirrorState) -> None:
        self.held, self.schema = state.held, state.schema
        self.digests, self._files = list(state.digests), list(state.files)

    def _prove(self) -> None:
        found = digest_tensors(self._tensors)
        for spec, want, have in zip(self.schema, self.digests, found):
            if want != have:
                raise MirrorCorrupt(
                    f"{self.folder}: {spec.name} is not what the mirror should hold"
                )

    def verify(self) -> None:
        """Check every byte of the folder: weights, headers, and the files beside them.

        Raises:
            DigestMismatch, MirrorCorrupt: naming what is not as it should be.
        """
        for path, what in damaged_files(self.folder, self._files):
            raise MirrorCorrupt(f"{path}: {what}")
        self.rescan()

    # --- files and locks ----------------------------------------------------------------

    def _open_files(self) -> None:
        checkpoint = self._checkpointed()
        names = {entry["path"] for entry in self._files}
        if not set(checkpoint.headers) <= names:
            raise MirrorCorrupt(f"{self.folder}: its shards are not those that were pulled")
        try:
            check_tensors(
                self.schema,
                {e.name: e for h in checkpoint.headers.values() for e in h.entries.values()},
            )
            mapped = checkpoint.map(write=not self._swap)
        except (InvalidCheckpoint, ThinwireError) as error:
            raise MirrorCorrupt(f"{self.folder}: {error}") from None
        self._tensors = [mapped[spec.name] for spec in self.schema]

    def _refuse_mapped(self) -> None:
        if self._swap:
            return
        shards = [self.folder / e["path"] for e in self._files if "header_sha256" in e]
        pids = mapped_elsewhere(shards)
        if pids:
            gc.collect()  # tensors that nobody holds any more keep their mapping until then
            pids = mapped_elsewhere(shards)
        if pids:
            raise MirrorInUse(f"{self.folder} is mapped by process {', '.join(map(str, pids))}")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with locked(self.folder, exclusive=False):
            yield

    @contextlib.contextmanager
    def _patching(self) -> Iterator[None]:
        with locked(self.folder, exclusive=True):
            yield

    def close(self) -> None:
        if self._writer < 0:
            return
        try:
            if self._journal is not None and self._journal.size and self._is_ours():
                with self._patching():
                    self._checkpoint()
        finally:
            self._release()

    def _release(self) -> None:
        self._tensors = []
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._unlock()
        self._writer = -1


def _let_go(writer: int, process: int) -> None:
    """Unlock; in a fork of the writer only close, since the lock is the other's as well."""
    if os.getpid() == process:
        unlock(writer)
    else:
        os.close(writer)
