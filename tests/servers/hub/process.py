"""The server in a process of its own, measured and broken over HTTP."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from servers.ports import ServerProcess, answers, free_port

__all__ = ["HubProcess"]

TESTS = Path(__file__).parents[2]


class HubProcess:
    """A Hub that runs inside ``with``.

    Args:
        folder: for its log.
        options: more arguments for ``python -m servers.hub``.

    Attributes:
        url: what clients take for ``https://huggingface.co``.
        gateway: what they take for ``https://s3.hf.co``.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.gateway = f"{self.url}/s3"
        self._process = ServerProcess(
            [sys.executable, "-m", "servers.hub", "--port", str(port), *options],
            ready=lambda: answers(f"{self.url}/_stats"),
            log=folder / f"hub-{port}.log",
            folder=TESTS,
        )

    def stats(self) -> dict[str, dict[str, int]]:
        """Requests, and bytes received and sent, by kind of request."""
        found: dict[str, dict[str, int]] = self._control("GET", "/_stats")
        return {
            name: {kind: count for kind, count in counter.items() if kind != "control"}
            for name, counter in found.items()
        }

    def reset(self) -> None:
        """Counters to zero."""
        self._control("DELETE", "/_stats")

    def faults(self, **faults: Any) -> dict[str, Any]:
        """Set faults (:class:`servers.hub.control.Faults`); all of them as they are now."""
        answer: dict[str, Any] = self._control("POST", "/_faults", faults)
        return answer

    def heal(self) -> None:
        """No faults."""
        counts = ("stale_listings", "rate_limited", "unavailable", "retry_after", "corrupt_xorbs")
        self.faults(**dict.fromkeys(counts, 0), short_reads=0, short_files=0)
        self.faults(fail_batch={}, only="*", duplicate_events=False)

    def _control(self, method: str, path: str, value: Any = None) -> Any:
        body = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, method=method)
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def __enter__(self) -> HubProcess:
        self._process.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._process.stop()
