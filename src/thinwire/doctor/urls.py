"""Other places near a bucket, from its URL alone: one inside it, and one that should not exist."""

from __future__ import annotations

import os
import re

__all__ = ["missing_sibling", "nested"]

_REMOTE = re.compile(r"(?P<scheme>s3|gs|az)://[^/?]+", re.IGNORECASE)
_HUB = re.compile(r"(?P<scheme>hf)://buckets/(?P<owner>[^/?]+)/[^/?]+", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def nested(url: str, folder: str) -> str:
    """The URL of ``folder`` under the prefix that ``url`` names; what follows a ``?`` is kept."""
    if _REMOTE.match(url) or _HUB.match(url):
        place, mark, query = url.partition("?")
        return f"{place.rstrip('/')}/{folder}{mark}{query}"
    if _SCHEME.match(url):
        return url + folder if url.endswith("://") else f"{url.rstrip('/')}/{folder}"
    return os.path.join(url, folder)


def missing_sibling(url: str, name: str) -> str | None:
    """The URL of a bucket called ``name`` at the same place; None where there is no such thing.

    A sibling of a folder is beside it, one of a Hugging Face bucket has the same owner.
    """
    query = "?" + url.partition("?")[2] if "?" in url else ""
    if found := _REMOTE.match(url):
        return f"{found['scheme']}://{name}/{query}"
    if found := _HUB.match(url):
        return f"{found['scheme']}://buckets/{found['owner']}/{name}{query}"
    if url.lower().startswith("memory://"):
        return None
    return os.path.join(os.path.dirname(url.rstrip("/")), name)
