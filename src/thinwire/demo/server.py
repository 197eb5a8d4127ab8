"""A rollout server.

It learns of weights only through the bucket. A follower thread keeps a mirror and applies every
version to the live model; requests generate with whatever version is in when their batch starts.
A batch holds the weights still from its first token to its last.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from thinwire import Replica, open_bucket
from thinwire.demo.api import ApiServer
from thinwire.demo.child import Channel
from thinwire.demo.completions import ApiError, Limits, completion_body, parse_request
from thinwire.demo.events import Applied, Phase, Ready
from thinwire.demo.proof import fingerprint
from thinwire.demo.sampling import sample
from thinwire.demo.settings import Settings
from thinwire.disk import DiskMirror
from thinwire.engines.transformers import TransformersEngine
from thinwire.errors import EnginePoisoned, RunNotFound
from thinwire.update import Update


class RolloutServer:
    """A live model, its follower's bookkeeping, and the functions behind the API."""

    def __init__(
        self, engine: TransformersEngine, tokenizer: Any, limits: Limits, threads: int
    ) -> None:
        self.engine = engine
        self._threads = threads
        self._tokenizer = tokenizer
        config = engine.model.config
        self.limits = replace(
            limits,
            context=int(config.max_position_embeddings),  # type: ignore[union-attr,arg-type]
            vocabulary=int(config.vocab_size),  # type: ignore[union-attr,arg-type]
        )
        self.applied: list[Applied] = []
        self._one_batch = threading.Lock()
        self._waiting = threading.BoundedSemaphore(limits.waiting)
        self._batch_ended = 0.0
        self._generating = False
        self._started = time.perf_counter()
        self._paused_before = engine.paused_s  # loading version 0 counts as a pause
        self._served = {"requests": 0, "completions": 0, "tokens": 0}
        self._generating_s = self._held_up_s = 0.0

    # --- weights ------------------------------------------------------------------------

    def apply(self, update: Update) -> Applied:
        """Move the live model to a version; tell what it took."""
        began, paused = time.perf_counter(), self.engine.paused_s
        busy = self._generating
        self.engine.apply(update)
        ended = time.perf_counter()
        waited = max(0.0, self._batch_ended - began) if busy else 0.0
        stats = update.stats
        applied = Applied(
            version=update.version,
            apply_ms=1e3 * (ended - began - waited),
            waited_ms=1e3 * waited,
            pause_ms=1e3 * (self.engine.paused_s - paused),
            lag_ms=1e3 * time.time() - update.commit.time_ms,
            fetch_s=stats.fetch_s,
            decode_s=stats.decode_s,
            verify_s=stats.verify_s,
            patch_s=stats.patch_s,
            payload_bytes=stats.payload_bytes,
            paused_s=self.engine.paused_s - self._paused_before,
            up_s=ended - self._started,
        )
        self.applied.append(applied)
        return applied

    def weights(self, body: bytes) -> dict[str, Any]:
        """``GET /weights``: what the live module holds, read element by element, and the pauses."""
        with self.engine.generating() as version:
            live = fingerprint(self.engine.model)
        return {
            "weight_version": version,
            **asdict(live),
            "paused_s": self.engine.paused_s - self._paused_before,
            "up_s": time.perf_counter() - self._started,
            "generating_s": self._generating_s,
            "held_up_s": self._held_up_s,
            **self._served,
        }

    def health(self, body: bytes) -> dict[str, Any]:
        """``GET /health``."""
        return {"status": "ok", "weight_version": self.engine.version}

    # --- completions --------------------------------------------------------------------

    def complete(self, body: bytes) -> dict[str, Any]:
        """``POST /v1/completions``."""
        request = parse_request(body, self.limits, self._encode)
        if not self._waiting.acquire(blocking=False):
            raise ApiError(429, "busy", f"{self.limits.waiting} requests are waiting already")
        try:
            with self._one_batch:
                return self._generate(request)
        except EnginePoisoned as error:
            raise ApiError(503, "poisoned", str(error)) from None
        finally:
            self._waiting.release()

    def _generate(self, request: Any) -> dict[str, Any]:
        torch.set_num_threads(self._threads)  # of this thread; the follower has its own count
        asked = time.perf_counter()
        with self.engine.generating() as started:
            began = time.perf_counter()
            self._generating = True
            try:
                completions = sample(
                    self.engine.model,
                    self._tokenizer,
                    request.prompts,
                    n=request.n,
                    max_tokens=request.max_tokens,
                    temperature=request.temperature,
                    seed=request.seed,
                )
            finally:
                self._batch_ended = time.perf_counter()
                self._generating = False
            ended = self.engine.version
        self._held_up_s += began - asked
        self._generating_s += self._batch_ended - began
        self._served["requests"] += 1
        self._served["completions"] += len(completions)
        self._served["tokens"] += sum(len(c.token_ids) for c in completions)
        return completion_body(
            request,
            completions,
            model=type(self.engine.model).__name__,
            identifier=f"cmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            started=started,
            ended=ended,
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def serve(channel: Channel) -> None:
    """Be a rollout server until the coordinator says stop.

    Raises:
        What following the run raises: a server that cannot follow ends.
    """
    settings = Settings.from_json(channel.config["settings"])
    disable_progress_bar()
    torch.set_num_threads(settings.server_threads)
    mirror = DiskMirror(Path(channel.config["mirror"]))
    replica = Replica(open_bucket(settings.bucket), mirror)
    stop = threading.Event()
    updates = replica.follow(poll=settings.poll_s, stop=stop)
    first = next(updates, None)
    if first is None:
        raise RunNotFound(f"{settings.bucket} holds no version")
    began = time.perf_counter()
    channel.send(Phase(f"loads version {first.version} from its mirror"))
    engine = TransformersEngine.load(mirror, dtype=torch.bfloat16)
    engine.model.eval()
    tokenizer = AutoTokenizer.from_pretrained(mirror.folder)
    limits = Limits(**channel.config.get("limits", {}))
    server = RolloutServer(engine, tokenizer, limits, settings.server_threads)
    _warm_up(server)
    api = ApiServer(
        {
            ("POST", "/v1/completions"): server.complete,
            ("GET", "/health"): server.health,
            ("GET", "/weights"): server.weights,
        },
        channel.config["token"],
        limits.body_bytes,
    )
    threading.Thread(target=api.serve_forever, name="http", daemon=True).start()
    channel.send(Ready(api.url, engine.version, time.perf_counter() - began))

    trouble: list[BaseException] = []

    def follow() -> None:
        # a scatter in several threads would wait, inside the pause, for whichever of them the
        # trainer has pushed off its core
        torch.set_num_threads(1)
        try:
            for update in updates:
                channel.send(server.apply(update))
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            trouble.append(error)
        finally:
            stop.set()

    follower = threading.Thread(target=follow, name="follower")
    follower.start()
    while not stop.is_set():
        order = channel.receive(timeout=0.2)
        if order is not None and order.get("stop"):
            stop.set()
    follower.join()
    api.shutdown()
    mirror.close()
    if trouble:
        raise trouble[0]


def _warm_up(server: RolloutServer) -> None:
    """One small batch: what is compiled or allocated on first use should not count later."""
    sample(server.engine.model, server._tokenizer, [[0]], max_tokens=2)
