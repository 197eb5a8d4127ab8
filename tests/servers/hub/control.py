"""What tests measure and break: counters by kind of request, and faults that wait to strike.

``GET /_stats`` returns the counters and ``DELETE /_stats`` resets them. ``POST /_faults`` with a
JSON object sets the faults named in it; ``{}`` changes nothing and returns all of them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from servers.hub.web import HttpError, Request, Response, Routes, json_response

if TYPE_CHECKING:
    from servers.hub.hub import Hub

__all__ = ["Faults", "Stats", "routes"]

routes = Routes()


class Stats:
    """Requests and bytes by kind of request.

    Attributes:
        requests: how many came.
        received: bytes of their bodies.
        sent: bytes of the bodies that went back; a HEAD sends none.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, kind: str, *, received: int = 0, sent: int = 0, requests: int = 0) -> None:
        """Add to the counters of one kind."""
        with self._lock:
            self.requests[kind] += requests
            self.received[kind] += received
            self.sent[kind] += sent

    def reset(self) -> None:
        """Everything back to zero."""
        with self._lock:
            for counter in (self.requests, self.received, self.sent):
                counter.clear()

    def as_json(self) -> dict[str, dict[str, int]]:
        """All counters, without the zeros."""
        with self._lock:
            counters = {"requests": self.requests, "received": self.received, "sent": self.sent}
            return {name: dict(+counter) for name, counter in counters.items()}


@dataclass
class Faults:
    """What goes wrong, and how often yet. A count goes down with every strike.

    Attributes:
        fail_batch: times, by path, that a batch fails the operation on that path alone.
        stale_listings: listings that show the files as they were before the last batch.
        rate_limited: requests of a kind that matches ``only`` and get a 429.
        unavailable: requests of a kind that matches ``only`` and get a 503.
        retry_after: seconds that either asks to wait; 0 sends no such header.
        only: a pattern of kinds, as ``fnmatch`` has them.
        corrupt_xorbs: answers with bytes of a xorb whose last byte is wrong.
        short_reads: answers with the content of a file that lack its last byte.
        short_files: reconstructions that lack their last term.
        duplicate_events: every change is told twice.
        expire_tokens: when set, every Xet token given out so far ends; reads as false.
    """

    fail_batch: dict[str, int] = field(default_factory=dict)
    stale_listings: int = 0
    rate_limited: int = 0
    unavailable: int = 0
    retry_after: int = 0
    only: str = "*"
    corrupt_xorbs: int = 0
    short_reads: int = 0
    short_files: int = 0
    duplicate_events: bool = False
    expire_tokens: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def take(self, name: str) -> bool:
        """Whether the fault strikes now."""
        with self._lock:
            left: int = getattr(self, name)
            setattr(self, name, max(left - 1, 0))
            return left > 0

    def take_batch(self, path: str) -> bool:
        """Whether the operation on ``path`` fails now."""
        with self._lock:
            left = self.fail_batch.get(path, 0)
            self.fail_batch[path] = max(left - 1, 0)
            return left > 0

    def refuse(self, kind: str) -> None:
        """Raise what a request of this kind meets instead of an answer, if anything."""
        if not fnmatch.fnmatchcase(kind, self.only):
            return
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        if self.take("rate_limited"):
            raise HttpError(429, "We had to rate limit you", headers=headers)
        if self.take("unavailable"):
            raise HttpError(503, "Service Temporarily Unavailable", headers=headers)


@routes.add("control", "GET", "/_stats")
def read_stats(hub: Hub, request: Request) -> Response:
    return json_response(hub.stats.as_json())


@routes.add("control", "DELETE", "/_stats")
def reset_stats(hub: Hub, request: Request) -> Response:
    hub.stats.reset()
    return json_response({})


@routes.add("control", "POST", "/_faults")
def set_faults(hub: Hub, request: Request) -> Response:
    wanted: dict[str, Any] = json.loads(request.body or b"{}")
    known = {field.name for field in dataclasses.fields(Faults)}
    if wanted.keys() - known:
        raise HttpError(400, f"unknown faults: {sorted(wanted.keys() - known)}")
    if wanted.pop("expire_tokens", False):
        hub.access.revoke_xet_tokens()
    for name, value in wanted.items():
        setattr(hub.faults, name, value)
    return json_response(dataclasses.asdict(hub.faults))
