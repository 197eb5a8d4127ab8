"""Asking a serving engine to move to a version: the routes of thinwire's vLLM plugin.

See :mod:`thinwire.engines.vllm.routes` for the other end. Needs neither torch nor vLLM.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from thinwire.errors import Misuse, Retryable, Stop

__all__ = ["ServerRefused", "ServerUnavailable", "UpdateClient"]

_UPDATE, _STATUS = "/thinwire/update", "/thinwire/status"
_ATTEST, _HEAL = "/thinwire/attest", "/thinwire/heal"
_POISONED = "EnginePoisoned"


class ServerUnavailable(Retryable):
    """A server does not answer, or cannot serve the version yet."""

    default_hint = "see the server's log"


class ServerRefused(Stop):
    """A server answered that it will not do what it was asked."""

    default_hint = "see the server's log; it serves on as before"


class UpdateClient:
    """One server. Usable from several threads: every request has its own connection.

    Args:
        url: ``http://host:port``, or with https, and with a path before thinwire's routes.
        timeout: seconds without a byte of answer. An update answers when the version serves.
        token: sent as a bearer token, if given.

    Raises:
        Misuse: not such a URL.
    """

    def __init__(self, url: str, *, timeout: float = 300.0, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._connect, self._host, self._port, self._path = _parts(url)
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def update(self, version: int) -> int:
        """Have the server move to a version; returns the one it serves, at least that.

        Raises:
            As for :meth:`move`.
        """
        return _served(self.move(version))

    def move(self, version: int) -> dict[str, Any]:
        """Have the server move to a version, and tell what it took.

        An engine that an earlier update left half-changed is healed from its mirror first.

        Returns:
            ``version``: that it serves, at least the one asked for; ``moved``; ``healed``; and,
            if it moved, seconds: ``stage_s``, ``paused_s``, ``apply_s``.

        Raises:
            ServerUnavailable: no answer, or the server is not ready for it.
            ServerRefused: it will not.
        """
        status, answer = self._ask("POST", _UPDATE, {"version": version})
        healed = _kind(answer) == _POISONED
        if healed:
            self.heal()
            status, answer = self._ask("POST", _UPDATE, {"version": version})
        if status != 200 and (served := self.version()) is not None and served >= version:
            # it was beyond that version already
            return {"version": served, "moved": False, "healed": healed}
        answer = self._checked(status, answer)
        _served(answer)
        return {"moved": True, **answer, "healed": healed}

    def version(self) -> int | None:
        """The version that the server serves; None if that is not known, or it serves nothing.

        Raises:
            ServerUnavailable, ServerRefused: no answer, or one that makes no sense.
        """
        answer = self.status()
        if answer.get("poisoned") or answer.get("version") is None:
            return None
        return _served(answer)

    def status(self) -> dict[str, Any]:
        """The server's own account: version, poisoned, seconds, ranks.

        Raises:
            ServerUnavailable, ServerRefused: no answer, or one that makes no sense.
        """
        return self._checked(*self._ask("GET", _STATUS))

    def attest(self) -> dict[str, Any]:
        """Have the server read every weight back and compare it with its version's digests.

        Returns:
            ``version``, ``exact``, ``tensors`` (how many were compared), and names: ``differs`` and
            ``not_compared``.

        Raises:
            ServerUnavailable, ServerRefused: no answer, or one that makes no sense.
        """
        answer = self._checked(*self._ask("POST", _ATTEST, {}))
        _served(answer)
        kinds = {"exact": bool, "tensors": int, "differs": list, "not_compared": list}
        if any(type(answer.get(key)) is not kind for key, kind in kinds.items()):
            raise ServerRefused(f"{self.url}: no attestation: {str(answer)[:80]}")
        return answer

    def heal(self) -> int:
        """Have the server write everything from its mirror and prove it; returns its version.

        Raises:
            ServerUnavailable, ServerRefused: no answer, or it serves nothing.
        """
        return _served(self._checked(*self._ask("POST", _HEAL, {})))

    # --- requests -------------------------------------------------------------------------

    def _checked(self, status: int, answer: dict[str, Any]) -> dict[str, Any]:
        if status == 200:
            return answer
        error = answer.get("error")
        told = error if isinstance(error, dict) else {}
        if status == 401:
            raise ServerRefused(
                f"{self.url} wants its API key", hint="give the key that vLLM was started with"
            )
        if status == 404:
            raise ServerRefused(
                f"{self.url} has no thinwire routes",
                hint="start vLLM with thinwire installed and VLLM_PLUGINS=thinwire",
            )
        what = ServerUnavailable if status in (408, 429) or status >= 500 else ServerRefused
        message = f"{self.url}: {status} {told.get('type', '')} {told.get('message', '')}"
        raise what(" ".join(message.split()), hint=str(told.get("hint") or "") or None)

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, self._path + path, body=data, headers=self._headers)
            response = connection.getresponse()
            answer = json.loads(response.read() or b"{}") if _is_json(response) else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerUnavailable(f"{self.url}: {error!r}") from None
        finally:
            connection.close()
        return response.status, answer if isinstance(answer, dict) else {}


def _parts(url: str) -> tuple[type[http.client.HTTPConnection], str, int | None, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Misuse(f"not a server's URL: {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise Misuse(f"not a server's URL: {url!r}", hint="write http://host:port")
    secure = parts.scheme == "https"
    connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    return connect, parts.hostname, port, parts.path.rstrip("/")


def _is_json(response: http.client.HTTPResponse) -> bool:
    return response.headers.get_content_type() == "application/json"


def _kind(answer: dict[str, Any]) -> object:
    error = answer.get("error")
    return error.get("type") if isinstance(error, dict) else None


def _served(answer: dict[str, Any]) -> int:
    version = answer.get("version")
    if type(version) is not int:
        raise ServerRefused(f"the server's answer names no version: {str(answer)[:80]}")
    return version
