"""What a server's answers mean to the client, when they make no sense."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from thinwire.engines.client import ServerRefused, ServerUnavailable, UpdateClient
from thinwire.errors import Misuse

WHOLE = {"version": 1, "exact": True, "tensors": 2, "differs": [], "not_compared": []}


class Odd:
    """A server that answers everything with one status and document."""

    def __init__(self) -> None:
        self.status, self.document = 200, {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805
                data = json.dumps(self.document).encode()
                handler.send_response(self.status)
                handler.send_header("Content-Type", "application/json")
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

            do_POST = do_GET  # noqa: N815

            def log_message(handler, *_: Any) -> None:  # noqa: N805
                return

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.client = UpdateClient(f"http://127.0.0.1:{self.http.server_port}", timeout=10)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def odd() -> Iterator[Odd]:
    odd = Odd()
    yield odd
    odd.http.shutdown()
    odd.http.server_close()


@pytest.mark.parametrize(
    "change",
    [{"exact": 1}, {"exact": None}, {"tensors": "2"}, {"differs": "x"}, {"version": None}],
)
def test_an_attestation_has_to_be_whole(odd: Odd, change: dict[str, Any]) -> None:
    odd.document = WHOLE
    assert odd.client.attest() == WHOLE
    odd.document = {**WHOLE, **change}
    with pytest.raises(ServerRefused):
        odd.client.attest()


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, ServerRefused), (404, ServerRefused), (409, ServerRefused), (429, ServerUnavailable),
     (500, ServerUnavailable), (503, ServerUnavailable)],
)  # fmt: skip
def test_statuses(odd: Odd, status: int, error: type[Exception]) -> None:
    odd.status = status
    for ask in (odd.client.attest, odd.client.status, odd.client.heal, lambda: odd.client.move(1)):
        with pytest.raises(error):
            ask()


@pytest.mark.parametrize("document", [{"version": None}, {"version": 3, "poisoned": "half"}])
def test_no_version_is_known_while_it_serves_nothing(odd: Odd, document: dict[str, Any]) -> None:
    odd.document = document
    assert odd.client.version() is None
    odd.document = {"version": 3, "poisoned": ""}
    assert odd.client.version() == 3


@pytest.mark.parametrize("url", ["http://h:port", "http://h:99999", "http://[::1", "h:1"])
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(Misuse, match="not a server's URL"):
        UpdateClient(url)
