"""The side that writes: diffs a trainer's weights against the last committed bits and ships them.

The baseline moves only when a commit is known to exist. Until then the trainer may train on, but
the next publish waits (or is skipped); a failed one is carried by the next, since its changes are
still changes against the baseline.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from thinwire import codec as codecs
from thinwire.anchor import Progress, write_anchor
from thinwire.arguments import checked_base, checked_step, one_of
from thinwire.bucket import Bucket
from thinwire.chain import Chain, Outcome, create_record, upload
from thinwire.checkpoint import MAX_SHARD
from thinwire.diff import copy_out, diff
from thinwire.digest import TensorDigest, digest_change, digest_tensors, state_digest
from thinwire.errors import (
    CommitUnresolved,
    Misuse,
    PublishFailed,
    Retryable,
    ThinwireError,
    WriterConflict,
)
from thinwire.log import keys
from thinwire.log.commit import Commit, PayloadRef, Tip, new_nonce
from thinwire.mirror import patch_all
from thinwire.patch import Bits, Patch
from thinwire.payload import encode_payloads
from thinwire.receipt import PublishStats, Receipt, Shipped
from thinwire.schema import Schema
from thinwire.start import last_committed, now_ms, open_run
from thinwire.weights import ServingDtype, Source, Weights
from thinwire.workers import parallel_map

__all__ = ["Publisher"]


@dataclass(frozen=True)
class _Pending:
    """A commit whose bytes may or may not be in the bucket, and what it would change here."""

    commit: Commit
    patches: Sequence[Patch]
    digests: list[TensorDigest]


class Publisher:
    """Writes one run.

    Args:
        bucket: where the run is or will be.
        source: the weights: a module, a state dict, or (name, tensor) pairs. A new run starts
            with them as version 0; of an existing run they must have the schema.
        assets: folder whose config and tokenizer files travel with version 0.
        dtype: serving dtype of a new run, see :meth:`thinwire.weights.Weights.of`; an existing
            run keeps its own.
        resume: ``"auto"`` continues a run or starts one, ``"require"`` and ``"new"`` insist.
        fence: on taking over a run, commit an empty version at once, so that a paused former
            writer loses from now on rather than from the first publish on.
        busy: what publish() does while one is in flight: ``"wait"`` or ``"skip"``.
        codec: how deltas are written.
        base: name of a checkpoint that replicas have already; its weights are not uploaded. To
            resume such a run, a folder that holds it.
            Where it is a folder on this machine, a resumed run starts from there.
        cache: a mirror folder kept for faster resuming.
        step: the trainer's optimizer step at a new run's version 0.
        threads: for diff and digests; default one per core.
        max_shard: bytes of tensors per file of version 0.
        progress: told about long transfers.

    Raises:
        RunExists, RunNotFound: ``resume`` insists on the other.
        SchemaMismatch, UnsupportedDtype, Misuse: the source does not fit.
        WriterConflict: another writer starts or takes over the run at this moment.
        CommitUnresolved: it cannot be learned whether the run was created; try again.
        Bucket errors.
    """

    def __init__(
        self,
        bucket: Bucket,
        source: Source,
        *,
        assets: str | Path | None = None,
        dtype: ServingDtype = None,
        resume: Literal["auto", "require", "new"] = "auto",
        fence: bool = True,
        busy: Literal["wait", "skip"] = "wait",
        codec: str = "auto",
        base: str = "",
        cache: str | Path | None = None,
        step: int | None = None,
        threads: int | None = None,
        max_shard: int = MAX_SHARD,
        progress: Progress | None = None,
    ) -> None:
        one_of("resume", resume, ("auto", "require", "new"))
        one_of("busy", busy, ("wait", "skip"))
        step = checked_step(step)
        self._chain = Chain(bucket)
        self._bucket = bucket
        self._busy, self._codec, self._threads = busy, codecs.resolve(codec), threads
        self._progress = progress
        self._writer = new_nonce()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._flying: Future[Shipped] | None = None
        self._pending: _Pending | None = None
        self._failure: BaseException | None = None
        self._conflict: WriterConflict | None = None
        self._closed = False
        self._baseline: list[Bits] = []
        self._digests: list[TensorDigest] = []
        self._run, weights, created = open_run(
            self._chain,
            source,
            writer=self._writer,
            dtype=dtype,
            resume=resume,
            base=checked_base(base),
            assets=assets,
        )
        self._tip: Tip = self._run.tip
        self._full_bytes, self._elements = self.schema.nbytes, self.schema.numel
        head = None if created else self._chain.sure_head()
        self.started_run = head is None
        if head is None:
            self._publish_first(weights, assets, max_shard, step)
        else:
            self._baseline, self._digests, self._tip = last_committed(
                bucket, self.run, cache=cache, bases=[base, self._run.base], progress=progress
            )
            if fence:
                self._commit_now(_Pending(self._next_commit([], [], None), [], self._digests))

    @property
    def schema(self) -> Schema:
        """The run's tensors and ties."""
        return self._run.schema

    @property
    def run(self) -> str:
        """The run's id."""
        return self._run.run

    @property
    def version(self) -> int:
        """The last version known to be committed."""
        return self._tip.version

    # --- starting -----------------------------------------------------------------------

    def _publish_first(
        self, weights: Weights, assets: str | Path | None, max_shard: int, step: int | None
    ) -> None:
        self._baseline = copy_out(weights, threads=self._threads)
        self._digests = digest_tensors(self._baseline, threads=self._threads)
        payloads = []
        if not self._run.base:
            payloads.append(
                write_anchor(
                    self._bucket,
                    self._run.run,
                    0,
                    self.schema,
                    self._baseline,
                    state_digest(self.schema, self._digests),
                    assets=None if assets is None else Path(assets),
                    max_shard=max_shard,
                    progress=self._progress,
                )
            )
        self._commit_now(_Pending(self._next_commit(payloads, [], step), [], self._digests))

    # --- publishing ---------------------------------------------------------------------

    def publish(self, source: Source, *, step: int | None = None) -> Receipt:
        """Ship what changed since the last committed version.

        Blocks for diff and copy-out only; the trainer may change its weights as soon as this
        returns. At most one publish is in flight.

        Args:
            source: the same weights as at the start, in whatever form.
            step: the trainer's optimizer step, kept in the commit.

        Raises:
            SchemaMismatch: a name, shape, dtype or tie changed; nothing was uploaded.
            Misuse: the step is no 64-bit integer, or this process is a fork of the publisher's.
            WriterConflict: another writer has taken the run over; this one is finished.
            HistoryRewritten: the last version is not in the bucket any more, or is another.
            PublishFailed: the publisher is closed.
            CommitUnresolved: an earlier commit's outcome still cannot be learned.
            An earlier publish's error that nobody has asked its receipt for.
        """
        step = checked_step(step)
        self._require_own_process()
        with self._lock:
            self._require_usable()
            flying = self._flying
            if flying is not None and not flying.done():
                if self._busy == "skip":
                    return Receipt(None, None)
                flying.exception()  # wait; what it failed with is raised below
            self._raise_failure()
            self._settle()
            started = time.perf_counter()
            weights = Weights.matching(source, self.schema)
            patches = diff(self._baseline, weights, threads=self._threads)
            seconds = time.perf_counter() - started
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="thinwire-publish")
            version = self.version + 1
            future = self._worker.submit(self._ship, patches, step, seconds)
            self._flying = future
            return Receipt(version, future, self._seen)

    def _ship(self, patches: list[Patch], step: int | None, diff_s: float) -> Shipped:
        try:
            return self._shipped(patches, step, diff_s)
        except BaseException as error:
            self._failure = error
            raise

    def _shipped(self, patches: list[Patch], step: int | None, diff_s: float) -> Shipped:
        started = time.perf_counter()
        digests = list(self._digests)
        changes = parallel_map(
            lambda p: digest_change(self._baseline[p.ordinal], p), patches, threads=self._threads
        )
        for patch, change in zip(patches, changes):
            digests[patch.ordinal] += change
        refs, buffers = encode_payloads(
            patches,
            codec=self._codec,
            run=self.run,
            version=self.version + 1,
            base=self._baseline,
            threads=self._threads,
        )
        encoded = time.perf_counter()
        for ref in refs:
            upload(self._bucket, ref.key, buffers, ref.size)
        del buffers
        uploaded = time.perf_counter()
        # into a bucket that was emptied or refilled meanwhile, a commit would go as into any other
        self._confirm()
        commit = self._next_commit(refs, patches, step, digests)
        self._commit_now(_Pending(commit, patches, digests))
        stats = PublishStats(
            changed=commit.changed,
            elements=self._elements,
            tensors=commit.tensors,
            payload_bytes=commit.payload_bytes,
            full_bytes=self._full_bytes,
            diff_s=diff_s,
            encode_s=encoded - started,
            upload_s=uploaded - encoded,
            commit_s=time.perf_counter() - uploaded,
        )
        return Shipped(commit, stats)

    def _next_commit(
        self,
        payloads: Sequence[PayloadRef],
        patches: Sequence[Patch],
        step: int | None,
        digests: Sequence[TensorDigest] | None = None,
    ) -> Commit:
        first = self._tip.version < 0
        return Commit(
            run=self.run,
            version=self._tip.version + 1,
            parent=self._tip.hash,
            writer=self._writer,
            payloads=tuple(payloads),
            digest=state_digest(self.schema, self._digests if digests is None else digests),
            changed=self._elements if first else sum(map(len, patches)),
            tensors=len(self.schema) if first else len(patches),
            step=step,
            time_ms=now_ms(),
            codec=self._codec if patches else "",
        )

    # --- committing ---------------------------------------------------------------------

    def _commit_now(self, pending: _Pending) -> None:
        """Create the commit; move the baseline if, and only if, it exists."""
        self._pending = pending  # from here on the outcome is open until it is known
        commit = pending.commit
        outcome = create_record(self._bucket, keys.commit_key(commit.version), commit.encode())
        if outcome is Outcome.UNRESOLVED:
            raise CommitUnresolved(f"it is not known whether version {commit.version} exists")
        if outcome is Outcome.LOST:
            self._conflict = WriterConflict(
                f"another writer committed version {commit.version} of run {self.run}"
            )
            self._pending = None
            raise self._conflict
        patch_all(self._baseline, pending.patches)
        self._digests = pending.digests
        self._tip = commit.tip
        self._pending = None  # last: whatever interrupts this, settling does it all again
        if not self._bucket.capabilities.create_only:
            with contextlib.suppress(Retryable):  # the next publish looks again
                self._confirm()

    def _confirm(self) -> None:
        """See that the bucket still ends where this publisher left it.

        Raises:
            HistoryRewritten: it does not, or another writer has been at work in a store that
                cannot keep two apart.
        """
        if self._bucket.capabilities.create_only:
            self._chain.confirm(self._tip)
        else:
            self._chain.confirm_alone(self._run.tip, self._tip)

    def _settle(self) -> None:
        """Find out what became of a commit whose outcome was left open."""
        if self._pending is not None:
            self._commit_now(self._pending)

    def _seen(self, error: BaseException) -> None:
        """The receipt has raised this error: publish() need not raise it again."""
        if self._failure is error:
            self._failure = None

    def _raise_failure(self) -> None:
        """Raise what a background publish failed with, once; an open commit is settled instead."""
        failure, self._failure, self._flying = self._failure, None, None
        if failure is not None and not isinstance(failure, CommitUnresolved):
            raise failure

    def _require_own_process(self) -> None:
        # a fork has neither the thread that ships nor the right to commit as the same writer
        if os.getpid() != self._process:
            raise Misuse(
                "this process is a fork of the one that made the publisher",
                hint="publish there, or make a publisher here: it takes the run over",
            )

    def _require_usable(self) -> None:
        if self._closed:
            raise PublishFailed("the publisher is closed")
        if self._conflict is not None:
            self._seen(self._conflict)
            raise self._conflict

    # --- ending -------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the publish in flight and settle an open commit.

        Raises:
            The error of a publish that failed and was not looked at.
        """
        if os.getpid() != self._process:
            return  # what is in flight is the other process's to finish
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._worker is not None:
                self._worker.shutdown(wait=True)
            self._raise_failure()
            if self._conflict is None:
                self._settle()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # the body's own error is what the caller must see
        try:
            self.close()
        except ThinwireError as closing:
            if hasattr(error, "add_note"):
                error.add_note(f"closing the publisher failed as well: {closing}")
