"""Listing by any prefix, in key order, from stores that list by folder and in an order of theirs.

obstore lists whole path segments only: ``commits/00`` is a folder to it. So the folder around the
prefix is listed and the rest left out; where the store lists in key order, reading starts just
before the prefix and stops behind it.

Not every store does. SeaweedFS 4.48, for one, walks its folders: ``a/b`` comes before ``a-b``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.bucket.base import ObjectInfo, check_key
from thinwire.errors import BucketUnavailable, InvalidKey

__all__ = ["Listing", "by_key", "listing_of"]

_REPORT = "report the store's name"


@dataclass(frozen=True)
class Listing:
    """What to ask a store for.

    Attributes:
        folder: whose objects to list, without a slash at its end; "" is the whole bucket.
        offset: only what comes after it in key order, or None for everything.
    """

    folder: str
    offset: str | None


def listing_of(inside: str, prefix: str, *, in_order: bool) -> Listing | None:
    """How to list the keys that start with ``prefix``; None if no key can.

    Args:
        inside: what precedes every key in the store: empty, or ends with a slash.
        prefix: any text.
        in_order: the store lists in key order.
    """
    folder, slash, start = prefix.rpartition("/")
    if slash and not _is_key(folder):
        return None
    if start and not _is_key(start):
        return None
    # One character short of the prefix comes before all that starts with it, and only just.
    offset = inside + prefix[:-1] if in_order and len(start) > 1 else None
    return Listing((inside + folder).rstrip("/"), offset)


def by_key(
    found: Iterator[tuple[str, int]], inside: str, prefix: str, *, in_order: bool
) -> Iterator[ObjectInfo]:
    """The objects under ``inside`` whose keys start with ``prefix``, in key order.

    Raises:
        BucketUnavailable: ``in_order`` was promised and is not so, or an object comes twice, as
            when the same page comes for ever.
    """
    wanted = _wanted(found, inside, prefix, in_order)
    if in_order:
        return wanted
    return iter(sorted(wanted, key=lambda info: info.key))


def _wanted(
    found: Iterator[tuple[str, int]], inside: str, prefix: str, in_order: bool
) -> Iterator[ObjectInfo]:
    last = ""
    seen: set[str] = set()
    for path, size in found:
        if path in seen:
            raise BucketUnavailable(f"the store lists {path!r} again", hint=_REPORT)
        if in_order:
            seen.clear()  # one that comes again comes next, or out of order
        seen.add(path)
        if not path.startswith(inside):
            continue
        key = path[len(inside) :]
        if in_order and key < last:
            raise BucketUnavailable(f"the store lists {key!r} after {last!r}", hint=_REPORT)
        last = key
        if in_order and key > prefix and not key.startswith(prefix):
            return
        if key.startswith(prefix) and _is_key(key):
            yield ObjectInfo(key, size)


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except InvalidKey:
        return False
    return True
