"""Servers that are told of every version in a bucket, each at its own pace.

The follower carries no weights: it watches the bucket's commits and asks every server to move. A
server fetches and proves a version itself, so a follower that is killed at any moment leaves a
correct server, and any number of them may run.

One thread per server: one that is dead or slow holds up nobody, and is asked for the newest version
again and again until it is there. Now and then an idle server is asked how it is, so that one that
was restarted, or left half-changed by somebody else's update, is brought back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.bucket import Bucket
from thinwire.chain import Chain
from thinwire.engines.client import UpdateClient
from thinwire.errors import (
    BucketNotFound,
    DigestMismatch,
    Misuse,
    Retryable,
    RunNotFound,
    ThinwireError,
)
from thinwire.log import keys
from thinwire.log.commit import Tip
from thinwire.wakeup import watching

__all__ = ["Arrival", "Follower", "Trouble"]

_CONFIRM_EVERY_S = 30.0
_LONGEST_RETRY_S = 10.0


@dataclass(frozen=True)
class Arrival:
    """A server serves a version that it was asked for, or a later one.

    Attributes:
        url: the server's.
        version: that it serves.
        moved: whether it had to move.
        healed: whether it was poisoned before.
        seconds: ``stage_s``, ``paused_s`` and ``apply_s`` if it moved.
        attested: the server's attestation, if one was asked for.
    """

    url: str
    version: int
    moved: bool
    healed: bool
    seconds: dict[str, float]
    attested: dict[str, Any] | None


@dataclass(frozen=True)
class Trouble:
    """A server, or the bucket, is not as it should be; it is tried again. Told once per cause.

    Attributes:
        url: the server's, or the bucket's.
        message: what is wrong.
        hint: what to do about it.
    """

    url: str
    message: str
    hint: str


Report = Callable[[Any], None]
"""Takes an :class:`Arrival` or a :class:`Trouble`; never called by two threads at once."""


class Follower:
    """Brings servers to every version that appears in a bucket.

    Args:
        bucket: of the run.
        clients: one per server.
        report: told of every arrival and trouble.
        poll: seconds between looks into the bucket; hints make the next one come at once.
        until: stop after this version, once every server serves it.
        attest: have servers attest every version, and heal one whose memory differs.
        retry: seconds before a failed request is made again; doubles up to ten.
        look: seconds between looks at an idle server.
        patience: seconds to wait for a first version, and to bear a bucket that does not answer.

    Raises:
        Misuse: no server, or one named twice.
    """

    def __init__(
        self,
        bucket: Bucket,
        clients: Sequence[UpdateClient],
        report: Report,
        *,
        poll: float = 1.0,
        until: int | None = None,
        attest: bool = False,
        retry: float = 1.0,
        look: float = 10.0,
        patience: float = 300.0,
    ) -> None:
        if not clients:
            raise Misuse("no server is named", hint="give --url http://host:port")
        if len({client.url for client in clients}) < len(clients):
            raise Misuse("a server is named twice")
        self._bucket, self._chain = bucket, Chain(bucket)
        self._servers = [_Server(client) for client in clients]
        self._report = report
        self._poll, self._until, self._attest = poll, until, attest
        self._retry, self._look, self._patience = retry, look, patience
        self._changed = threading.Condition()
        self._telling = threading.Lock()
        self._target: int | None = None
        self._stopped = False
        self._bug: BaseException | None = None

    def run(self, stop: threading.Event | None = None) -> None:
        """Follow until ``stop`` is set, or every server serves ``until``.

        Raises:
            RunNotFound: there is no version after ``patience`` seconds.
            HistoryRewritten: the newest version is gone from the bucket.
            Bucket errors: for longer than ``patience``.
        """
        stop = stop or threading.Event()
        for server in self._servers:
            name = f"thinwire-follow {server.client.url}"
            threading.Thread(target=self._tend, args=(server,), name=name, daemon=True).start()
        try:
            self._watch(stop)
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    # --- the bucket ---------------------------------------------------------------------

    def _watch(self, stop: threading.Event) -> None:
        sight = _Sight(self._chain)
        trouble_since: float | None = None
        told = ""
        hints = self._bucket.capabilities.notifications
        with watching(self._bucket, keys.COMMITS) as wakeup:
            while not stop.is_set():
                try:
                    newest = sight.newest()
                except (Retryable, BucketNotFound, RunNotFound) as error:
                    trouble_since = trouble_since or time.monotonic()
                    if time.monotonic() - trouble_since > self._patience:
                        raise
                    if told != str(error):
                        told = str(error)
                        hint = f"trying again for up to {self._patience:.0f} s"
                        self._tell(Trouble(self._bucket.url, told, hint))
                else:
                    trouble_since, told = None, ""
                    self._announce(newest)
                    if self._until is not None and newest >= self._until:
                        self._wait_for_all(stop)
                        return
                self._raise_bug()
                wakeup.pause(self._poll, stop, hints=hints)

    def _announce(self, newest: int) -> None:
        target = newest if self._until is None else min(newest, self._until)
        with self._changed:
            if target != self._target:
                self._target = target
                self._changed.notify_all()

    def _wait_for_all(self, stop: threading.Event) -> None:
        with self._changed:
            while not stop.is_set() and not all(s.serves(self._target) for s in self._servers):
                self._raise_bug()
                self._changed.wait(0.1)

    def _raise_bug(self) -> None:
        if self._bug is not None:
            raise self._bug

    # --- servers ------------------------------------------------------------------------

    def _tend(self, server: _Server) -> None:
        try:
            while (target := self._next(server)) is not None:
                self._bring(server, target)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that called run()
            self._bug = error

    def _next(self, server: _Server) -> int | None:
        """The version that a server should serve: at once if it lacks it, else for a look."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._target is not None)
            self._changed.wait_for(
                lambda: self._stopped or not server.serves(self._target), self._look
            )
            return None if self._stopped else self._target

    def _bring(self, server: _Server, target: int) -> None:
        client = server.client
        try:
            if server.serves(target) and (now := client.version()) is not None and now >= target:
                return
            answer = client.move(target)
            attested = self._attested(client) if self._attest else None
        except ThinwireError as error:
            self._fail(server, error)
            return
        arrival = Arrival(
            client.url,
            answer["version"],
            bool(answer["moved"]),
            bool(answer["healed"]),
            {key: float(answer[key]) for key in _SECONDS if key in answer},
            attested,
        )
        self._tell(arrival)
        with self._changed:
            server.version, server.trouble, server.failures = arrival.version, "", 0
            self._changed.notify_all()

    def _attested(self, client: UpdateClient) -> dict[str, Any]:
        found = client.attest()
        if not found["exact"]:
            names = ", ".join(found["differs"][:3])
            message = f"{len(found['differs'])} tensors differ in memory, {names}: healing"
            self._tell(Trouble(client.url, message, "see the server's log"))
            client.heal()
            found = client.attest()
            if not found["exact"]:
                raise DigestMismatch(f"{client.url}: {names} differ in memory after healing, too")
        return found

    def _fail(self, server: _Server, error: ThinwireError) -> None:
        if server.trouble != str(error):
            server.trouble = str(error)
            self._tell(Trouble(server.client.url, str(error), error.hint))
        with self._changed:
            server.version = None
            pause = min(self._retry * 2**server.failures, max(self._retry, _LONGEST_RETRY_S))
            server.failures = min(server.failures + 1, 16)
            self._changed.wait_for(lambda: self._stopped, pause)

    def _tell(self, event: Arrival | Trouble) -> None:
        with self._telling:
            self._report(event)


_SECONDS = ("stage_s", "paused_s", "apply_s")


class _Server:
    def __init__(self, client: UpdateClient) -> None:
        self.client = client
        self.version: int | None = None
        self.trouble = ""
        self.failures = 0

    def serves(self, version: int | None) -> bool:
        return version is not None and self.version is not None and self.version >= version


class _Sight:
    """What has been seen of a run: a version once seen has to stay."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._seen: Tip | None = None
        self._confirmed = 0.0

    def newest(self) -> int:
        """The newest version: one cheap question if it is still the same, now and then a second.

        Raises:
            RunNotFound: there is none.
            HistoryRewritten: the last one seen is gone.
            Bucket errors.
        """
        seen = self._seen
        head = self._chain.head(None if seen is None else seen.version)
        if head is None:
            raise RunNotFound(f"{self._chain.bucket.url} holds no version yet")
        if seen is None or head > seen.version:
            self._seen, self._confirmed = self._chain.read(head).tip, time.monotonic()
        elif time.monotonic() - self._confirmed > _CONFIRM_EVERY_S:
            self._chain.confirm(seen)
            self._confirmed = time.monotonic()
        return head
