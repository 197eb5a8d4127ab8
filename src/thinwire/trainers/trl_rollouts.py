"""TRL's rollouts from several servers, each judged by the weights that it really came from.

    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
    spread_rollouts(trainer, transfer, ["http://10.0.0.7:8000", "http://10.0.0.8:8000"])
    trainer.train()

TRL (1.16) asks one server, and takes a rollout's weights to be those that were live when it was
started. Here every request goes to the server with the fewest requests under way, and to another if
that one fails; and a rollout counts as stale by the oldest weights that any of its tokens came
from. vLLM tells them at ``/inference/v1/generate``: start it with ``--enable-scale-out``.

TRL compares that with ``max_staleness`` when it takes a rollout from its queue. accelerate takes
every micro-batch one ahead: all but the very first are trained on one sync later than they are
judged, and are one version older by then (with ``weight_sync_steps=1`` and without accumulation).
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

__all__ = ["Servers", "SpreadLoop", "spread_rollouts"]

_PATH = "/inference/v1/generate"
_REST_S = 2.0
_PATIENCE_S = 600.0
_USED = "thinwire/used_version"
_RETRIES = "rollout/vllm_retry_total"
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
            sample.model_version = self._trainer.model_version - self._newer(used)
        return sample

    def _newer(self, used: float) -> int:
        """How many syncs came after a version."""
        if used < self._versions[0]:  # from before this trainer: at most one for each number
            return self._versions[-1] - int(used)
        return len(self._versions) - bisect.bisect_right(self._versions, used)

    def qsize(self) -> int:
        """About how many there are."""
        return self._samples.qsize()


class SpreadLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's rollout loop, in its process, with several servers."""

    def __init__(self, *, servers: Sequence[str], token: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._servers = Servers(servers, token=token)
        self._oldest: dict[str, int] = {}

    async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
        seen: list[int] = []
        _seen.set(seen)  # every rollout is a task, and has a context of its own
        result = await super()._generate_one(*args, **kwargs)
        for sequence in result[2] if seen else ():
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
        body = {"token_ids": prompt_ids, "sampling_params": sampling}
        choice, versions = await self._servers.ask(self.session, body, self.request_timeout)
        _seen.get().extend(versions)
        self._counters[_RETRIES] += self._servers.failures
        self._servers.failures = 0
        tokens = (choice["logprobs"] or {}).get("content") or []
        return choice["token_ids"], [token["logprob"] for token in tokens]

    async def _score_group(self, group: Any) -> Any:
        samples = await super()._score_group(group)
        rows = [row for rollout in group.completions_sequences for row in rollout]
        for sample, row in zip(samples, rows, strict=True):
            if row.rollout_id in self._oldest:  # not without a token: then TRL's word counts
                sample.metrics[_USED] = float(self._oldest[row.rollout_id])
        for row in rows:
            self._oldest.pop(row.rollout_id, None)
        return samples


class Servers:
    """Servers that complete prompts. For one event loop.

    Args:
        urls: of the servers.
        token: sent to them as a bearer token, if given.

    Attributes:
        failures: requests that failed and were made again.
    """

    def __init__(self, urls: Sequence[str], *, token: str | None = None) -> None:
        self.failures = 0
        self._loads = dict.fromkeys(urls, 0)
        self._resting = dict.fromkeys(urls, 0.0)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def ask(
        self, session: aiohttp.ClientSession, body: dict[str, Any], timeout: float
    ) -> tuple[dict[str, Any], list[int]]:
        """A completion from whichever server gives one, and the versions its tokens came from.

        Args:
            session: to ask with.
            body: of vLLM's ``/inference/v1/generate``, for one completion.
            timeout: seconds for one request.

        Raises:
            Misuse: a server takes no such requests, or tells no versions.
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
                answer = await self._post(session, url, body, timeout)
            except _FAILURES as error:
                trouble = f"{url}: {error!r}"
                self._resting[url] = time.monotonic() + _REST_S
                self.failures += 1
                continue
            finally:
                self._loads[url] -= 1
            (choice,) = answer["choices"]
            return choice, _versions(url, choice)
        raise ConnectionError(f"no server has answered for {_PATIENCE_S:.0f} s: {trouble}")

    async def _post(
        self, session: aiohttp.ClientSession, url: str, body: dict[str, Any], timeout: float
    ) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout)
        async with session.post(
            url + _PATH, json=body, headers=self._headers, timeout=limit
        ) as response:
            if 400 <= response.status < 500 and response.status not in (408, 429):
                hints = {
                    404: "start vLLM with --enable-scale-out",
                    401: "give the key that vLLM was started with as token=",
                }
                raise Misuse(
                    f"{url}: {response.status} {(await response.text())[:200]}",
                    hint=hints.get(response.status),
                )
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


def _versions(url: str, choice: dict[str, Any]) -> list[int]:
    """What a completion's tokens came from; nothing for one without tokens."""
    if not choice["token_ids"]:
        return []
    spans = choice.get("weight_versions")
    try:
        return [int(span["version"]) for span in spans or [{"version": None}]]
    except (TypeError, ValueError):
        raise Misuse(
            f"{url} does not tell which version its tokens came from: weight_versions={spans}",
            hint="start vLLM with thinwire's plugin: VLLM_PLUGINS=thinwire and THINWIRE_BUCKET",
        ) from None
