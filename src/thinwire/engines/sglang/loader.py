"""One SGLang worker's part: prove the layout, then write a version that the mirror holds.

SGLang calls a loader as ``loader(model, named_tensors)`` in every tensor-parallel worker, while it
computes nothing (``weight_updater.py`` in ``python/sglang/srt``). What a loader raises ends the
server; what it returns is dropped. Hence two ways to fail: as long as no byte of any rank has
changed, the worker returns, serves on as before, and says in its account what was wrong. After
that it raises, so that half a version is never served.

The ranks decide together. They only ever talk through one exchange, whose number is the same on
all of them, so that a rank that fails early holds up no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from thinwire.checkpoint import Checkpoint
from thinwire.engines.host import ReadingRank
from thinwire.engines.session import Gather, Session
from thinwire.engines.sglang.account import write_account
from thinwire.errors import EnginePoisoned, InvalidCheckpoint, Misuse, Resync, ThinwireError

__all__ = ["FollowedMirror", "RankFailed", "Worker", "this_worker"]

_MIRROR_PATIENCE_S = 30.0


class FollowedMirror(ReadingRank):
    """A mirror that the follower moves, before it tells the server.

    Every rank counts as its writer here: none has to wait for another to get to a version.
    """

    writes = True


class RankFailed(ThinwireError):
    """Another rank has failed, before anything was written."""


class Worker:
    """A rank and what it knows of the run.

    Args:
        mirror: this host's mirror; empty: there is none, and every request is refused.
        loaded: folder of the checkpoint that SGLang has loaded; None if that is the mirror itself
            as it was then, and still is at the first request.
        rank: among the ranks that ``gather`` reaches.
        gather: exchanges values among them.
        patience: seconds to wait for the mirror to get to the version asked for.
    """

    def __init__(
        self,
        mirror: str,
        loaded: Path | None,
        *,
        rank: int = 0,
        gather: Gather = lambda value: [value],
        patience: float = _MIRROR_PATIENCE_S,
    ) -> None:
        self._mirror, self._loaded = mirror, loaded
        self._rank, self._all = rank, gather
        self._patience = patience
        self._model: Any = None
        self.session: Session | None = None

    def load(self, model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Do what the tensors ask for.

        Raises:
            EnginePoisoned: the weights may be half a version.
        """
        asked = {name: int(tensor) for name, tensor in named_tensors}
        account: dict[str, Any] = {"ask": asked.get("thinwire.ask"), "error": ""}
        try:
            # SGLang's loop runs in inference mode, where a loader cannot be watched
            with torch.inference_mode(False), torch.no_grad():
                self._bring(model, asked)
        except (Resync, InvalidCheckpoint) as error:
            raise EnginePoisoned(f"the server must not serve: {error}") from error
        except ThinwireError as error:
            hint = error.hint or ""
            account.update(error=type(error).__name__, message=str(error), hint=hint)
        if self.session is not None:
            state = self.session.status()
            account.update({key: state[key] for key in ("version", "refused", "seconds")})
        else:
            account["version"] = None
        if self._rank == 0 and self._mirror:
            write_account(self._mirror, account)

    def _bring(self, model: Any, asked: dict[str, int]) -> None:
        if self.session is not None and self._model is model:
            session = self.session
            self._together(lambda: self._stage(session, asked))
            try:
                session.apply(asked["thinwire.version"])
            except ThinwireError as error:  # other ranks may have written
                raise EnginePoisoned(str(error)) from error
            return
        session = self._together(lambda: self._prepare(model, asked))
        try:
            self._start(session, asked["thinwire.version"])
        except BaseException:
            session.close()
            raise
        self.session, self._model = session, model

    # --- before anything is written -------------------------------------------------------

    def _prepare(self, model: Any, asked: dict[str, int]) -> Session:
        if self.session is not None:
            raise Misuse("the server has another model now", hint="draft models are not supported")
        if "thinwire.version" not in asked:
            raise Misuse("the request names no version", hint="use thinwire's follower")
        if not self._mirror:
            raise Misuse("no mirror is named", hint="start SGLang with THINWIRE_MIRROR")
        try:
            if self._loaded is not None:
                Checkpoint.open(self._loaded)
            host = FollowedMirror(Path(self._mirror).absolute(), patience=self._patience)
            host.advance(asked["thinwire.version"])
        except (Resync, InvalidCheckpoint) as error:  # nothing is lost yet: no reason to end
            raise Misuse(str(error), hint=error.hint) from error
        return Session(
            model,
            _loader_of(model),
            host,
            gather=self._gather,
            synchronize=lambda: _synchronize(model),
        )

    def _stage(self, session: Session, asked: dict[str, int]) -> None:
        try:
            session.stage(asked["thinwire.version"])
        except KeyError:
            raise Misuse("the request names no version", hint="use thinwire's follower") from None
        except Resync as error:  # nothing was written
            raise Misuse(str(error), hint=error.hint) from error

    def _start(self, session: Session, version: int) -> None:
        try:
            session.start(self._loaded, version)
        except RankFailed:
            raise
        except Exception as error:
            self._exchange(("failed", str(error)))
            raise
        try:
            self._gather(None)
        except RankFailed as error:
            raise EnginePoisoned(f"this rank holds version {version}: {error}") from error

    # --- with the other ranks -------------------------------------------------------------

    def _together(self, action: Callable[[], Any]) -> Any:
        """Do something on every rank; it has either worked on all of them, or nobody goes on."""
        try:
            done = action()
        except Exception as error:
            self._exchange(("failed", str(error)))
            if isinstance(error, ThinwireError):
                raise
            raise Misuse(f"{type(error).__name__}: {error}") from error
        self._gather(None)
        return done

    def _gather(self, value: Any) -> list[Any]:
        rows = self._exchange(("value", value))
        for rank, (kind, content) in enumerate(rows):
            if kind == "failed":
                raise RankFailed(f"rank {rank}: {content}")
        return [content for _, content in rows]

    def _exchange(self, row: tuple[str, Any]) -> list[tuple[str, Any]]:
        return self._all(row)


_worker: Worker | None = None


def this_worker() -> Worker:
    """The worker of this process, made from its environment and SGLang's ranks."""
    global _worker
    if _worker is None:
        group = _tp_group()
        loaded = os.environ.get("THINWIRE_CHECKPOINT")
        _worker = Worker(
            os.environ.get("THINWIRE_MIRROR", ""),
            Path(loaded) if loaded else None,
            rank=group.rank_in_group,
            gather=lambda value: _all_gather(group, value),
        )
    return _worker


def _tp_group() -> Any:
    # python/sglang/srt/distributed/parallel_state.py
    from sglang.srt.distributed import get_tp_group  # type: ignore[import-not-found]

    return get_tp_group()


def _all_gather(group: Any, value: Any) -> list[Any]:
    if group.world_size == 1:
        return [value]
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _loader_of(model: Any) -> Callable[[Any], object]:
    def load(weights: Any) -> object:
        with torch.no_grad():
            return model.load_weights(weights)

    return load


def _synchronize(model: torch.nn.Module) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
