"""Listening to a run: lines that its processes add to files, and the servers' own metrics."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wordle.ledger import Sample

__all__ = ["Meter", "Tail"]

_METRIC = "vllm:generation_tokens_total"


class Tail:
    """The lines of JSON that are added to a file, as they come.

    Args:
        path: need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def __iter__(self) -> Iterator[Any]:
        """What was added since the last time, by whole lines.

        A line that a killed process has left half written, with whatever follows on it, is skipped.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            yield found


class Meter:
    """Reads, in a thread, how many tokens each server has generated.

    Args:
        urls: by the servers' names.
        every: seconds between readings.
    """

    def __init__(self, urls: Mapping[str, str], every: float = 0.5) -> None:
        self._urls, self._every = urls, every
        self._stop = threading.Event()
        self._samples: list[Sample] = []
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=item, daemon=True) for item in urls.items()
        ]

    def __enter__(self) -> Meter:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5)

    def take(self) -> list[Sample]:
        """Readings since the last time."""
        with self._lock:
            samples, self._samples = self._samples, []
        return samples

    def _run(self, name: str, url: str) -> None:
        while not self._stop.wait(self._every):
            # it is not up, or was killed while it answered
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                tokens = _generated(url)
                with self._lock:
                    self._samples.append(Sample(time.time(), name, tokens))


def _generated(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=2) as response:
        text = response.read().decode()
    lines = [line for line in text.splitlines() if line.startswith(_METRIC)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
