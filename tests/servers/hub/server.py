"""The sockets: HTTP/1.1 on 127.0.0.1, one thread per connection."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import cast

from servers.hub import bucket_api, cas_api, control, s3_api
from servers.hub.hub import Hub
from servers.hub.web import HttpError, Request, Response, Routes

__all__ = ["HubServer"]

ROUTES = Routes()
for part in (control, bucket_api, cas_api, s3_api):
    ROUTES.all += part.routes.all


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer waits 40 ms for a delayed acknowledgement
    wbufsize = 1 << 16

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        hub = cast(HubServer, self.server).hub
        request = self._request()
        route, groups = ROUTES.find(request.method, request.path)
        kind = route.kind
        hub.stats.count(kind, requests=1, received=len(request.body))
        try:
            if kind != "control":
                hub.faults.refuse(kind)
            response = route.handler(hub, request, *groups)
        except HttpError as error:
            response = error.response()
        except (KeyError, ValueError) as error:  # a body that is not what the route expects
            response = HttpError(400, f"malformed request: {error!r}").response()
        try:
            sent = self._send(response)
        except OSError:  # the client went away, which is its right
            self.close_connection = True
        else:
            hub.stats.count(kind, sent=sent)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def _request(self) -> Request:
        headers = {name.lower(): value for name, value in self.headers.items()}
        base = f"http://{headers.get('host', '127.0.0.1')}"
        return Request(self.command, self.path, headers, self._body(), base)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, response: Response) -> int:
        """Send it; the bytes of the body."""
        body = response.body
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        for name, value in response.headers.items():
            self.send_header(name, value)
        if not isinstance(body, (bytes, memoryview)):
            self.send_header("Connection", "close")
            self.end_headers()
            sent = 0
            for piece in body:
                self.wfile.write(piece)
                self.wfile.flush()
                sent += len(piece)
            return sent
        if "Content-Length" not in response.headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()
        return 0 if self.command == "HEAD" else len(body)


class HubServer(ThreadingHTTPServer):
    """A Hub that listens. Use it with ``with``: it serves from threads of this process.

    Args:
        hub: what is served.
        port: 0 takes a free one.

    Attributes:
        url: what ``HF_ENDPOINT`` is to be; the S3 gateway is at ``<url>/s3``.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Hub, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Connection)
        self.hub = hub
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread: threading.Thread | None = None

    def __enter__(self) -> HubServer:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.shutdown()
        self.server_close()
        if self._thread is not None:
            self._thread.join()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about a client that went away; anything else is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def started(self) -> str:
        """One line of JSON that says where it is."""
        return json.dumps({"url": self.url})
