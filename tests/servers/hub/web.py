"""Requests, responses and routes: what an HTTP server is made of, without any socket."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = ["Handler", "HttpError", "Request", "Response", "Route", "Routes", "json_response"]


@dataclass(frozen=True)
class Request:
    """One request, its body read whole.

    Attributes:
        path: still percent-encoded, so that a ``%2F`` inside a key is not a slash.
        base: scheme and host as the client wrote them, such as ``http://127.0.0.1:8000``.
        headers: with lower-case names.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    base: str

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def byte_range(self, size: int) -> tuple[int, int] | None:
        """First byte and end (exclusive) of the ``Range`` header; None without one.

        Raises:
            HttpError: 416, the range starts at or behind the end.
        """
        header = self.headers.get("range")
        if header is None:
            return None
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", header)
        if match is None or int(match[1]) >= size:
            raise HttpError(416, f"cannot serve {header!r} of {size} bytes")
        return int(match[1]), min(int(match[2]) + 1, size) if match[2] else size


@dataclass
class Response:
    """What goes back. A body that is an iterator is streamed until it ends."""

    status: int = 200
    body: bytes | memoryview | Iterator[bytes] = b""
    content_type: str = "application/octet-stream"
    headers: dict[str, str] = field(default_factory=dict)


class HttpError(Exception):
    """A refusal; ``code`` is the Hub's ``X-Error-Code``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """As the Hub words it: a JSON body, and the same in headers for HEAD."""
        headers = {**self.headers, "X-Error-Message": self.message}
        if self.code is not None:
            headers["X-Error-Code"] = self.code
        return json_response({"error": self.message}, status=self.status, headers=headers)


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """``value`` as JSON."""
    body = json.dumps(value).encode()
    return Response(status, body, "application/json", dict(headers or {}))


Handler = Callable[..., Response]
"""Called with the state, the request and the route's groups, percent-decoded."""


@dataclass(frozen=True)
class Route:
    """One kind of request; ``kind`` is its name in statistics and faults."""

    kind: str
    method: str
    pattern: re.Pattern[str]
    handler: Handler


class Routes:
    """A list of routes, written as decorators. The first that matches is taken."""

    def __init__(self) -> None:
        self.all: list[Route] = []

    def add(self, kind: str, method: str, pattern: str) -> Callable[[Handler], Handler]:
        """Answer ``method`` on paths that match ``pattern`` whole."""

        def register(handler: Handler) -> Handler:
            self.all.append(Route(kind, method, re.compile(pattern), handler))
            return handler

        return register

    def find(self, method: str, path: str) -> tuple[Route, list[str]]:
        """The route and its groups, percent-decoded. Where there is none: one that says so."""
        for route in self.all:
            match = route.pattern.fullmatch(path) if route.method == method else None
            if match is not None:
                return route, [unquote(group or "") for group in match.groups()]
        return _NOWHERE, []


def _nowhere(state: object, request: Request) -> Response:
    raise HttpError(404, f"no route for {request.method} {request.path}")


_NOWHERE = Route("unknown", "", re.compile(""), _nowhere)
