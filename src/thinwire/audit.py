"""A full check of a run's bucket: every record, every payload, every file, every state.

One pass, as a replica that trusts nothing would make it from version 0 on. Damage is collected,
not raised, so that one look shows all of it; what cannot be checked because of earlier damage is
listed as skipped. A store that cannot be read is an error as anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.anchor import Progress, fetch_file, fetch_manifest, folder_files
from thinwire.bucket import Bucket
from thinwire.chain import MAX_COMMIT, Chain, read_bounded
from thinwire.checkpoint import is_weights
from thinwire.digest import digest_change, state_digest
from thinwire.errors import (
    AccessDenied,
    CorruptPayload,
    HistoryRewritten,
    KeyNotFound,
    Misuse,
    Resync,
    RunNotFound,
    SchemaMismatch,
)
from thinwire.log import keys
from thinwire.log.commit import AnchorFile, Commit, PayloadRef, RunInfo, Tip
from thinwire.log.plan import check_child
from thinwire.log.records import MAX_RECORD
from thinwire.mirror import MemoryMirror
from thinwire.patch import Patch
from thinwire.payload import decode_payloads, fetch_payloads, payload_limit

__all__ = ["BucketAudit", "BucketReport", "Problem"]

_VERSIONED = re.compile(r"(?:deltas|anchors)/([0-9]{10})-")


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        subject: the object's key, or the file's path.
        message: what is wrong with it.
    """

    subject: str
    message: str


@dataclass
class BucketReport:
    """What a bucket holds, and what is wrong with it.

    Attributes:
        url: the bucket.
        run: the run's id; "" when ``run.json`` cannot be read.
        head: newest version; None for a run without one.
        replayed: newest version whose state was computed and has the digest its commit promises.
        objects, bytes: objects read, and their bytes.
        problems: damaged or missing objects.
        orphans: payloads and anchor files up to the head that no commit names: harmless.
        skipped: what could not be checked, and why.
    """

    url: str
    run: str = ""
    head: int | None = None
    replayed: int | None = None
    objects: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


class BucketAudit:
    """One pass over a bucket; each step leaves what it learned for the next."""

    def __init__(self, bucket: Bucket, base: Path | None, progress: Progress | None) -> None:
        self.bucket = bucket
        self.base = base
        self.progress = progress or (lambda what, done, total: None)
        self.report = BucketReport(bucket.url)
        self.run: RunInfo | None = None
        self.commits: dict[int, Commit] = {}
        self.mirror = MemoryMirror()
        self.referenced: set[str] = set()
        self.unreadable: set[str] = set()
        self.listed: list[str] | None = None

    def run_all(self) -> BucketReport:
        """Do every step. Raises as :func:`thinwire.verify.verify_bucket`."""
        self._records()
        self._versions()
        self._find_orphans()
        return self.report

    def _problem(self, subject: str, error: Exception | str) -> None:
        self.report.problems.append(Problem(subject, str(error)))

    def _read(self, key: str, limit: int) -> bytes:
        data = read_bounded(self.bucket, key, limit)
        self._count(len(data))
        return data

    def _count(self, size: int, objects: int = 1) -> None:
        self.report.objects += objects
        self.report.bytes += size

    # --- records ------------------------------------------------------------------------

    def _records(self) -> None:
        try:
            self.listed = [info.key for info in self.bucket.list()]
        except AccessDenied:
            self.report.skipped.append("orphans: this store does not let its objects be listed")
            newest = Chain(self.bucket).head()
            found = [] if newest is None else list(range(newest + 1))
        else:
            named = map(keys.commit_version, self.listed)
            found = sorted(version for version in named if version is not None)
        self.report.head = found[-1] if found else None
        tip = self._run_record()
        expected = 0
        for done, version in enumerate(found, 1):
            if version != expected:
                tip = None
                last = f", and so is every version up to {version - 1}"
                missing = "it is missing" + last * (version > expected + 1)
                self._problem(keys.commit_key(expected), missing)
            tip = self._commit(version, tip)
            expected = version + 1
            self.progress("check commits", done, len(found))

    def _run_record(self) -> Tip | None:
        try:
            self.run = RunInfo.decode(self._read(keys.RUN, MAX_RECORD))
        except KeyNotFound:
            if self.report.head is None:
                raise RunNotFound(f"{self.bucket.url} holds no run") from None
            self._problem(keys.RUN, "it is missing")
        except CorruptPayload as error:
            self._problem(keys.RUN, error)
        else:
            self.report.run = self.run.run
            return self.run.tip
        return None

    def _commit(self, version: int, parent: Tip | None) -> Tip | None:
        """Check one commit; its tip, unless it is not to be trusted."""
        key = keys.commit_key(version)
        try:
            commit = Commit.decode(self._read(key, MAX_COMMIT))
            if commit.version != version:
                raise CorruptPayload(f"it says that it is version {commit.version}")
            if parent is not None:
                check_child(commit, parent)
        except KeyNotFound:
            self._problem(key, "it is missing")
            return None
        except (CorruptPayload, HistoryRewritten) as error:
            self._problem(key, error)
            return None
        self.commits[version] = commit
        return commit.tip

    # --- versions -----------------------------------------------------------------------

    def _versions(self) -> None:
        """Check what the commits name, in order, and replay as far as that leads."""
        total = sum(commit.payload_bytes for v, commit in self.commits.items() if v > 0)
        done = 0
        for version, commit in sorted(self.commits.items()):
            if version == 0:
                self._first(commit)
            else:
                patches = self._payloads(commit)
                if patches is not None:
                    self._replay(commit, patches)
                done += commit.payload_bytes
                self.progress("check payloads", done, total)
        head = -1 if self.report.head is None else self.report.head
        reached = -1 if self.report.replayed is None else self.report.replayed
        if reached < head:
            self.report.skipped.append(
                f"states of versions {reached + 1} to {head}: not to be reached by replaying"
            )

    def _first(self, commit: Commit) -> None:
        key = keys.commit_key(0)
        if self.run is None:
            self.report.skipped.append(f"version 0: {keys.RUN} is not readable")
            self.unreadable.update(ref.key for ref in commit.payloads)
        elif commit.payloads:
            ref = commit.payloads[0]
            if len(commit.payloads) != 1 or keys.anchor_version(ref.key) != 0:
                self._problem(key, f"it names {ref.key!r} where its anchor should be")
                return
            self.referenced.add(ref.key)
            self._anchor(commit, ref, self.run)
        elif not self.run.base:
            self._problem(key, "it names no anchor, and the run has no base")
        elif self.base is None:
            self.report.skipped.append(
                f"version 0: its weights are those of {self.run.base!r}, which was not given"
            )
        else:
            files, fetch = folder_files(self.base)
            failure = self._load(commit, self.run, files, fetch)
            if failure is not None:
                self._problem(str(self.base), failure)

    def _anchor(self, commit: Commit, ref: PayloadRef, run: RunInfo) -> None:
        try:
            manifest = fetch_manifest(self.bucket, ref, run.schema)
        except Resync as error:
            self._problem(ref.key, error)
            self.unreadable.add(ref.key)
            return
        self._count(ref.size)
        if (manifest.run, manifest.version, manifest.digest) != (run.run, 0, commit.digest):
            self._problem(ref.key, "it is the manifest of something else")
        folder = ref.key.removesuffix(keys.MANIFEST)
        self.referenced.update(folder + file.path for file in manifest.files)
        done, total = 0, sum(file.size for file in manifest.files)

        def fetch(file: AnchorFile) -> Iterator[bytes]:
            nonlocal done
            for piece in fetch_file(self.bucket, ref, file):
                done += len(piece)
                self.progress("check anchor", min(done, total), total)
                yield piece

        failure = self._load(commit, run, manifest.files, fetch)
        # loading has read the weights; when it failed, every file is looked at for itself
        rest = [f for f in manifest.files if failure is not None or not is_weights(f.path)]
        bad = [file for file in rest if not self._whole(folder + file.path, fetch(file))]
        self._count(total, len(manifest.files))
        if failure is not None and not bad:
            self._problem(ref.key, failure)

    def _whole(self, key: str, pieces: Iterator[bytes]) -> bool:
        try:
            for _ in pieces:
                pass
        except Resync as error:
            self._problem(key, error)
            return False
        return True

    def _load(
        self,
        commit: Commit,
        run: RunInfo,
        files: Sequence[AnchorFile],
        fetch: Callable[[AnchorFile], Iterator[bytes]],
    ) -> Exception | None:
        """Take in version 0, or say why that is impossible."""
        try:
            self.mirror.load(commit, run.schema, files, fetch)
        except (Resync, SchemaMismatch) as error:
            return error
        self.report.replayed = 0
        return None

    def _payloads(self, commit: Commit) -> list[Patch] | None:
        """A version's patches, if all its payloads are what they should be."""
        self.referenced.update(ref.key for ref in commit.payloads)
        limit = commit.payload_bytes if self.run is None else payload_limit(self.run.schema)
        try:
            payloads = fetch_payloads(self.bucket, commit, limit)
            self._count(commit.payload_bytes, len(payloads))
            if self.run is None:
                return None
            replayed = self.report.replayed == commit.version - 1
            base = self.mirror.tensors if replayed else None
            return decode_payloads(payloads, self.run.schema, base)
        except Misuse:
            return None  # what it applies to could not be rebuilt, and is reported as such
        except Resync as error:
            self._problem(", ".join(ref.key for ref in commit.payloads), error)
            return None

    def _replay(self, commit: Commit, patches: list[Patch]) -> None:
        if self.report.replayed != commit.version - 1:
            return
        digests = list(self.mirror.digests)
        for patch in patches:
            digests[patch.ordinal] += digest_change(self.mirror.tensors[patch.ordinal], patch)
        if state_digest(self.mirror.schema, digests) != commit.digest:
            self._problem(
                keys.commit_key(commit.version),
                "applying its payloads does not give the state digest it promises",
            )
            return
        self.mirror.apply(commit, patches, digests)
        self.report.replayed = commit.version

    # --- what is left over --------------------------------------------------------------

    def _find_orphans(self) -> None:
        for key in self.listed or []:
            named = _VERSIONED.match(key)
            if named is None or key in self.referenced:
                continue
            version = int(named[1])
            readable = version in self.commits and not any(
                key.startswith(ref.removesuffix(keys.MANIFEST)) for ref in self.unreadable
            )
            # what lies above the head may be on its way to becoming a version
            if readable:
                self.report.orphans.append(key)
