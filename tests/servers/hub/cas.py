"""Xet's content-addressed store: xorbs, and files that are stretches of xorbs. No HTTP here.

What clients say is checked against what they sent: a shard's terms must point at chunks that exist
and add up to the sizes it names. Hashes are taken as given, since Xet's are keyed BLAKE3, which the
standard library lacks; contents that come in through :meth:`Cas.write` get made-up ones.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import Any

from servers.hub.xet import (
    Term,
    XorbLayout,
    pack_xorb,
    read_shard,
    read_xorb,
    unpack_chunk,
)

__all__ = ["EMPTY", "Cas", "Xorb"]

EMPTY = "0" * 64
"""The hash of the file without bytes (docs/xet/hashing.md): it needs no shard."""

PIECE = 32 << 20


@dataclass(frozen=True)
class Xorb:
    """A serialised xorb and where its chunks are."""

    data: bytes
    layout: XorbLayout


@dataclass(frozen=True)
class _Stretch:
    """Chunks of one xorb that a reader needs, in the order of the file."""

    xorb: str
    first: int
    end: int
    size: int


class Cas:
    """The store. Thread-safe; nothing is ever removed."""

    def __init__(self) -> None:
        self.xorbs: dict[str, Xorb] = {}
        self.files: dict[str, list[Term]] = {EMPTY: []}
        self._lock = threading.Lock()

    def add_xorb(self, name: str, data: bytes) -> bool:
        """Keep a xorb; false if it was here. Raises: ValueError if it is malformed."""
        xorb = Xorb(data, read_xorb(data))
        with self._lock:
            return self.xorbs.setdefault(name, xorb) is xorb

    def add_shard(self, data: bytes) -> int:
        """Register the files of a shard, all or none; how many there were.

        Raises:
            ValueError: it is malformed, or its terms do not fit the xorbs.
        """
        shard = read_shard(data)
        with self._lock:
            for name, sizes in shard.xorbs.items():
                xorb = self.xorbs.get(name)
                if xorb is None or xorb.layout.sizes != sizes:
                    raise ValueError(f"the shard's chunks of xorb {name} are not those uploaded")
            for terms in shard.files.values():
                for term in terms:
                    self._check(term)
            self.files.update(shard.files)
        return len(shard.files)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not here."""
        terms = self.files.get(name)
        return None if terms is None else sum(term.size for term in terms)

    def read(self, name: str) -> bytes:
        """A file's bytes. Raises: KeyError if it is not here."""
        parts = []
        for term in self.files[name]:
            xorb = self.xorbs[term.xorb]
            starts = xorb.layout.offsets[term.first : term.end]
            parts += [unpack_chunk(xorb.data, start) for start in starts]
        return b"".join(parts)

    def write(self, content: bytes) -> str:
        """Store a content that came whole; its file hash."""
        name = hashlib.sha256(b"file" + content).hexdigest() if content else EMPTY
        terms = []
        for start in range(0, len(content), PIECE):
            piece = content[start : start + PIECE]
            xorb = hashlib.sha256(b"xorb" + piece).hexdigest()
            self.add_xorb(xorb, pack_xorb(piece))
            terms.append(Term(xorb, len(piece), 0, len(self.xorbs[xorb].layout.sizes)))
        with self._lock:
            self.files.setdefault(name, terms)
        return name

    def reconstruction(self, name: str, start: int, end: int, *, version: int, base: str) -> Any:
        """How bytes ``start`` to ``end`` of a file are put together, as the API answers it.

        Schemas: xet-core ``cas.openapi.yaml``; for version 2, hub-docs ``docs/xet/api.md``, whose
        ``xorbs`` holds lists, as hf_xet expects them.
        """
        skip, stretches = self._stretches(name, start, end)
        terms = [
            {
                "hash": stretch.xorb,
                "unpacked_length": stretch.size,
                "range": {"start": stretch.first, "end": stretch.end},
            }
            for stretch in stretches
        ]
        fetches: dict[str, list[Any]] = {}
        for xorb, ranges in _merged(stretches).items():
            offsets, url = self.xorbs[xorb].layout.offsets, f"{base}/xorbs/{xorb}"
            for first, last in ranges:
                chunks = {"start": first, "end": last}
                bytes_ = {"start": offsets[first], "end": offsets[last] - 1}
                fetches.setdefault(xorb, []).append(
                    {"url": url, "ranges": [{"chunks": chunks, "bytes": bytes_}]}
                    if version == 2
                    else {"url": url, "range": chunks, "url_range": bytes_}
                )
        found = "xorbs" if version == 2 else "fetch_info"
        return {"offset_into_first_range": skip, "terms": terms, found: fetches}

    def _check(self, term: Term) -> None:
        xorb = self.xorbs.get(term.xorb)
        if xorb is None:
            raise ValueError(f"the shard refers to xorb {term.xorb}, which nobody uploaded")
        sizes = xorb.layout.sizes
        if not 0 <= term.first < term.end <= len(sizes):
            raise ValueError(f"xorb {term.xorb} has no chunks {term.first} to {term.end}")
        if sum(sizes[term.first : term.end]) != term.size:
            raise ValueError(f"chunks of xorb {term.xorb} do not add up to the term's size")

    def _stretches(self, name: str, start: int, end: int) -> tuple[int, list[_Stretch]]:
        """The chunks that cover the range, and how many bytes of the first to skip."""
        skip = position = 0
        stretches: list[_Stretch] = []
        for term in self.files[name]:
            sizes = self.xorbs[term.xorb].layout.sizes
            kept: list[int] = []
            for index in range(term.first, term.end):
                if position < end and position + sizes[index] > start:
                    if not kept and not stretches:
                        skip = start - position
                    kept.append(index)
                position += sizes[index]
            if kept:
                size = sum(sizes[index] for index in kept)
                stretches.append(_Stretch(term.xorb, kept[0], kept[-1] + 1, size))
        return skip, stretches


def _merged(stretches: list[_Stretch]) -> dict[str, list[tuple[int, int]]]:
    """Chunk ranges per xorb, sorted, with those that touch or overlap made one."""
    merged: dict[str, list[tuple[int, int]]] = {}
    for stretch in sorted(stretches, key=lambda item: item.first):
        ranges = merged.setdefault(stretch.xorb, [])
        if ranges and stretch.first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stretch.end))
        else:
            ranges.append((stretch.first, stretch.end))
    return merged
