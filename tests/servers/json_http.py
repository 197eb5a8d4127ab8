"""An HTTP server that answers with JSON, for tests that put something real behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Answer", "JsonServer"]

Answer = Callable[[str, str, bytes, "str | None"], "tuple[int, Any]"]
"""From method, path, body and the Authorization header to a status and a document."""


class JsonServer:
    """Answers on 127.0.0.1 from when it is made until ``stop``; each request in a thread."""

    def __init__(self, port: int, answer: Answer) -> None:
        self._http = _Http(("127.0.0.1", port), _Handler)
        self._http.answer = answer
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Close the port; requests under way end by themselves."""
        self._http.shutdown()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    answer: Answer


class _Handler(BaseHTTPRequestHandler):
    server: _Http

    def do_GET(self) -> None:
        self._reply("GET", b"")

    def do_POST(self) -> None:
        self._reply("POST", self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _reply(self, method: str, body: bytes) -> None:
        key = self.headers.get("Authorization")
        status, document = self.server.answer(method, self.path, body, key)
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        return
