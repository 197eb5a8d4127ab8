"""JSON over HTTP/1.1 on the loopback interface, for callers that hold the token.

Knows nothing about models: a table of routes maps (method, path) to functions of the request's
body that return JSON-able values or raise :class:`~thinwire.demo.completions.ApiError`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from thinwire.demo.completions import ApiError

__all__ = ["ApiServer", "Routes"]

Routes = Mapping[tuple[str, str], Callable[[bytes], Any]]

_DRAIN = 8 << 20


class ApiServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1 and a free port; every request must carry ``Bearer <token>``.

    Args:
        routes: (method, path) to a function of the body.
        token: the secret.
        max_body: bytes of a body that are read.
    """

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, routes: Routes, token: str, max_body: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.routes = routes
        self.max_body = max_body
        self.authorization = f"Bearer {token}".encode()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection broke: that is the caller's business unless it was our error."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer
    protocol_version = "HTTP/1.1"
    server_version = "thinwire-demo"
    sys_version = ""
    timeout = 60
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_POST  # noqa: N815 - http.server's

    def _answer(self) -> None:
        self._unread = -1
        try:
            self._send(200, self._result())
        except ApiError as error:
            self._refuse(error)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - one request must not end the server
            traceback.print_exc()
            self._refuse(ApiError(500, "internal", "internal error; see the server's log"))

    def _result(self) -> Any:
        length = self._length()
        self._unread = length
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.server.authorization):
            raise ApiError(401, "unauthorized", "this needs the header Authorization: Bearer TOKEN")
        path = self.path.partition("?")[0]
        function = self.server.routes.get((self.command, path))
        if function is None:
            methods = sorted(m for m, p in self.server.routes if p == path)
            if methods:
                raise ApiError(405, "method_not_allowed", f"{path} takes {', '.join(methods)}")
            known = ", ".join(f"{m} {p}" for m, p in self.server.routes)
            raise ApiError(404, "not_found", f"there is no {path[:80]}; known: {known}")
        if length > self.server.max_body:
            raise ApiError(413, "too_large", f"a body may have {self.server.max_body} bytes")
        body = self.rfile.read(length)
        self._unread = length - len(body)
        if self._unread:
            raise ApiError(400, "invalid_request", "the body is shorter than its Content-Length")
        return function(body)

    def _length(self) -> int:
        if self.headers.get("Transfer-Encoding"):
            raise ApiError(411, "length_required", "send a Content-Length, not chunks")
        text = self.headers.get("Content-Length")
        if text is None:
            if self.command == "POST":
                raise ApiError(411, "length_required", "send a Content-Length")
            return 0
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise ApiError(400, "invalid_request", "the Content-Length is not a number")
        return int(text)

    def _refuse(self, error: ApiError) -> None:
        if self._unread:
            # a body nobody read would be taken for the next request; closing on unread bytes resets
            # the connection before the caller has seen the answer, so take some of them first
            self.close_connection = True
            self.connection.settimeout(2)
            left = min(max(self._unread, 0), _DRAIN)
            with contextlib.suppress(OSError):
                while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
                    left -= len(piece)
        self._send(error.status, error.body())

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Successful requests are many and all alike: only refusals are logged."""
        if str(code) != "200":
            super().log_request(code, size)
