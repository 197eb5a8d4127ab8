"""TRL's rollouts from several servers, each judged by the weights that it really came from.

    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
    spread_rollouts(trainer, transfer, ["http://10.0.0.7:8000", "http://10.0.0.8:8000"])
    trainer.train()

TRL (1.16) asks one server, and takes a rollout's weights to be those that were live when it was
started. Here every request goes to the server with the fewest requests under way, and to another if
that one fails; and a rollout counts as stale by the oldest weights that any of its tokens came
from. vLLM tells them at ``/inference/v1/generate``: start it with ``--enable-scale-out``.
"""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import queue
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from thinwire.errors import Misuse
from thinwire.trainers.trl import DeltaWeightTransfer

__all__ = ["SpreadLoop", "spread_rollouts"]

_PATH = "/inference/v1/generate"
_REST_S = 2.0
_PATIENCE_S = 600.0
_USED = "thinwire/used_version"
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)

_seen: contextvars.ContextVar[list[int]] = contextvars.ContextVar("seen")
"""Versions that the rollout of this task has seen."""


def spread_rollouts(
    trainer: Any,
    transfer: DeltaWeightTransfer,
    servers: Sequence[str],
    *,
    token: str | None = None,
) -> None:
    """Set a trainer up that has not started yet; on ranks other than 0 there is nothing to do.

    Args:
        trainer: an ``AsyncGRPOTrainer`` with TRL's own rollout worker.
        transfer: its weight transfer.
        servers: URLs of the servers to ask.
        token: sent to them as a bearer token, if given.

    Raises:
        Misuse: no server is named, or the trainer has a rollout worker of another kind.
    """
    worker = trainer.rollout_worker
    if worker is None:
        return
    if isinstance(servers, str) or not servers:
        raise Misuse(f"servers={servers!r} names no server", hint='give ["http://host:port"]')
    if not isinstance(worker, AsyncRolloutWorker):
        raise Misuse(f"a {type(worker).__name__} asks no servers that could be several")
    worker._loop_cls = SpreadLoop
    worker._loop_kwargs.update(servers=[url.rstrip("/") for url in servers], token=token)
    trainer.rollout_queue = _JudgedByUse(trainer, transfer.versions)


class _JudgedByUse:
    """TRL's queue of samples, whose ``model_version`` is that of the weights they came from."""

    def __init__(self, trainer: Any, versions: Sequence[int]) -> None:
        self._trainer, self._versions = trainer, versions
        self._samples: queue.Queue[Any] = trainer.rollout_queue

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """The next sample."""
        sample = self._samples.get(*args, **kwargs)
        used = sample.metrics.get(_USED)
        if used is not None:
            newer = len(self._versions) - bisect.bisect_right(self._versions, used)
            sample.model_version = self._trainer.model_version - newer
        return sample

    def qsize(self) -> int:
        """About how many there are."""
        return self._samples.qsize()


class SpreadLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's rollout loop, in its process, with several servers."""

    def __init__(self, *, servers: Sequence[str], token: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._loads = dict.fromkeys(servers, 0)
        self._resting = dict.fromkeys(servers, 0.0)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._oldest: dict[str, int] = {}

    async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
        seen: list[int] = []
        _seen.set(seen)  # every rollout is a task, and has a context of its own
        result = await super()._generate_one(*args, **kwargs)
        for sequence in result[2]:
            self._oldest[sequence.rollout_id] = min(seen)
        return result

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        sampling = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": 0,
            "seed": random.getrandbits(63),
        }
        if self.min_p is not None:
            sampling["min_p"] = self.min_p
        answer = await self._ask({"token_ids": prompt_ids, "sampling_params": sampling})
        (choice,) = answer["choices"]
        _seen.get().extend(int(span["version"]) for span in choice["weight_versions"])
        return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """An answer, from whichever server gives one.

        Raises:
            Misuse: a server takes no such requests.
            ConnectionError: no server has answered for a long time.
        """
        began = time.monotonic()
        trouble = ""
        while time.monotonic() - began < _PATIENCE_S:
            ready = [url for url, until in self._resting.items() if until <= time.monotonic()]
            if not ready:
                await asyncio.sleep(_REST_S / 10)
                continue
            url = min(ready, key=self._loads.__getitem__)
            self._loads[url] += 1
            try:
                return await self._post_to(url, body)
            except _FAILURES as error:
                trouble = f"{url}: {error!r}"
                self._resting[url] = time.monotonic() + _REST_S
                self._counters["rollout/vllm_retry_total"] += 1
            finally:
                self._loads[url] -= 1
        raise ConnectionError(f"no server has answered for {_PATIENCE_S:.0f} s: {trouble}")

    async def _post_to(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=self.request_timeout)
        session: aiohttp.ClientSession = self.session
        async with session.post(
            url + _PATH, json=body, headers=self._headers, timeout=limit
        ) as response:
            if 400 <= response.status < 500 and response.status not in (408, 429):
                raise Misuse(
                    f"{url}: {response.status} {(await response.text())[:200]}",
                    hint="start vLLM with --enable-scale-out; a key is given as token=",
                )
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer

    async def _score_group(self, group: Any) -> Any:
        samples = await super()._score_group(group)
        rows = [row for rollout in group.completions_sequences for row in rollout]
        for sample, row in zip(samples, rows, strict=True):
            sample.metrics[_USED] = float(self._oldest[row.rollout_id])
        for row in rows:
            self._oldest.pop(row.rollout_id, None)
        return samples
