"""Asking an SGLang server to move to a version that its mirror holds. Needs no torch.

The routes are SGLang's own (``python/sglang/srt/entrypoints/http_server.py``). Requests are held,
the cache is flushed, the version is written, and requests go on. The cache is flushed before, not
with the update: a flush that fails after an update ends the server, one that fails before it is
only refused, and nothing is computed in between.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from thinwire.engines.client import ServerRefused, ServerUnavailable
from thinwire.engines.sglang import LOAD_FORMAT
from thinwire.engines.sglang.account import account_file, read_account
from thinwire.engines.sglang.payload import serialize
from thinwire.errors import Misuse

__all__ = ["SGLangClient"]

_MODES = ("retract", "abort")
_ONE_ONLY = ("pp_size", "dp_size", "nnodes")


class SGLangClient:
    """One server on this host.

    Args:
        url: ``http://host:port``.
        mirror: the folder that the server was started with as ``THINWIRE_MIRROR``.
        mode: what becomes of requests under way: ``retract`` computes them anew after the update,
            ``abort`` ends them. Releases that cannot flush with retracted requests waiting refuse
            the first; those without a mode abort in any case.
        timeout: seconds without a byte of answer.
        token: sent as a bearer token, if given.

    Raises:
        Misuse: not such a URL, or mode.
    """

    def __init__(
        self,
        url: str,
        mirror: str | Path,
        *,
        mode: str = "retract",
        timeout: float = 300.0,
        token: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or mode not in _MODES:
            raise Misuse(f"not a server's URL, or mode: {url!r}, {mode!r}")
        secure = parts.scheme == "https"
        self._connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self.url, self._mirror, self._mode = url.rstrip("/"), mirror, mode
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def move(self, version: int) -> dict[str, Any]:
        """Have the server move to a version, the one that the mirror holds.

        Returns:
            ``version``, ``paused_s`` and the worker's own ``seconds``.

        Raises:
            ServerUnavailable: no answer: the server may have ended, or be at either version.
            ServerRefused: it will not, and serves on as before.
        """
        ranks = self._ranks()
        ask = secrets.randbits(62)
        began = time.perf_counter()
        with self._between(self._pause, lambda: self._do("/continue_generation", {})) as paused:
            if paused:
                self._flush()
            with self._between(self._begin, lambda: self._do("/end_weight_update", {})) as session:
                self._post(version, ask, ranks, flush=not paused, session=session)
            account = self._account(version, ask)
            self._name(version)
        paused_s = time.perf_counter() - began
        return {"version": version, "paused_s": paused_s, "seconds": account.get("seconds", {})}

    # --- steps ----------------------------------------------------------------------------

    def _ranks(self) -> int:
        status, text = self._ask("GET", "/server_info")
        if status == 404:  # older releases
            status, text = self._ask("GET", "/get_server_info")
        info = _document(text)
        ranks = info.get("tp_size")
        if status != 200 or type(ranks) is not int:
            raise ServerUnavailable(f"{self.url}: {status} instead of a server's description")
        for name in _ONE_ONLY:
            if info.get(name, 1) not in (1, None):
                raise ServerRefused(f"{self.url}: {name}={info[name]} is not supported")
        if info.get("speculative_algorithm"):
            raise ServerRefused(f"{self.url}: draft models are not supported")
        if LOAD_FORMAT not in (info.get("custom_weight_loader") or ()):
            hint = f"start it with --custom-weight-loader {LOAD_FORMAT}"
            raise ServerRefused(f"{self.url} does not know thinwire's loader", hint=hint)
        return ranks

    def _pause(self) -> bool:
        return self._do("/pause_generation", {"mode": self._mode}, optional=True)

    def _begin(self) -> bool:
        return self._do("/begin_weight_update", {"selector": "target"}, optional=True)

    def _flush(self) -> None:
        status, text = self._ask("POST", "/flush_cache", {})
        if status != 200 or not text.startswith("Cache flushed"):
            raise ServerUnavailable(
                f"{self.url}: the cache cannot be flushed: {text[:120]}",
                hint='requests are waiting: try again, or use mode="abort"',
            )

    def _post(self, version: int, ask: int, ranks: int, *, flush: bool, session: bool) -> None:
        payload = serialize({"thinwire.version": version, "thinwire.ask": ask})
        body: dict[str, Any] = {
            "serialized_named_tensors": [payload] * ranks,
            "load_format": LOAD_FORMAT,
            "flush_cache": flush,
        }
        if session:
            body["selector"] = "target"
        self._do("/update_weights_from_tensor", body)

    def _account(self, version: int, ask: int) -> dict[str, Any]:
        account = read_account(self._mirror, ask)
        if account is None:
            hint = "start server and follower on one host, with the same mirror"
            raise ServerRefused(f"{account_file(self._mirror)} has no account of it", hint=hint)
        if account["error"]:
            message = f"{self.url}: {account['error']}: {account['message']}"
            raise ServerRefused(message, hint=account["hint"] or None)
        if account["version"] != version:
            raise ServerRefused(f"{self.url} is at version {account['version']}")
        return account

    def _name(self, version: int) -> None:
        """Say which version serves; only now, since SGLang calls every outcome a success."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._do("/update_weight_version", body, optional=True)

    # --- requests -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _between(self, before: Callable[[], bool], after: Callable[[], object]) -> Iterator[bool]:
        """``after`` whatever happens, if ``before`` did something; the first error counts."""
        opened = before()
        try:
            yield opened
        except BaseException:
            if opened:
                with contextlib.suppress(ServerUnavailable, ServerRefused):
                    after()
            raise
        if opened:
            after()

    def _do(self, path: str, body: dict[str, Any], *, optional: bool = False) -> bool:
        """Whether the server has such a route, if that is optional."""
        status, text = self._ask("POST", path, body)
        if status == 404 and optional:
            return False
        if status == 200 and _document(text).get("success", True):
            return True
        message = f"{self.url}{path}: {status} {text[:200]}"
        raise ServerUnavailable(message) if status >= 500 else ServerRefused(message)

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, self._path + path, body=data, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{self.url}: {error!r}") from None
        finally:
            connection.close()


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
