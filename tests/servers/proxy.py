"""An HTTP/1.1 proxy in front of a real server that fails on schedule.

    with FaultyProxy("127.0.0.1", server_port) as proxy:
        proxy.lose("PUT", "*/commits/*").slow(10_000, "GET", "*/deltas/*")
        ... a client pointed at proxy.url ...
        assert not proxy.unfired

A client takes the proxy for the server: its requests go to the upstream as they are, Host header
included, which signatures cover. As in :mod:`thinwire.testing.faults`, every method that adds a
fault takes patterns (:mod:`fnmatch`) for the method and for the target, which is path and query
as they stand in the request line; ``times`` (None: always), ``skip``, and ``holding``: bytes that
must be in the first 64 KiB of the request's body. Faults strike in the order in which they were
added; one that ends the request leaves the later ones for the next.
"""

from __future__ import annotations

import asyncio
import fnmatch
import http
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from servers.proxy_http import (
    BLOCK,
    MAX_HEAD,
    BadMessage,
    Framing,
    Head,
    Stream,
    pieces,
    read_head,
    write_pieces,
)

__all__ = ["FaultyProxy", "Request"]

End = Literal["hang", "reset", "answer", "cut", "lose"]
Change = Callable[[AsyncIterator[bytes], Framing], AsyncIterator[bytes]]


@dataclass
class Request:
    """A request that came, in the order of coming.

    Attributes:
        method, target: of the request line.
        status: what the client was answered; None as long as, or if, it was not.
        sent, received: bytes of the request's body from the client, and of the response's to it.
        faults: what struck it.
    """

    method: str
    target: str
    status: int | None = None
    sent: int = 0
    received: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass
class _Plan:
    """What will happen to one request."""

    wait: float = 0.0
    wait_after: float = 0.0
    rate: float | None = None
    copies: int = 1
    end: End | None = None
    answer: bytes = b""
    status: int = 0
    cut_at: int = 0


@dataclass
class _Fault:
    name: str
    method: str
    target: str
    times: int | None
    skip: int
    holding: bytes
    plan: Callable[[_Plan], None] | None = None
    change: Change | None = None
    fired: int = 0

    def matches(self, request: Request, start: bytes) -> bool:
        return (
            fnmatch.fnmatchcase(request.method, self.method)
            and fnmatch.fnmatchcase(request.target, self.target)
            and self.holding in start
        )

    def take(self) -> bool:
        """Whether the fault strikes this matching request."""
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None and self.fired >= self.times:
            return False
        self.fired += 1
        return True


class FaultyProxy:
    """Listens on a free port of 127.0.0.1 from the start until :meth:`close`.

    Attributes:
        port, url: where it listens.
        requests: every request that has come, whatever became of it.
    """

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self.requests: list[Request] = []
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        self._connections: set[asyncio.Task[None]] = set()
        self._broken: list[BaseException] = []
        self._loop = asyncio.new_event_loop()
        ready: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="proxy", daemon=True)
        self._thread.start()
        self.port = ready.result(30)
        self.url = f"http://127.0.0.1:{self.port}"

    # --- the schedule ----------------------------------------------------------------------

    def answer(
        self,
        status: int,
        method: str = "*",
        target: str = "*",
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        times: int | None = 1,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Answer by itself: the upstream never sees the request."""
        reason = http.HTTPStatus(status).phrase  # clients quote it, and some read it
        lines = [f"HTTP/1.1 {status} {reason}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        data = "\r\n".join([*lines, "", ""]).encode("latin-1") + body

        def plan(to: _Plan) -> None:
            to.end, to.answer, to.status = "answer", data, status

        return self._add(f"answer {status}", method, target, times, skip, holding, plan)

    def reset(
        self,
        method: str = "*",
        target: str = "*",
        *,
        times: int | None = 1,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Reset the connection; the upstream never sees the request."""
        return self._add("reset", method, target, times, skip, holding, _ending("reset"))

    def hang(
        self,
        method: str = "*",
        target: str = "*",
        *,
        times: int | None = 1,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Neither pass the request on nor answer, for as long as the client waits."""
        return self._add("hang", method, target, times, skip, holding, _ending("hang"))

    def cut(
        self,
        after: int,
        method: str = "*",
        target: str = "*",
        *,
        times: int | None = 1,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Reset both connections once ``after`` bytes of the request's body have passed."""

        def plan(to: _Plan) -> None:
            to.end, to.cut_at = "cut", after

        return self._add("cut", method, target, times, skip, holding, plan)

    def lose(
        self,
        method: str = "*",
        target: str = "*",
        *,
        times: int | None = 1,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Let the upstream act, then reset the client's connection in place of the response."""
        return self._add("lose", method, target, times, skip, holding, _ending("lose"))

    def duplicate(
        self,
        method: str = "*",
        target: str = "*",
        *,
        times: int | None = 1,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Deliver the request twice, one after the other; the client gets the second response."""

        def plan(to: _Plan) -> None:
            to.copies = 2

        return self._add("duplicate", method, target, times, skip, holding, plan)

    def delay(
        self,
        seconds: float,
        method: str = "*",
        target: str = "*",
        *,
        after: bool = False,
        times: int | None = None,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Wait before the request is passed on, or between its effect and the response.

        It is passed on even if the client has given up meanwhile.
        """

        def plan(to: _Plan) -> None:
            if after:
                to.wait_after += seconds
            else:
                to.wait += seconds

        return self._add("delay", method, target, times, skip, holding, plan)

    def slow(
        self,
        rate: float,
        method: str = "*",
        target: str = "*",
        *,
        times: int | None = None,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Pass bodies on at ``rate`` bytes per second, each way."""

        def plan(to: _Plan) -> None:
            to.rate = rate

        return self._add("slow", method, target, times, skip, holding, plan)

    def corrupt(
        self,
        method: str = "*",
        target: str = "*",
        *,
        at: int = 0,
        times: int | None = None,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """Flip the lowest bit of the byte at ``at`` of a response's body.

        Strikes bodies of successful responses only. A negative ``at`` counts from the end, in
        bodies that come with a length; a body without that byte passes as it is.
        """

        async def change(body: AsyncIterator[bytes], framing: Framing) -> AsyncIterator[bytes]:
            index = at if at >= 0 else framing.size + at
            async for piece in body:
                if 0 <= index < len(piece):
                    piece = b"%b%c%b" % (piece[:index], piece[index] ^ 1, piece[index + 1 :])
                index -= len(piece)
                yield piece

        return self._add("corrupt", method, target, times, skip, holding, change=change)

    def truncate(
        self,
        method: str = "*",
        target: str = "*",
        *,
        at: int = 0,
        times: int | None = None,
        skip: int = 0,
        holding: bytes = b"",
    ) -> FaultyProxy:
        """End a successful response's body before the byte at ``at``, by closing the connection.

        What the head announced, length or chunks, stays as it was.
        """

        async def change(body: AsyncIterator[bytes], _: Framing) -> AsyncIterator[bytes]:
            left = at
            async for piece in body:
                if left:
                    yield piece[:left]
                left -= min(left, len(piece))
                if not left:
                    raise _CutShort

        return self._add("truncate", method, target, times, skip, holding, change=change)

    def heal(self) -> FaultyProxy:
        """Forget every fault; ``requests`` stays."""
        with self._lock:
            self._faults.clear()
        return self

    @property
    def unfired(self) -> tuple[str, ...]:
        """Faults that have not struck yet. A test whose faults never strike tests nothing."""
        with self._lock:
            return tuple(f"{f.name} {f.method} {f.target}" for f in self._faults if not f.fired)

    def _add(
        self,
        name: str,
        method: str,
        target: str,
        times: int | None,
        skip: int,
        holding: bytes,
        plan: Callable[[_Plan], None] | None = None,
        change: Change | None = None,
    ) -> FaultyProxy:
        with self._lock:
            self._faults.append(_Fault(name, method, target, times, skip, holding, plan, change))
        return self

    # --- life ------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop listening, and reset what is under way.

        Raises:
            What the proxy itself failed with: a test through a broken proxy tests nothing.
        """
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)
        if self._broken:
            raise self._broken[0]

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, ready: Future[int]) -> None:
        try:
            self._loop.run_until_complete(self._listen(ready))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise
        finally:
            self._loop.close()

    async def _listen(self, ready: Future[int]) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, backlog=512, limit=MAX_HEAD
        )
        ready.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(Stream(reader, writer)))
        self._connections.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broken.append(error)

    # --- one connection, one request after the other ----------------------------------------

    async def _serve(self, client: Stream) -> None:
        try:
            while (head := await read_head(client.reader)) is not None:
                if not await self._request(client, head):
                    break
            await client.finish()
        except (OSError, asyncio.CancelledError):
            client.reset()

    async def _request(self, client: Stream, head: Head) -> bool:
        """Pass one request on; whether the connection can take another."""
        request = Request(*head.start[:2])
        with self._lock:
            self.requests.append(request)
        body = _Body(client, head, request)
        if self._wants_bodies():
            await body.peek()
        plan = self._planned(request, body.start)
        if plan.copies > 1:
            await body.peek()
        await asyncio.sleep(plan.wait)
        if plan.end == "hang":
            await client.reader.read()  # until the client leaves
        if plan.end in ("hang", "reset"):
            client.reset()
            return False
        if plan.end == "answer":
            return await self._answer(client, head, body, plan, request)
        for _ in range(plan.copies - 1):
            await self._forward(None, head, body, plan, request)
        return await self._forward(client, head, body, plan, request)

    def _wants_bodies(self) -> bool:
        with self._lock:
            return any(fault.holding for fault in self._faults)

    def _planned(self, request: Request, start: bytes) -> _Plan:
        plan = _Plan()
        with self._lock:
            for fault in self._faults:
                if fault.plan and fault.matches(request, start) and fault.take():
                    request.faults.append(fault.name)
                    fault.plan(plan)
                    if plan.end is not None:
                        break
        return plan

    def _changes(self, request: Request, start: bytes) -> list[Change]:
        changes = []
        with self._lock:
            for fault in self._faults:
                if fault.change and fault.matches(request, start) and fault.take():
                    request.faults.append(fault.name)
                    changes.append(fault.change)
        return changes

    async def _answer(
        self, client: Stream, head: Head, body: _Body, plan: _Plan, request: Request
    ) -> bool:
        if head.get("expect"):
            await client.send(plan.answer)  # the client holds its body back: it is never read
        else:
            async for _ in _paced(body.pieces(), plan.rate):
                pass
            await client.send(plan.answer)
        request.status = plan.status
        return not (head.get("expect") or head.ends_connection())

    async def _forward(
        self, client: Stream | None, head: Head, body: _Body, plan: _Plan, request: Request
    ) -> bool:
        """One delivery to the upstream; without a client its response goes nowhere."""
        upstream = await Stream.to(*self._upstream)
        sending = asyncio.ensure_future(self._send(upstream, head, body, plan))
        try:
            answer = await self._answered(sending, upstream, client)
            framing = answer.response_framing(request.method)
            response = pieces(upstream.reader, framing)
            if client is None or plan.end == "lose":
                async for _ in response:
                    pass
                await sending
                if client is not None:
                    client.reset()
                return False
            await asyncio.sleep(plan.wait_after)
            request.status = answer.status
            if answer.status // 100 == 2 and framing.kind != "none":
                for change in self._changes(request, body.start):
                    response = change(response, framing)
            await client.send(answer.raw)
            paced = _counted(_paced(response, plan.rate), request)
            try:
                await write_pieces(client, framing, paced)
            except _CutShort:
                return False
            # a response that comes early leaves a body that nobody will read
            whole = sending.done() and not sending.exception()
            return whole and not (
                framing.kind == "close" or head.ends_connection() or answer.ends_connection()
            )
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            upstream.close()

    async def _answered(
        self, sending: asyncio.Future[None], upstream: Stream, client: Stream | None
    ) -> Head:
        """The final head of the response; interim ones (100 Continue) go to the client at once.

        Raises:
            BadMessage: the upstream gave none.
            ConnectionError: what ended the sending.
        """
        while True:
            reading = asyncio.ensure_future(read_head(upstream.reader))
            try:
                if not sending.done():
                    await asyncio.wait((reading, sending), return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and isinstance(sending.exception(), (_CutShort, BadMessage)):
                    upstream.reset()
                    raise BadMessage("a request that ends in the middle")
                answer = await reading
            finally:
                reading.cancel()
            if answer is None:
                raise BadMessage("the upstream closed without a response")
            if answer.status >= 200:
                return answer
            if client is not None:
                await client.send(answer.raw)

    async def _send(self, upstream: Stream, head: Head, body: _Body, plan: _Plan) -> None:
        await upstream.send(head.raw)
        paced = _paced(body.pieces(keep=plan.copies > 1), plan.rate)
        if plan.end == "cut":
            paced = _cut(paced, plan.cut_at)
        await write_pieces(upstream, body.framing, paced)


class _CutShort(Exception):
    """A body that ends here, on schedule."""


class _Body:
    """A request's body: read from the client as it is wanted, and again if it was kept."""

    def __init__(self, client: Stream, head: Head, request: Request) -> None:
        self._client, self._head, self._request = client, head, request
        self.framing = head.request_framing()
        self._source = pieces(client.reader, self.framing)
        self._kept: list[bytes] = []
        self.start = b""

    async def peek(self) -> None:
        """Read the first 64 KiB ahead. The client is told to go on, whatever the upstream says."""
        if self._head.get("expect") and self.framing.kind != "none":
            await self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        while sum(map(len, self._kept)) < BLOCK:
            piece = await anext(self._source, b"")
            if not piece:
                break
            self._request.sent += len(piece)
            self._kept.append(piece)
        self.start = b"".join(self._kept)

    async def pieces(self, *, keep: bool = False) -> AsyncIterator[bytes]:
        for piece in tuple(self._kept):
            yield piece
        async for piece in self._source:
            self._request.sent += len(piece)
            if keep:
                self._kept.append(piece)
            yield piece


def _ending(end: End) -> Callable[[_Plan], None]:
    def plan(to: _Plan) -> None:
        to.end = end

    return plan


async def _paced(body: AsyncIterator[bytes], rate: float | None) -> AsyncIterator[bytes]:
    """The body at ``rate`` bytes per second, in ten steps a second."""
    async for piece in body:
        if rate is None:
            yield piece
            continue
        step = max(1, int(rate / 10))
        for start in range(0, len(piece), step):
            part = piece[start : start + step]
            await asyncio.sleep(len(part) / rate)
            yield part


async def _counted(body: AsyncIterator[bytes], request: Request) -> AsyncIterator[bytes]:
    async for piece in body:
        request.received += len(piece)
        yield piece


async def _cut(body: AsyncIterator[bytes], at: int) -> AsyncIterator[bytes]:
    async for piece in body:
        if len(piece) >= at:
            yield piece[:at]
            raise _CutShort
        at -= len(piece)
        yield piece
    raise _CutShort
