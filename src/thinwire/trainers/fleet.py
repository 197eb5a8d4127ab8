"""Several servers that are told of versions: the ready ones are waited for, the others come back.

One thread per server asks it to move to the newest version, again and again until it has. Whoever
waits for a version waits for the servers that keep up: one that is gone, refuses, or takes too long
is left out until it has caught up by itself. One that has not served anything yet may be starting:
it is waited for as well, until it takes too long. At least one has to be there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.engines.client import ServerRefused, UpdateClient
from thinwire.errors import Misuse, Retryable, ThinwireError

__all__ = ["Fleet", "ServerState", "ServersBehind"]


class ServersBehind(Retryable):
    """No server serves the version that all of them were told of."""

    default_hint = "start the servers, or see their logs; they catch up by themselves"


@dataclass(frozen=True)
class ServerState:
    """What is known of a server.

    Attributes:
        url: where it is.
        version: the last version that it said it serves; None before the first.
        left_out: whether nobody waits for it now.
        trouble: what went wrong last; empty once it has caught up.
    """

    url: str
    version: int | None
    left_out: bool
    trouble: str


class Fleet:
    """Servers that follow one run. Usable from several threads.

    Args:
        urls: of the servers, see :class:`~thinwire.engines.client.UpdateClient`.
        timeout: seconds to wait for the first server to serve a version.
        patience: seconds to wait for the others, once one serves it; also for those that cannot
            be reached yet, if they have never served anything.
        retry: seconds between two requests to a server that does not answer, for one version.
        token: sent to every server as a bearer token, if given.

    Raises:
        Misuse: no server, one named twice, or something that is no URL.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float = 600.0,
        patience: float = 30.0,
        retry: float = 1.0,
        token: str | None = None,
    ) -> None:
        if isinstance(urls, str) or not urls:
            raise Misuse(f"servers={urls!r} names no server", hint='give ["http://host:port"]')
        clients = [UpdateClient(url, timeout=timeout, token=token) for url in urls]
        if len({client.url for client in clients}) < len(clients):
            raise Misuse("a server is named twice")
        self._timeout, self._patience, self._retry = timeout, patience, retry
        self._changed = threading.Condition()
        self._target = -1
        self._closed = False
        self._servers = [_Server(client) for client in clients]
        self._threads: list[threading.Thread] = []

    @property
    def states(self) -> tuple[ServerState, ...]:
        """Every server, in the order given."""
        with self._changed:
            return tuple(
                ServerState(s.client.url, s.version, s.left_out, s.trouble) for s in self._servers
            )

    @property
    def live(self) -> tuple[str, ...]:
        """URLs of the servers that serve something and are not left out."""
        return tuple(s.url for s in self.states if s.version is not None and not s.left_out)

    def announce(self, version: int) -> None:
        """Have every server move to the version, without waiting for any."""
        with self._changed:
            if self._closed:
                raise Misuse("the fleet is closed")
            if version > self._target:
                self._target = version
                for server in self._servers:
                    server.refused = False  # that was another version
            self._changed.notify_all()
            if not self._threads:
                self._threads = [
                    threading.Thread(
                        target=self._keep_up, args=(s,), name="thinwire-server", daemon=True
                    )
                    for s in self._servers
                ]
                for thread in self._threads:
                    thread.start()

    def serve(self, version: int) -> tuple[str, ...]:
        """Announce the version and wait for it.

        Returns:
            URLs of the servers that serve it, or a later one.

        Raises:
            ServersBehind: not one of them does, ``timeout`` seconds on.
            ServerRefused: not one of them will.
        """
        self.announce(version)
        began = time.monotonic()
        until = began + self._timeout
        one_there = False
        with self._changed:
            while True:
                there = [s for s in self._servers if s.serves(version)]
                waiting = [s for s in self._servers if not s.serves(version) and not s.left_out]
                now = time.monotonic()
                if there and not one_there:
                    one_there, until = True, now + self._patience
                if there and (not waiting or now >= until):
                    for server in waiting:
                        passed = f"not at version {version} after {now - began:.0f} s"
                        server.leave_out(server.trouble or passed)
                    return tuple(s.client.url for s in there)
                if not there and now >= until:
                    raise ServersBehind(f"no server is at version {version}: {self._troubles()}")
                if all(s.refused for s in self._servers):
                    raise ServerRefused(f"no server takes version {version}: {self._troubles()}")
                self._changed.wait(until - now)

    def close(self) -> None:
        """Ask the servers that are behind once more, and wait ``patience`` seconds for answers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + self._patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _troubles(self) -> str:
        return "; ".join(s.trouble or f"{s.client.url}: no answer yet" for s in self._servers)

    # --- one thread per server ------------------------------------------------------------

    def _keep_up(self, server: _Server) -> None:
        while (target := self._next(server)) is not None:
            try:
                version = server.client.update(target)
            except ThinwireError as error:
                with self._changed:
                    refused = isinstance(error, ServerRefused)
                    server.fail(str(error), refused=refused and target == self._target)
                    self._changed.notify_all()
                    if self._closed:
                        return
                    self._rest(target)
                continue
            with self._changed:
                server.arrive(version, caught_up=version >= self._target)
                self._changed.notify_all()

    def _rest(self, target: int) -> None:
        """Until the target is to be tried again, or is another."""
        self._changed.wait_for(lambda: self._closed or self._target > target, self._retry)

    def _next(self, server: _Server) -> int | None:
        """The version that the server lacks, once there is one; None if none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not server.serves(self._target))
            return None if server.serves(self._target) else self._target


class _Server:
    def __init__(self, client: UpdateClient) -> None:
        self.client = client
        self.version: int | None = None
        self.left_out = False
        self.refused = False
        self.trouble = ""

    def serves(self, version: int) -> bool:
        return self.version is not None and self.version >= version

    def leave_out(self, trouble: str) -> None:
        self.left_out, self.trouble = True, trouble

    def fail(self, trouble: str, *, refused: bool) -> None:
        self.refused, self.trouble = refused, trouble
        if refused or self.version is not None:  # else it may be starting
            self.left_out = True

    def arrive(self, version: int, *, caught_up: bool) -> None:
        self.version, self.refused = version, False
        if caught_up:
            self.left_out, self.trouble = False, ""
