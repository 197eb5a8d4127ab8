"""Every sample that a trainer takes, written to a file in order; and a rollout worker that hands
them out again.

    with record(trainer, path):          # before trainer.train()
        trainer.train()

    replay = Replay(path)
    trainer = AsyncGRPOTrainer(..., rollout_worker=replay)

TRL (1.16) makes its batches from the order of the samples alone, and drops a sample for its
staleness at the moment it is taken. So a record also holds the trainer's version at that moment,
and a replayed sample is as stale as it was when it was recorded.

A record is lines of JSON: a head, a line per sample, and an end with the number of samples and the
SHA-256 of all lines before it. Arrays are stored by their bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

__all__ = ["BadRecord", "Recorder", "Replay", "Taken", "read_record", "record"]

_HEAD = {"format": "thinwire-wordle-rollouts", "version": 1}
_ARRAYS = {"input_ids", "completion_mask", "old_log_probs"}
_KINDS = {"prompt": list, "completion": list, "advantage": float, "metrics": dict} | {
    "model_version": int,
    "group_id": int,
}


class BadRecord(ValueError):
    """A file is no whole record of rollouts."""


@dataclass(frozen=True)
class Taken:
    """A sample, and the trainer's version when it took it."""

    sample: RolloutSample
    version: int

    def to_line(self) -> bytes:
        """JSON on one line."""
        fields = asdict(self.sample)
        for name in _ARRAYS:
            fields[name] = _array_to_json(fields[name])
        told = {"taken_at": self.version, "sample": fields}
        return json.dumps(told, default=_plain).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Taken:
        """What :meth:`to_line` made a line of.

        Raises:
            BadRecord: no such line.
        """
        try:
            told = json.loads(line)
            fields = dict(told["sample"])
            for name in _ARRAYS:
                fields[name] = _array_from_json(fields[name])
            for name, kind in _KINDS.items():
                if type(fields[name]) is not kind:
                    raise BadRecord(f"{name} is no {kind.__name__}")
            return cls(RolloutSample(**fields), int(told["taken_at"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecord(f"no sample: {error!r}") from None


def _array_to_json(array: Any) -> dict[str, str]:
    array = np.asarray(array)
    if array.ndim != 1 or array.dtype.hasobject:
        raise TypeError(f"a sample's array is {array.dtype}, {array.ndim}-dimensional")
    dtype = array.dtype.newbyteorder("<")
    return {
        "dtype": dtype.str,
        "base64": base64.b64encode(array.astype(dtype).tobytes()).decode(),
    }


def _array_from_json(told: dict[str, str]) -> np.ndarray[Any, Any]:
    data = base64.b64decode(told["base64"], validate=True)
    array: np.ndarray[Any, Any] = np.frombuffer(data, np.dtype(told["dtype"])).copy()
    return array


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in a record")


# --- writing -------------------------------------------------------------------------------


class Recorder:
    """A trainer's queue of samples that writes down what it hands out.

    Args:
        trainer: has ``rollout_queue`` and ``model_version``.
        file: written to; :meth:`end` completes it.
    """

    def __init__(self, trainer: Any, file: BinaryIO) -> None:
        self._trainer, self._file = trainer, file
        self._samples = trainer.rollout_queue
        self._sum = hashlib.sha256()
        self.count = 0
        self._write(json.dumps(_HEAD).encode() + b"\n")

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """The next sample."""
        sample = self._samples.get(*args, **kwargs)
        self._write(Taken(sample, self._trainer.model_version).to_line())
        self.count += 1
        return sample

    def qsize(self) -> int:
        """About how many there are."""
        return int(self._samples.qsize())

    def end(self) -> None:
        """Say that the record is whole."""
        last = {"samples": self.count, "sha256": self._sum.hexdigest()}
        self._file.write(json.dumps(last).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._sum.update(line)


@contextmanager
def record(trainer: Any, path: Path) -> Iterator[Recorder]:
    """Record what a trainer takes while the context lasts; whole only if it ends without an error.

    Whatever else replaces the trainer's queue, ``spread_rollouts`` for one, comes before.
    """
    with path.open("wb") as file:
        recorder = Recorder(trainer, file)
        trainer.rollout_queue = recorder
        yield recorder
        recorder.end()


# --- reading -------------------------------------------------------------------------------


def read_record(path: Path) -> list[Taken]:
    """Every sample, in order.

    Raises:
        BadRecord: it is not whole, has been changed, or is no record.
    """
    *lines, last = path.read_bytes().splitlines(keepends=True) or [b""]
    try:
        head, end = json.loads(lines[0]) if lines else None, json.loads(last)
    except ValueError as error:
        raise BadRecord(f"{path} is no record of rollouts, or not a whole one: {error}") from None
    if head != _HEAD:
        raise BadRecord(f"{path} is no record of rollouts that can be read here")
    if not isinstance(end, dict) or "sha256" not in end:
        raise BadRecord(f"{path} is not whole: the recording was broken off")
    whole = hashlib.sha256(b"".join(lines)).hexdigest()
    if end != {"samples": len(lines) - 1, "sha256": whole}:
        raise BadRecord(f"{path} is not what was recorded: its sum differs")
    return [Taken.from_line(line) for line in lines[1:]]


class Replay:
    """TRL's ``RolloutWorkerProtocol``: a record's samples, in their order.

    Args:
        path: of the record.

    Raises:
        BadRecord: it is not whole, or has been changed.

    Attributes:
        taken: samples that have been handed out.
        elsewhere: of these, how many at another version of the trainer than in the recording.
    """

    def __init__(self, path: Path) -> None:
        self._all = read_record(path)
        self._version = 0
        self.taken = 0
        self.elsewhere = 0
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.rollout_buffer = self

    # --- TRL's protocol -------------------------------------------------------------------

    def start(self) -> None:
        """Nothing: the samples are there."""

    def stop(self) -> None:
        """Nothing."""

    def update_model_version(self, model_version: int) -> None:
        """A version is live."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """The trainer waits for a sample that will not come."""
        raise BadRecord(
            f"the trainer wants more than the {len(self._all)} samples of the record: "
            "it trains in another way than the one that was recorded"
        )

    # --- its queue ------------------------------------------------------------------------

    def get(self, *args: Any, **kwargs: Any) -> RolloutSample:
        """The next sample, as stale as it was.

        Raises:
            queue.Empty: there is none left.
        """
        if self.taken == len(self._all):
            raise queue.Empty
        taken = self._all[self.taken]
        self.taken += 1
        self.elsewhere += taken.version != self._version
        taken.sample.model_version += self._version - taken.version
        return taken.sample

    def qsize(self) -> int:
        """How many are left."""
        return len(self._all) - self.taken
