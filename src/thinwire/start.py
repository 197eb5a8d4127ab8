"""Where a publisher starts: the run that is there or a new one, and its last committed bits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from thinwire.anchor import Progress
from thinwire.bucket import Bucket
from thinwire.chain import Chain, Outcome, create_record
from thinwire.digest import TensorDigest
from thinwire.dtypes import dtype as as_dtype
from thinwire.errors import (
    BucketNotFound,
    CommitUnresolved,
    Misuse,
    Resync,
    RunExists,
    RunNotFound,
    SchemaMismatch,
    WriterConflict,
)
from thinwire.log import keys
from thinwire.log.commit import RunInfo, Tip, new_nonce
from thinwire.mirror import MemoryMirror
from thinwire.patch import Bits
from thinwire.replica import Replica
from thinwire.schema import Schema
from thinwire.weights import ServingDtype, Source, Weights, names_one

__all__ = ["last_committed", "now_ms", "open_run"]

State = tuple[list[Bits], list[TensorDigest], Tip]


def open_run(
    chain: Chain,
    source: Source,
    *,
    writer: str,
    dtype: ServingDtype,
    resume: str,
    base: str,
    assets: str | Path | None,
) -> tuple[RunInfo, Weights, bool]:
    """The run that exists or a new one, the weights under its schema, and whether it is new.

    Args:
        writer: nonce of who starts it; the others as for :class:`~thinwire.publisher.Publisher`.

    Raises:
        As for a publisher; of what is wrong with a new run, before there is one.
    """
    bucket = chain.bucket
    try:
        run = chain.read_run()
    except (RunNotFound, BucketNotFound):
        # a store that makes its bucket on the first write starts a run; others refuse below
        if resume == "require":
            raise
    else:
        if resume == "new":
            raise RunExists(f"{bucket.url} already holds run {run.run}")
        _check_dtype(dtype, run.schema)
        return run, Weights.matching(source, run.schema), False
    weights = Weights.of(source, dtype=dtype)
    if assets is not None and not Path(assets).is_dir():
        raise Misuse(
            f"assets={str(assets)!r} is not a folder",
            hint="pass the folder with config and tokenizer, or leave it out",
        )
    run = RunInfo(new_nonce(), writer, weights.schema, base, now_ms())
    outcome = create_record(bucket, keys.RUN, run.encode())
    if outcome is Outcome.LOST:
        raise WriterConflict(f"another writer has just started a run in {bucket.url}")
    if outcome is Outcome.UNRESOLVED:
        raise CommitUnresolved("it is not known whether the run was created")
    return run, weights, True


def last_committed(
    bucket: Bucket,
    run: str,
    *,
    cache: str | Path | None,
    bases: Sequence[str],
    progress: Progress | None,
) -> State:
    """The last committed bits, their digests and the version they are.

    From the cache where it can be proved, else from the bucket.

    Args:
        bases: names of version 0, of which the first that is a folder here is started from.

    Raises:
        RunNotFound: the run has no version yet.
        As for a replica.
    """
    base = next((name for name in bases if name and Path(name).is_dir()), None)
    if cache is not None:
        # a cache is disposable: of another run it starts over, a damaged one is passed by
        with (
            contextlib.suppress(Resync),
            Replica(bucket, cache, adopt=True, base=base, progress=progress) as replica,
        ):
            for _ in replica.catch_up():
                pass
            replica.mirror.rescan()
            return _state(replica, run, [bits.copy() for bits in replica.mirror.tensors])
    replica = Replica(bucket, MemoryMirror(), base=base, progress=progress)
    for _ in replica.catch_up():
        pass
    return _state(replica, run, list(replica.mirror.tensors))


def _state(replica: Replica, run: str, tensors: list[Bits]) -> State:
    held = replica.mirror.held
    if held is None or held.run != run:
        raise RunNotFound(f"{replica.chain.bucket.url}: the run has no version yet")
    return tensors, replica.mirror.digests, held


def _check_dtype(dtype: ServingDtype, schema: Schema) -> None:
    """A serving dtype given for an existing run must be one that it serves."""
    if names_one(dtype) and len(schema):
        wanted = as_dtype(dtype)
        if all(spec.dtype != wanted for spec in schema):
            served = ", ".join(sorted({spec.dtype.name for spec in schema}))
            raise SchemaMismatch(
                f"the run is served as {served}, not as {wanted}",
                hint=f"leave the dtype out, or publish as {wanted} under a new prefix",
            )


def now_ms() -> int:
    """Wall-clock time as records hold it."""
    return time.time_ns() // 1_000_000
