"""What the demo's processes report to the coordinator: one JSON object per line.

The trainer tells about its phases, steps and publishes; a server about itself and about every
version it applied. Times are seconds unless a name ends in ``_ms``; clock times are Unix seconds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Phase:
    """A process begins something that takes a while."""

    text: str


@dataclass(frozen=True)
class Failed:
    """A process ends because of an error that it can name; ``misuse`` if the call was wrong."""

    message: str
    hint: str
    misuse: bool


@dataclass(frozen=True)
class Plan:
    """What the trainer is going to do; sent once version 0 is in the bucket.

    ``constant`` is the single completion that would earn most over the run's first problems, and
    ``constant_reward`` its mean reward over them.
    """

    model: str
    task: str
    parameters: int
    tensors: int
    full_bytes: int
    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    lr: float
    constant: str
    constant_reward: float
    autocast: bool


@dataclass(frozen=True)
class Stepped:
    """One optimizer step, and where its completions came from.

    Attributes:
        step: counted from 1; its publish makes the version of the same number.
        reward: mean over all completions.
        used: completions per weight version that generated them (versions as strings).
        staleness: most versions by which a completion was behind the masters.
        dropped: completions that were thrown away because they were older than the bound.
        wait_s: the trainer waited for completions; scoring included.
        train_s: the optimizer step itself.
        sample_s: generation, per server.
        example: one of the step's problems, a completion, and what it earned.
    """

    step: int
    reward: float
    loss: float
    grad_norm: float
    ratio_mean: float
    clipped_share: float
    groups_used: int
    tokens: int
    used: dict[str, int]
    staleness: int
    dropped: int
    wait_s: float
    train_s: float
    sample_s: dict[str, float]
    example: dict[str, Any]


@dataclass(frozen=True)
class Published:
    """A version is committed.

    Attributes:
        diff_s: how long publish() held the trainer up.
        encode_s, upload_s, commit_s: in the background.
        payload_bytes, commit_bytes: what went to the bucket.
        committed_at: clock time in the commit.
    """

    version: int
    step: int
    changed: int
    elements: int
    tensors: int
    payload_bytes: int
    commit_bytes: int
    full_bytes: int
    diff_s: float
    encode_s: float
    upload_s: float
    commit_s: float
    committed_at: float


@dataclass(frozen=True)
class Finished:
    """The trainer is done: what its masters are when cast by torch, apart from any publisher."""

    version: int
    state_digest: str
    sha256: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class Ready:
    """A server has loaded version ``version`` and answers at ``url``."""

    url: str
    version: int
    load_s: float


@dataclass(frozen=True)
class Applied:
    """A server generates with a new version.

    Attributes:
        apply_ms: engine.apply(), without waiting for a batch that was being generated.
        waited_ms: for that batch.
        pause_ms: nothing could be generated.
        lag_ms: from the time in the commit to the end of apply().
        fetch_s, decode_s, verify_s, patch_s: what the replica spent.
        paused_s, up_s: pauses and time since the server was ready, up to now.
    """

    version: int
    apply_ms: float
    waited_ms: float
    pause_ms: float
    lag_ms: float
    fetch_s: float
    decode_s: float
    verify_s: float
    patch_s: float
    payload_bytes: int
    paused_s: float
    up_s: float


Event: TypeAlias = Phase | Failed | Plan | Stepped | Published | Finished | Ready | Applied

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Phase, Failed, Plan, Stepped, Published, Finished, Ready, Applied)
}


def encode(event: Event) -> str:
    """One line without its end."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def decode(line: str | bytes) -> Event:
    """Inverse of :func:`encode`.

    Raises:
        ValueError: the line is no event.
    """
    try:
        data = json.loads(line)
        kind = _KINDS[data.pop("event")]
        event: Event = kind(**data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not an event: {str(line)[:120]} ({error!r})") from None
    return event
