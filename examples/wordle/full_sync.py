"""The usual way to bring a trainer's weights to its servers: the whole checkpoint, every time.

    transfer = FullCheckpointTransfer("/shared/checkpoints", ["http://127.0.0.1:8000"])
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)

In TRL's order: every server holds its requests, the trainer writes a bf16 checkpoint to a folder,
every server loads it through vLLM's own ``reload_weights``, and requests go on. Nothing about it is
slower than it has to be: the folder is local, its files are in the system's cache, and the servers
do everything at once.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FullCheckpointTransfer", "FullSync", "Vllm"]

_KEPT = 2


class Vllm:
    """What a vLLM server with ``VLLM_SERVER_DEV_MODE=1`` can be asked.

    Args:
        url: where it is.
        timeout: seconds without an answer.

    Requests raise OSError: no answer, or one that is no success.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout

    def ask(self, path: str, body: Any = None, *, method: str = "POST") -> Any:
        """The JSON of an answer."""
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            return json.loads(response.read() or b"null")

    def wait(self, patience: float) -> None:
        """Wait until it is up, so many seconds at most."""
        deadline = time.monotonic() + patience
        while True:
            try:
                self.ask("/health", method="GET")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def pause(self) -> None:
        """Hold requests where they are."""
        self.ask("/pause?mode=keep&clear_cache=false")

    def resume(self) -> None:
        """Let them go on."""
        self.ask("/resume")

    def reload(self, folder: Path) -> None:
        """Load a checkpoint's weights into the model that is there."""
        kwargs = {"weights_path": str(folder)}
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})

    def forget(self) -> None:
        """Compute anew what was computed from other weights."""
        answer = self.ask("/reset_prefix_cache?reset_running_requests=true")
        if not answer["success"]:
            raise OSError(f"{self.url} keeps its prefix cache")

    def checksums(self) -> dict[str, str]:
        """vLLM's own sums of the weights in its memory, by tensor."""
        found: dict[str, str] = self.ask("/weight_checker", {"action": "checksum"})["checksums"]
        return found


@dataclass(frozen=True)
class FullSync:
    """A checkpoint that went to every server.

    Attributes:
        nbytes: of its files.
        write_s: cast and written, while requests were held.
        load_s: by server: loaded, and caches emptied.
        held_s: for which each server held its requests, from being asked to until it said that
            they go on: what thinwire's ``paused_s`` is for deltas, and one way over HTTP more.
            vLLM's ``/pause`` takes 20 ms of it, for outputs that are on their way.
    """

    nbytes: int
    write_s: float
    load_s: tuple[float, ...]
    held_s: tuple[float, ...]


class FullCheckpointTransfer:
    """TRL's ``WeightTransferProtocol`` with whole checkpoints.

    Args:
        folder: where they are written; the servers read it. The last two stay.
        servers: URLs of the vLLM servers.
        patience: seconds until they have to be up.

    All of it raises OSError: the checkpoint cannot be written, or a server does not do as asked.

    Attributes:
        syncs: what has been sent; a server's place in them is that in ``servers``.
    """

    def __init__(
        self, folder: str | Path, servers: Sequence[str], *, patience: float = 300.0
    ) -> None:
        self._folder = Path(folder)
        self._servers = [Vllm(url) for url in servers]
        self._patience = patience
        self._pool = ThreadPoolExecutor(len(self._servers), thread_name_prefix="server")
        self._since: list[float] = []
        self._sent: tuple[int, float, tuple[float, ...]] = (0, 0.0, ())
        self.syncs: list[FullSync] = []

    def init_weight_transfer(self) -> None:
        """Wait until the servers are up."""
        for server in self._servers:
            server.wait(self._patience)

    def pause(self) -> None:
        """Every server holds its requests where they are."""
        self._since = list(self._pool.map(_hold, self._servers))

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Write the checkpoint, and have every server load it."""
        began = time.perf_counter()
        folder = self._folder / f"{len(self.syncs):06d}"
        nbytes = write_weights(folder, iterator)
        write_s = time.perf_counter() - began
        load_s = tuple(self._pool.map(lambda server: _load(server, folder), self._servers))
        self._sent = (nbytes, write_s, load_s)

    def resume(self) -> None:
        """Requests go on."""
        until = list(self._pool.map(_let_go, self._servers))
        held_s = tuple(end - began for began, end in zip(self._since, until))
        nbytes, write_s, load_s = self._sent
        self.syncs.append(FullSync(nbytes, write_s, load_s, held_s))
        self._drop(len(self.syncs) - 1 - _KEPT)

    def destroy(self) -> None:
        """Let go of the threads."""
        self._pool.shutdown()

    def _drop(self, number: int) -> None:
        folder = self._folder / f"{number:06d}"
        for file in folder.glob("*"):
            file.unlink()
        if folder.is_dir():
            folder.rmdir()


def write_weights(folder: Path, weights: Iterator[tuple[str, Any]]) -> int:
    """Write tensors as a safetensors checkpoint in bf16, rounded by torch; returns its bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to(torch.bfloat16).contiguous() for name, t in weights}
    file = folder / "model.safetensors"
    save_file(tensors, folder / "writing", metadata={"format": "pt"})
    os.replace(folder / "writing", file)
    return file.stat().st_size


def _hold(server: Vllm) -> float:
    """Returns when it was asked to, by the performance counter."""
    asked = time.perf_counter()
    server.pause()
    return asked


def _load(server: Vllm, folder: Path) -> float:
    """Returns seconds."""
    began = time.perf_counter()
    server.reload(folder)
    server.forget()
    return time.perf_counter() - began


def _let_go(server: Vllm) -> float:
    """Returns when it had, by the performance counter."""
    server.resume()
    return time.perf_counter()
