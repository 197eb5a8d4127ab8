"""Who is asking: accounts with Hub tokens, and the short-lived tokens of the Xet store."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from servers.hub.web import HttpError, Request

__all__ = ["Access", "Account", "Scope", "parse_account"]

Scope = Literal["read", "write"]

ANONYMOUS_REFUSED = "Invalid username or password."
BAD_TOKEN = "Invalid credentials in Authorization header"  # huggingface_hub knows this sentence


@dataclass(frozen=True)
class Account:
    """A user: what it is called, which is its namespace, and what its token may do."""

    token: str
    name: str
    scope: Scope = "write"


def parse_account(text: str) -> Account:
    """``hf_token=name`` or ``hf_token=name:read``, as on the command line.

    Raises:
        ValueError: it is neither.
    """
    token, _, rest = text.partition("=")
    name, _, scope = rest.partition(":")
    if not token or not name or scope not in ("", "read", "write"):
        raise ValueError(f"not TOKEN=NAME or TOKEN=NAME:read: {text!r}")
    return Account(token, name, "read" if scope == "read" else "write")


@dataclass(frozen=True)
class _XetToken:
    bucket: str
    scope: Scope
    expires: float


class Access:
    """Accounts, and the Xet tokens that were given out.

    Args:
        accounts: who exists.
        ttl: seconds that a Xet token is good for.
    """

    def __init__(self, accounts: Iterable[Account], ttl: float) -> None:
        self.ttl = ttl
        self._accounts = {account.token: account for account in accounts}
        self._xet_tokens: dict[str, _XetToken] = {}
        self._lock = threading.Lock()

    def account(self, request: Request) -> Account | None:
        """Who sent the request; None without a token.

        Raises:
            HttpError: 401, nobody has that token.
        """
        header = request.headers.get("authorization")
        if header is None:
            return None
        account = self._accounts.get(header.removeprefix("Bearer "))
        if account is None:
            raise HttpError(401, BAD_TOKEN)
        return account

    def give_xet_token(self, bucket: str, scope: Scope) -> tuple[str, int]:
        """A new token for the Xet store, and its expiry in seconds since 1970."""
        token = f"xet_{scope}_{secrets.token_hex(12)}"
        expires = time.time() + self.ttl
        with self._lock:
            self._xet_tokens[token] = _XetToken(bucket, scope, expires)
        return token, int(expires)

    def revoke_xet_tokens(self) -> None:
        """Every Xet token given out so far ends now, whatever its expiry says."""
        with self._lock:
            self._xet_tokens.clear()

    def check_xet_token(self, request: Request, scope: Scope) -> None:
        """Refuse a request to the Xet store that may not be made.

        Raises:
            HttpError: 401 without a valid token, 403 if it may only read.
        """
        header = request.headers.get("authorization", "")
        with self._lock:
            token = self._xet_tokens.get(header.removeprefix("Bearer "))
        if token is None or token.expires < time.time():
            raise HttpError(401, "the Xet token is missing, unknown or expired")
        if scope == "write" and token.scope != "write":
            raise HttpError(403, "this Xet token may only read")
