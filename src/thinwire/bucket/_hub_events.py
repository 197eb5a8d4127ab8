"""A bucket's stream of changes, read in a thread, as a hint to look again.

The stream is server-sent events at ``/api/buckets/<id>/events``: ``ready`` once it is live,
``changes`` with a list of paths, ``reset`` and ``reconnect`` when the server wants another
connection (huggingface_hub ``_bucket_live_follow.py``). That module has a follower of its own,
which is private and ends up to half a minute after it is told to; this one ends at once. Since
events are only hints, it needs no cursor: a new connection counts as a change.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thinwire.bucket._hub_client import HubClient
from thinwire.bucket._hub_errors import translated
from thinwire.errors import AccessDenied, BucketNotFound, BucketUnavailable, Misuse

__all__ = ["Follower", "concerns", "parse_events"]

# The server sends something every 30 s. Seconds, as in _hub_client.TIMEOUT.
TIMEOUT = (10.0, 90.0, 10.0, 10.0)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
END_S = 1.0


def parse_events(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names and data of server-sent events, from lines without their ends."""
    name = ""
    data: list[str] = []
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "", []
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)


def concerns(name: str, data: str, prefix: str) -> bool:
    """Whether an event may mean that something under ``prefix`` changed. In doubt it may."""
    if name != "changes":
        return name in ("ready", "reset")
    try:
        return any(change["path"].startswith(prefix) for change in json.loads(data)["changes"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return True


class Follower:
    """Calls ``wake`` when files of the bucket whose paths start with ``prefix`` change."""

    def __init__(self, client: HubClient, prefix: str, wake: Callable[[], None]) -> None:
        self._client = client
        self._prefix = prefix
        self._wake = wake
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._response: Any = None
        self._process = os.getpid()
        name = f"thinwire-events-{client.bucket_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop, and wait for the thread. Calling it twice, or from ``wake``, does no harm.

        A thread that has no answer yet cannot be woken. It is left behind: it is a daemon, its
        connection has a time limit, and it calls ``wake`` no more.
        """
        self._stop.set()
        if self._process != os.getpid():
            return  # the thread and its connection are the parent's
        with self._lock:
            if self._response is not None:
                _disconnect(self._response)
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            try:
                with translated("follow", self._client.bucket_id):
                    self._read()
                pause = FIRST_PAUSE
            except BucketUnavailable as error:
                pause = min(max(2 * pause, error.retry_after or 0.0), LONGEST_PAUSE)
            except BucketNotFound:  # yet to be made
                pause = min(2 * pause, LONGEST_PAUSE)
            except (AccessDenied, Misuse):
                return
            self._stop.wait(pause)

    def _read(self) -> None:
        """One connection, until the server or :meth:`end` ends it."""
        headers = {**self._client.headers(), "Accept": "text/event-stream"}
        url = f"{self._client.bucket_url}/events"
        try:
            with self._client.stream(url, headers=headers, timeout=TIMEOUT) as response:
                with self._lock:
                    self._response = response
                for name, data in parse_events(response.iter_lines()):
                    if self._stop.is_set():
                        return
                    if concerns(name, data, self._prefix):
                        self._wake()
        finally:
            with self._lock:
                self._response = None


def _disconnect(response: Any) -> None:
    """End the connection under a thread that waits for it: closing alone would not wake it."""
    with contextlib.suppress(AttributeError, KeyError, OSError):
        connection = response.extensions["network_stream"].get_extra_info("socket")
        # Not SSLSocket's own method, which takes the encryption away from under the reader.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
