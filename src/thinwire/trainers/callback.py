"""Deltas from any ``transformers.Trainer``, TRL's SFT and DPO trainers included.

    trainer = Trainer(model, args, train_dataset=data)
    PublishCallback("s3://bucket/run", every=10).attach(trainer)
    trainer.train()

Version 0 (or, of a run that exists, what differs from its last version) is published when training
begins, then every N optimizer steps, and what the trainer ends with when it ends. The trainer waits
for the diff; encoding and uploading go on while it trains. A publish that failed is raised by the
next step's end.
"""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from thinwire.arguments import one_of
from thinwire.bucket import Bucket, open_bucket
from thinwire.errors import CommitUnresolved, Misuse
from thinwire.publisher import Publisher
from thinwire.receipt import Receipt
from thinwire.trainers.assets import assets_of
from thinwire.trainers.figures import Figures
from thinwire.trainers.models import whole_model
from thinwire.weights import ServingDtype

__all__ = ["PublishCallback"]


class PublishCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes a trainer's weights. Under DDP, rank 0 does.

    Args:
        bucket: where the run is or will be, or its URL.
        every: optimizer steps between publishes.
        dtype: serving dtype of a new run, as for :class:`~thinwire.publisher.Publisher`.
        assets: folder whose config and tokenizer files travel with version 0; None: those of the
            trainer's own model and tokenizer, which name the serving dtype.
        codec, resume, base, cache, threads: as for :class:`~thinwire.publisher.Publisher`.
        busy: what a publish does while the one before is still in flight: ``"wait"``, or
            ``"skip"``, so that the next one carries its changes. The last one always waits.

    Raises:
        Misuse: an argument that makes no sense.
    """

    def __init__(
        self,
        bucket: Bucket | str | Path,
        *,
        every: int = 1,
        dtype: ServingDtype = "bf16",
        assets: str | Path | None = None,
        codec: str = "auto",
        resume: Literal["auto", "require", "new"] = "auto",
        base: str = "",
        cache: str | Path | None = None,
        busy: Literal["wait", "skip"] = "wait",
        threads: int | None = None,
    ) -> None:
        if isinstance(every, bool) or operator.index(every) < 1:
            raise Misuse(f"every={every!r}", hint="give a number of optimizer steps, at least 1")
        one_of("resume", resume, ("auto", "require", "new"))
        one_of("busy", busy, ("wait", "skip"))
        self._open = functools.partial(
            Publisher,
            open_bucket(bucket),
            dtype=dtype,
            codec=codec,
            base=base,
            cache=cache,
            busy=busy,
            threads=threads,
        )
        self._every, self._dtype, self._assets = every, dtype, assets
        self._resume: Literal["auto", "require", "new"] = resume
        self._publisher: Publisher | None = None
        self._flying: Receipt | None = None
        self._published: int | None = None
        self._figures = Figures()
        self._trainer: Any = None

    @property
    def publisher(self) -> Publisher | None:
        """The publisher while training is under way on this rank, else None."""
        return self._publisher

    def attach(self, trainer: Any) -> PublishCallback:
        """Add this callback to a trainer, and its figures to every record the trainer logs.

        Given as ``callbacks=[…]`` instead, it does the same work, but reporters that the trainer
        calls before it do not see the figures; ``trainer.state.log_history`` has them.
        """
        self._figures.log_through(trainer)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    # --- what the trainer calls -----------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the run and publish what training starts from.

        Raises:
            Misuse: this process does not hold the whole model; on every rank.
            What :class:`~thinwire.publisher.Publisher` raises.
        """
        model = whole_model(kwargs["model"])
        if not state.is_world_process_zero:
            return
        if self._publisher is None:
            self._publisher = self._opened(model, kwargs.get("processing_class"), state.global_step)
            self._resume = "require"  # training goes on in the run that is there now
            if self._publisher.started_run:
                self._published = state.global_step
                return
        self._publish(model, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish, if it is time to.

        Raises:
            What an earlier publish failed with, and what :meth:`Publisher.publish` raises.
        """
        if self._publisher is None:
            return
        self._collect()
        if state.global_step % self._every == 0:
            self._publish(whole_model(kwargs["model"]), state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the figures to the record, if the trainer's ``log`` has not."""
        logs = kwargs.get("logs")
        if self._publisher is not None and self._trainer is None and logs is not None:
            figures = self._figures.take()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish what training ended with, and wait until it is committed.

        Raises:
            What a publish failed with.
        """
        if self._publisher is None:
            return
        with self._publisher:
            self._collect(wait=True)
            if self._published != state.global_step or args.load_best_model_at_end:
                self._publish(whole_model(kwargs["model"]), state.global_step)
                self._collect(wait=True)
        self._publisher = None
        self._log_rest(state)

    def close(self) -> None:
        """Wait for a publish in flight, where training ended with an error.

        Raises:
            What it failed with.
        """
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    # --- publishing -----------------------------------------------------------------------

    def _opened(self, model: Any, processing_class: Any, step: int) -> Publisher:
        if self._assets is not None:
            return self._open(model, assets=self._assets, resume=self._resume, step=step)
        with assets_of(model, processing_class, self._dtype) as folder:
            return self._open(model, assets=folder, resume=self._resume, step=step)

    def _publish(self, model: Any, step: int) -> None:
        if self._publisher is None:
            return
        receipt = self._publisher.publish(model, step=step)
        if receipt.skipped:
            return
        self._collect(wait=True)  # the one before: this one has waited for it
        self._flying, self._published = receipt, step

    def _collect(self, *, wait: bool = False) -> None:
        """Note what a publish did, or raise what it failed with, as soon as that is known."""
        receipt = self._flying
        if receipt is None or not (wait or receipt.done()):
            return
        self._flying = None
        try:
            self._figures.add(receipt.version, receipt.stats())
        except CommitUnresolved:
            return  # the next publish settles it or raises, and so does closing

    def _log_rest(self, state: TrainerState) -> None:
        """Log figures of publishes that came after the trainer's own last record."""
        if self._trainer is not None:
            entries: dict[str, float] = {}
            self._trainer.log(entries)
        elif figures := self._figures.take():
            state.log_history.append({**figures, "step": state.global_step})
