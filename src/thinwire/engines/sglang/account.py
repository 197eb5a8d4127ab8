"""A server's account of what it was last asked, in a file beside its mirror.

SGLang tells nobody what a custom loader found: its answer is "success", or the end of the server.
So rank 0 writes the outcome down, under the number that the request carried, and whoever asked
reads it. This is why server and follower share a host.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["account_file", "read_account", "write_account"]


def account_file(mirror: str | Path) -> Path:
    """Where the account of the server that uses this mirror is."""
    path = Path(mirror).absolute()
    return path.with_name(path.name + ".sglang.json")


def write_account(mirror: str | Path, account: dict[str, Any]) -> None:
    """Replace the account in one step."""
    path = account_file(mirror)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(account), encoding="utf-8")
    fresh.replace(path)


def read_account(mirror: str | Path, ask: int) -> dict[str, Any] | None:
    """The account of request ``ask``; None if the last one is of another, or there is none."""
    try:
        account = json.loads(account_file(mirror).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return account if isinstance(account, dict) and account.get("ask") == ask else None
