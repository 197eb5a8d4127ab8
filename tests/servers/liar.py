"""A server that says whatever a test wants a store to say, byte for byte."""

from __future__ import annotations

import contextlib
import socket
import threading

__all__ = ["Liar", "answer", "error"]


class Liar:
    """Gives ``answers`` in turn, each on a connection of its own, and the last one for ever.

    Attributes:
        requests: what was asked, up to the end of each request's header.
    """

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                head = b""
                while b"\r\n\r\n" not in head and (got := connection.recv(65536)):
                    head += got
                self.requests.append(head)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                connection.sendall(answer)

    def __enter__(self) -> Liar:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def answer(status: int, body: bytes = b"", length: int | None = None, **headers: str) -> bytes:
    """A response in bytes; underscores in the names of ``headers`` stand for hyphens."""
    headers = {
        "Content-Length": str(len(body) if length is None else length),
        "Connection": "close",
        "ETag": '"abc"',
        "Last-Modified": "Sun, 29 Nov 2026 22:22:31 GMT",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"HTTP/1.1 {status} x", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error(code: str) -> bytes:
    """The body of a store's refusal."""
    return f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
