"""The trainer's view of the rollout servers: batches of scored groups, not too stale.

A batch is asked for before the trainer needs it, half of it from each server, so that servers
generate while the trainer trains. What a server generated with is known from its answers alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from thinwire.demo.client import RolloutClient, Rollouts, ServerUnavailable
from thinwire.demo.grpo import Group
from thinwire.demo.tasks import Problem, Task

__all__ = ["Batch", "Prompt", "RolloutPool", "Sampling", "to_batch"]

_FRESH_WITHIN_S = 3.0
_STALE_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Prompt:
    """A problem and its prompt's tokens."""

    problem: Problem
    token_ids: list[int]


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    n: int
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Batch:
    """What one optimizer step learns from.

    Attributes:
        groups: one per prompt.
        used: completions per weight version.
        seconds: request to answer, per server.
        example: index of a prompt, and the text of its first completion.
    """

    groups: list[Group]
    used: dict[int, int]
    seconds: dict[str, float]
    text: str


def to_batch(
    task: Task, prompts: Sequence[Prompt], parts: Sequence[tuple[str, Rollouts]], n: int
) -> Batch:
    """Score the servers' answers, in the order of the prompts.

    Args:
        parts: (server, answer) pairs that together cover the prompts, in order.
    """
    groups: list[Group] = []
    used: Counter[int] = Counter()
    for _, rollouts in parts:
        used[rollouts.version] += len(rollouts.completions)
        for start in range(0, len(rollouts.completions), n):
            prompt = prompts[len(groups)]
            chosen = rollouts.completions[start : start + n]
            groups.append(
                Group(
                    prompt.token_ids,
                    [c.token_ids for c in chosen],
                    [c.logprobs for c in chosen],
                    [task.reward(prompt.problem, c.text) for c in chosen],
                )
            )
    seconds = {server: rollouts.seconds for server, rollouts in parts}
    return Batch(groups, dict(used), seconds, parts[0][1].completions[0].text)


class RolloutPool:
    """Spreads a step's prompts over all servers and collects the answers.

    Args:
        clients: by server name.
        max_staleness: versions; older answers are thrown away and asked for again.
    """

    def __init__(
        self, clients: dict[str, RolloutClient], sampling: Sampling, *, max_staleness: int
    ) -> None:
        self._clients = clients
        self._sampling = sampling
        self._max_staleness = max_staleness
        self._threads = ThreadPoolExecutor(len(clients), thread_name_prefix="rollouts")
        self.dropped = 0

    def ask(
        self, prompts: Sequence[Prompt], seed: int, fresh: int
    ) -> list[tuple[str, Future[Rollouts]]]:
        """Ask for completions of the prompts; returns at once.

        Args:
            fresh: version that is on its way. A server gets a moment to pick it up before it is
                asked: it would only have been idle.
        """
        count = len(self._clients)
        shares = [
            prompts[len(prompts) * k // count : len(prompts) * (k + 1) // count]
            for k in range(count)
        ]
        return [
            (name, self._threads.submit(self._request, name, share, seed * count + k, fresh))
            for k, (name, share) in enumerate(zip(self._clients, shares))
        ]

    def collect(
        self,
        asked: Sequence[tuple[str, Future[Rollouts]]],
        prompts: Sequence[Prompt],
        seed: int,
        current: int,
    ) -> list[tuple[str, Rollouts]]:
        """Wait for the answers; again, for those that are too far behind ``current``.

        Raises:
            ServerUnavailable: no answer, or nothing fresh enough for two minutes.
        """
        parts: list[tuple[str, Rollouts]] = []
        at = 0
        deadline = time.monotonic() + _STALE_PATIENCE_S
        for name, future in asked:
            rollouts = future.result()
            size = len(rollouts.completions) // self._sampling.n
            while current - rollouts.version > self._max_staleness:
                if time.monotonic() > deadline:
                    raise ServerUnavailable(
                        f"{name} still serves version {rollouts.version}, the trainer has {current}"
                    )
                self.dropped += len(rollouts.completions)
                rollouts = self._request(name, prompts[at : at + size], seed, current)
            parts.append((name, rollouts))
            at += size
        return parts

    def _request(self, name: str, prompts: Sequence[Prompt], seed: int, fresh: int) -> Rollouts:
        client = self._clients[name]
        deadline = time.monotonic() + _FRESH_WITHIN_S
        while client.health()["weight_version"] < fresh and time.monotonic() < deadline:
            time.sleep(0.05)
        return client.complete(
            [prompt.token_ids for prompt in prompts],
            n=self._sampling.n,
            max_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature,
            seed=seed,
        )
