"""Full checks of what is stored: everything in a run's bucket, every byte of a mirror's folder.

Damage is collected in the report, not raised; what keeps the check from being made is raised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from thinwire.anchor import Progress
from thinwire.audit import BucketAudit, BucketReport, Problem
from thinwire.bucket import Bucket
from thinwire.checkpoint import Checkpoint
from thinwire.codec.wire import Entry
from thinwire.digest import ZERO, TensorDigest, digest_tensor
from thinwire.disk import DiskMirror
from thinwire.errors import InvalidCheckpoint, MirrorBusy, MirrorCorrupt, Misuse, SchemaMismatch
from thinwire.mirror import check_tensors
from thinwire.mirror_folder import (
    MirrorState,
    damaged_files,
    is_mirror,
    locked,
    read_held,
    read_state,
    unlock,
    writer_lock,
)
from thinwire.workers import parallel_map

__all__ = ["BucketReport", "MirrorReport", "Problem", "verify_bucket", "verify_mirror"]

_PIECE, _STRIDE = 32 << 20, 2 << 20


def verify_bucket(
    bucket: Bucket, *, base: str | Path | None = None, progress: Progress | None = None
) -> BucketReport:
    """Check every object of a run, and replay all versions in memory.

    Holds one checkpoint and one version's payloads in memory.

    Args:
        base: a folder with version 0's weights, for runs whose bucket does not hold them.
        progress: told about records and bytes.

    Raises:
        RunNotFound: there is no run in the bucket.
        UnsupportedFormat: a newer major version wrote it.
        InvalidCheckpoint: ``base`` is no checkpoint.
        Bucket errors: it cannot be read; that says nothing about what it holds.
    """
    return BucketAudit(bucket, None if base is None else Path(base), progress).run_all()


@dataclass
class MirrorReport:
    """What a mirror's folder holds, and what is wrong with it.

    Attributes:
        folder: where it is.
        run, version: what it holds; None when its state file cannot be read.
        files, bytes: files checked, and their bytes.
        problems: files and tensors that are not what they should be.
        live: another process is its writer; it was kept from patching meanwhile.
    """

    folder: Path
    run: str = ""
    version: int | None = None
    files: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    live: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_mirror(folder: str | Path, *, progress: Progress | None = None) -> MirrorReport:
    """Check every byte of a mirror's folder: weights, headers, the files beside them, its records.

    What a crash left unfinished is finished first, as the mirror's next writer would. While
    another process writes the mirror, it is kept from patching and nothing is changed.

    Raises:
        Misuse: it is not a mirror, or holds no version yet.
        MirrorInUse: the journal has to be replayed, and a process has the files mapped.
    """
    folder = Path(folder)
    if not is_mirror(folder):
        raise Misuse(f"{folder} is not a mirror", hint="pull a run into it first")
    report = MirrorReport(folder)
    try:
        report.version = read_state(folder).held.version
        while not (_check_own(report, progress) or _check_live(report, progress)):
            pass  # its writer ended between the two: it is ours now, or somebody else's
    except MirrorCorrupt as error:
        report.problems.append(Problem(str(folder), str(error)))
    return report


def _check_own(report: MirrorReport, progress: Progress | None) -> bool:
    """Check as the mirror's writer; False if another process is that."""
    try:
        mirror = DiskMirror(report.folder)
    except MirrorBusy:
        return False
    with mirror, mirror.reading():
        _check(report, read_state(report.folder), progress)
    return True


def _check_live(report: MirrorReport, progress: Progress | None) -> bool:
    """Check with the writer kept from patching; False if there is none."""
    with locked(report.folder, exclusive=False):
        # a writer that is alive is not in the middle of a patch now, and cannot begin one
        try:
            unlock(writer_lock(report.folder))
        except MirrorBusy:
            report.live = True
            _check(report, read_held(report.folder), progress)
            return True
    return False


def _check(report: MirrorReport, state: MirrorState, progress: Progress | None) -> None:
    """Check the files against a state; they must not change meanwhile.

    Raises:
        MirrorCorrupt: the tensors cannot be told from each other.
    """
    report.run, report.version = state.held.run, state.held.version
    report.files = len(state.files)
    report.bytes = sum(file["size"] for file in state.files)
    for path, what in damaged_files(report.folder, state.files):
        report.problems.append(Problem(str(path), what))
    try:
        checkpoint = Checkpoint.open(report.folder)
        entries = {e.name: e for h in checkpoint.headers.values() for e in h.entries.values()}
        check_tensors(state.schema, entries)
    except (InvalidCheckpoint, SchemaMismatch) as error:
        raise MirrorCorrupt(str(error)) from None
    done, total = 0, state.schema.nbytes
    for shard, header in checkpoint.headers.items():
        path = report.folder / shard
        for entry in header.entries.values():
            if _digest(path, entry) != state.digests[state.schema.ordinal(entry.name)]:
                what = f"{entry.name} is not what version {state.held.version} holds"
                report.problems.append(Problem(str(path), what))
            done += entry.stop - entry.start
            if progress is not None:
                progress("check tensors", done, total)


def _digest(path: Path, entry: Entry) -> TensorDigest:
    """A tensor's digest, read without mapping the file: its writer refuses to patch mapped ones."""
    digest, numel = ZERO, (entry.stop - entry.start) // entry.dtype.itemsize
    with path.open("rb") as file:
        file.seek(entry.start)
        for start in range(0, numel, _PIECE):
            bits = np.fromfile(file, entry.dtype.bits, min(_PIECE, numel - start))
            runs = [(start + at, bits[at : at + _STRIDE]) for at in range(0, bits.size, _STRIDE)]
            for part in parallel_map(lambda run: digest_tensor(run[1], start=run[0]), runs):
                digest += part
    return digest
