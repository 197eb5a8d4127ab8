"""Deltas instead of NCCL for TRL's asynchronous trainers.

    transfer = DeltaWeightTransfer("hf://buckets/me/run", servers=["http://10.0.0.7:8000"])
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)

TRL (1.16: ``experimental.async_grpo``, ``experimental.async_distillation``) calls, in the trainer's
main thread and on rank 0 only, ``pause``, ``send_weights`` and ``resume`` around every sync. Here
only ``send_weights`` does anything: it diffs, uploads and commits while the servers go on
generating. The servers themselves hold their requests, for as long as it takes to write the changes
into their weights. Nothing of TRL is imported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from thinwire.arguments import one_of
from thinwire.bucket import Bucket, open_bucket
from thinwire.errors import ThinwireError
from thinwire.publisher import Publisher
from thinwire.receipt import Receipt
from thinwire.trainers.assets import assets_of
from thinwire.trainers.figures import Figures
from thinwire.trainers.fleet import Fleet, ServerState
from thinwire.weights import ServingDtype

__all__ = ["DeltaWeightTransfer"]

Wait = Literal["served", "committed", "copied"]


class DeltaWeightTransfer:
    """TRL's ``WeightTransferProtocol`` through a bucket.

    Args:
        bucket: where the run is or will be, or its URL.
        servers: URLs of vLLM servers with thinwire's plugin, which are told of every version. None:
            the replicas follow the bucket by themselves, and nobody tells them anything.
        wait: what a sync waits for before training goes on: ``"served"``, until the servers that
            keep up serve the version; ``"committed"``, until it is in the bucket; ``"copied"``,
            until the changes are known. None: ``"served"`` with servers, else ``"committed"``.
            TRL counts a version as live once the sync returns: the earlier that is, the more
            completions are from older weights than TRL takes them to be.
        timeout: seconds to wait for the first server to serve a version.
        patience: seconds to wait for the other servers after that, also for those that are still
            starting; then they are left out until they have caught up.
        token: sent to the servers as a bearer token, if given.
        dtype: serving dtype of a new run, as for :class:`~thinwire.publisher.Publisher`.
        assets: folder whose config and tokenizer files travel with version 0; servers that load
            the mirror need them. None: once attached to a trainer, those of its model.
        codec, resume, base, cache, threads: as for :class:`~thinwire.publisher.Publisher`.

    Raises:
        Misuse: an argument that makes no sense.

    Attributes:
        versions: thinwire's version of every sync, in order: TRL's version ``k`` of a fresh
            training run is ``versions[k - 1]``.
    """

    def __init__(
        self,
        bucket: Bucket | str | Path,
        *,
        servers: Sequence[str] | None = None,
        wait: Wait | None = None,
        timeout: float = 600.0,
        patience: float = 30.0,
        token: str | None = None,
        dtype: ServingDtype = "bf16",
        assets: str | Path | None = None,
        codec: str = "auto",
        resume: Literal["auto", "require", "new"] = "auto",
        base: str = "",
        cache: str | Path | None = None,
        threads: int | None = None,
    ) -> None:
        one_of("resume", resume, ("auto", "require", "new"))
        self._wait: Wait = wait or ("committed" if servers is None else "served")
        served = () if servers is None else ("served",)
        one_of("wait", self._wait, (*served, "committed", "copied"))
        self._gather = functools.partial(
            Fleet, servers or (), timeout=timeout, patience=patience, token=token
        )
        if servers is not None:
            self._gather()  # raises now what it would raise at the first sync
        self._has_servers = servers is not None
        self._fleet: Fleet | None = None
        self._open = functools.partial(
            Publisher,
            open_bucket(bucket),
            dtype=dtype,
            codec=codec,
            base=base,
            cache=cache,
            threads=threads,
        )
        self._dtype, self._assets = dtype, assets
        self._resume: Literal["auto", "require", "new"] = resume
        self._publisher: Publisher | None = None
        self._background: ThreadPoolExecutor | None = None
        self._finishing: Future[None] | None = None
        self._figures = Figures()
        self._trainer: Any = None
        self.versions: list[int] = []

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """What is known of the servers: which serve what, which are left out."""
        return () if self._fleet is None else self._fleet.states

    def attach(self, trainer: Any) -> DeltaWeightTransfer:
        """Take from the trainer what TRL does not tell: its step for every commit, its assets.

        The figures are added to every record that the trainer logs.
        """
        self._figures.log_through(trainer)
        self._trainer = trainer
        return self

    # --- TRL's protocol -------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Nothing: servers that load version 0 from the bucket cannot be up before it is there."""

    def pause(self) -> None:
        """Nothing: the servers generate on until there is something to write."""

    def resume(self) -> None:
        """Nothing: the servers have gone on by themselves."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish the weights, and have the servers move to them.

        Under FSDP2, rank 0 holds the gathered tensors until the diff is done.

        Raises:
            What :meth:`Publisher.publish` and its receipt raise.
            ServersBehind, ServerRefused: the version is committed, and no server serves it.
        """
        pairs = list(iterator)  # to its end, whatever happens: other ranks take part in gathering
        self._settle()
        step = None if self._trainer is None else int(self._trainer.state.global_step)
        if self._publisher is None:
            with self._assets_there() as assets:
                self._publisher = self._open(pairs, assets=assets, resume=self._resume, step=step)
            self._resume = "require"  # training goes on in the run that is there now
            if self._publisher.started_run:
                self.versions.append(self._publisher.version)
                self._tell(self._publisher.version)
                return
        receipt = self._publisher.publish(pairs, step=step)
        del pairs
        if self._wait == "copied":
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="thinwire-tell")
            self._finishing = self._background.submit(self._finish, receipt)
        else:
            self._finish(receipt)
        if receipt.version is not None:
            self.versions.append(receipt.version)

    def destroy(self) -> None:
        """Wait for the last commit and let go of the servers.

        Raises:
            What a publish failed with, unless training is ending with an error already.
        """
        ending = sys.exc_info()[1]  # TRL calls this in a finally clause
        try:
            self._drain()
        except ThinwireError as error:
            if ending is None:
                raise
            if hasattr(ending, "add_note"):
                ending.add_note(f"the last publish failed as well: {error}")
        finally:
            fleet, self._fleet = self._fleet, None
            if fleet is not None:
                fleet.close()

    # --- a sync's two halves --------------------------------------------------------------

    @contextlib.contextmanager
    def _assets_there(self) -> Iterator[str | Path | None]:
        if self._assets is not None or self._trainer is None:
            yield self._assets
            return
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        model = getattr(model, "get_base_model", lambda: model)()  # without adapters
        with assets_of(model, self._trainer.processing_class, self._dtype) as folder:
            yield folder

    def _finish(self, receipt: Receipt) -> None:
        self._figures.add(receipt.version, receipt.stats())
        if receipt.version is not None:
            self._tell(receipt.version)

    def _tell(self, version: int) -> None:
        if not self._has_servers:
            return
        if self._fleet is None:
            self._fleet = self._gather()
        if self._wait == "served":
            self._fleet.serve(version)
        else:
            self._fleet.announce(version)

    def _drain(self) -> None:
        publisher, self._publisher = self._publisher, None
        background, self._background = self._background, None
        try:
            self._settle()
        finally:
            if background is not None:
                background.shutdown()
            if publisher is not None:
                publisher.close()

    def _settle(self) -> None:
        """Raise what the sync before failed with in the background."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()
