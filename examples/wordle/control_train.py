"""The trainer of the control experiment: the same training, whose weights leave in one of two ways.

    python -m wordle.control_train record|delta|full settings.json rollouts.jsonl

======  ==========================================================================================
record  games are played on the servers, which deltas keep up to date; what the trainer takes is
        written to the file
delta   the file's rollouts once more, and deltas
full    the file's rollouts once more, and whole checkpoints
======  ==========================================================================================

After every sync it notes what that took, the SHA-256 of its masters, and vLLM's own checksums of
what every server has in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from thinwire import Bucket, open_bucket
from thinwire.chain import Chain
from thinwire.engines.client import UpdateClient
from thinwire.log.keys import commit_key
from thinwire.trainers.trl import DeltaWeightTransfer
from thinwire.trainers.trl_rollouts import spread_rollouts
from wordle.full_sync import FullCheckpointTransfer, Vllm
from wordle.player import WordlePlayer
from wordle.rollout_record import Replay, record
from wordle.settings import Settings
from wordle.train import Told, make_trainer

__all__ = ["Observed", "masters_sha256"]

Took = Callable[[], dict[str, Any]]
_PATIENCE_S = 300.0


class Observed:
    """TRL's ``WeightTransferProtocol`` around another one, that looks after every sync.

    Args:
        transfer: does everything.
        look: called after each sync, outside of what is timed, with the seconds that the trainer
            waited for it.
    """

    def __init__(self, transfer: Any, look: Callable[[float], None]) -> None:
        self._transfer, self._look = transfer, look
        self._began = 0.0

    def init_weight_transfer(self) -> None:
        """As it does."""
        self._transfer.init_weight_transfer()

    def pause(self) -> None:
        """As it does."""
        self._began = time.perf_counter()
        self._transfer.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """As it does."""
        self._transfer.send_weights(iterator)

    def resume(self) -> None:
        """As it does; then look."""
        self._transfer.resume()
        self._look(time.perf_counter() - self._began)

    def destroy(self) -> None:
        """As it does."""
        self._transfer.destroy()


def masters_sha256(model: Any) -> str:
    """SHA-256 over the bytes of all parameters as they are trained, in the order of their names."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        total.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        total.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def wait_for_all(transfer: DeltaWeightTransfer, servers: Sequence[Vllm]) -> None:
    """Wait until every server serves the last version, also one that nobody waits for.

    Raises:
        OSError, TimeoutError: one does not.
    """
    for server in servers:
        server.wait(_PATIENCE_S)
    deadline = time.monotonic() + _PATIENCE_S
    while any(s.left_out or s.version != transfer.versions[-1] for s in transfer.servers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every server follows: {transfer.servers}")
        time.sleep(0.05)


def delta_took(transfer: DeltaWeightTransfer, bucket: Bucket, servers: tuple[str, ...]) -> Took:
    """What the last sync took, as the bucket and the servers tell."""
    clients = [UpdateClient(url) for url in servers]

    def took() -> dict[str, Any]:
        version = transfer.versions[-1]
        commit = Chain(bucket).read(version)
        size = sum(p.size for p in commit.payloads) + bucket.head(commit_key(version)).size
        seconds = [client.status()["seconds"] for client in clients]
        return {
            "version": version,
            "changed": commit.changed,
            "bytes": size if version else None,  # version 0 is a checkpoint's manifest
            "held_s": [s.get("paused_s") for s in seconds],
            "stage_s": [s.get("stage_s") for s in seconds],
        }

    return took


def full_took(transfer: FullCheckpointTransfer) -> Took:
    """What the last sync took, as the transfer has measured."""

    def took() -> dict[str, Any]:
        sync = transfer.syncs[-1]
        return {
            "version": len(transfer.syncs) - 1,
            "bytes": sync.nbytes,
            "held_s": sync.held_s,
            "load_s": sync.load_s,
            "write_s": sync.write_s,
        }

    return took


def train(way: str, settings: Settings, rollouts: Path) -> None:
    """Train as the way wants it, and tell of every sync in the file for events."""
    torch.use_deterministic_algorithms(True)
    told = Told(settings.events)
    servers = [Vllm(url) for url in settings.servers]
    others: dict[str, Any]
    if way == "record":
        others = {"environment_factory": WordlePlayer}
    else:
        others = {"rollout_worker": Replay(rollouts)}
    with contextlib.ExitStack() as stack:
        transfer: Any
        if way == "full":
            transfer = FullCheckpointTransfer(settings.bucket, settings.servers)
            took = full_took(transfer)
        else:
            bucket = stack.enter_context(open_bucket(settings.bucket))
            transfer = DeltaWeightTransfer(
                settings.bucket, servers=settings.servers, patience=_PATIENCE_S, resume="new"
            )
            took = delta_took(transfer, bucket, settings.servers)

        def look(wait_s: float) -> None:
            if way != "full":
                wait_for_all(transfer, servers)
            sums = [server.checksums() for server in servers]
            told.tell("sync", wait_s=wait_s, **took(), masters=masters(), checksums=sums)

        def masters() -> str:
            return masters_sha256(trainer.accelerator.unwrap_model(trainer.model))

        trainer = make_trainer(settings, Observed(transfer, look), **others)
        if way != "full":
            transfer.attach(trainer)
        recording: AbstractContextManager[Any] = contextlib.nullcontext()
        if way == "record":
            spread_rollouts(trainer, transfer, settings.servers)
            recording = record(trainer, rollouts)
        with recording:
            trainer.train()
        told.tell("end", masters=masters(), steps=trainer.state.global_step, **_left(others))


def _left(others: dict[str, Any]) -> dict[str, int]:
    replay = others.get("rollout_worker")
    return {} if replay is None else {"left": replay.qsize(), "elsewhere": replay.elsewhere}


def main() -> None:
    way, settings, rollouts = sys.argv[1:]
    train(way, Settings.load(Path(settings)), Path(rollouts))


if __name__ == "__main__":
    main()
