"""A mirror's write-ahead journal: what is about to be written, durable before it is.

An entry is a frame (magic, lengths, SHA-256) around one JSON line and a ``raw`` payload with the
new bits. Entries are appended and fsynced one by one; replaying them in order is harmless however
often, since they overwrite. Only the last entry can be torn, by a crash during its append; it was
not acted on yet, so it is dropped. A damaged entry anywhere else is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire import codec
from thinwire.digest import TensorDigest
from thinwire.errors import CorruptPayload, MirrorCorrupt, ThinwireError
from thinwire.patch import Patch
from thinwire.schema import Schema

__all__ = ["Entry", "Journal", "read_entries"]

_MAGIC = b"thinwirj"
_FRAME = struct.Struct("<8sQQ32s")  # magic, bytes of head, bytes of payload, SHA-256 of all else


@dataclass(frozen=True)
class Entry:
    """One version on its way into the mirror.

    Attributes:
        version, commit: what the mirror holds after it; ``commit`` is the commit's hash.
        parent: hash of the commit it is applied to.
        digests: new digests of the changed tensors, by ordinal.
        patches: what to overwrite.
    """

    version: int
    commit: str
    parent: str
    digests: Mapping[int, TensorDigest]
    patches: Sequence[Patch]


def _head(entry: Entry) -> bytes:
    return json.dumps(
        {
            "version": entry.version,
            "commit": entry.commit,
            "parent": entry.parent,
            "digests": {str(k): [d.lo, d.hi] for k, d in entry.digests.items()},
        },
        separators=(",", ":"),
    ).encode()


def _frame_hash(head_size: int, payload_size: int, parts: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256(struct.pack("<QQ", head_size, payload_size))
    for part in parts:
        digest.update(part)
    return digest.digest()


class Journal:
    """The journal file of a mirror that this process writes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self.size = self._file.seek(0, os.SEEK_END)

    def append(self, entry: Entry) -> None:
        """Make an entry durable. Only then may the mirror's files be touched.

        Raises:
            OSError: it could not be written; the journal ends where it did before, or is closed.
        """
        head = _head(entry)
        parts = codec.encode(entry.patches)
        payload_size = sum(part.nbytes for part in parts)
        seal = _frame_hash(len(head), payload_size, [head, *parts])
        try:
            frame = _FRAME.pack(_MAGIC, len(head), payload_size, seal)
            for part in (memoryview(frame), memoryview(head), *parts):
                self._write(part)
            os.fsync(self._file.fileno())
        except BaseException:  # a KeyboardInterrupt leaves half an entry as well
            self._cut_back()
            raise
        self.size += len(frame) + len(head) + payload_size

    def _cut_back(self) -> None:
        try:
            self._file.truncate(self.size)
        except OSError:
            self.close()  # nothing may follow half an entry
            raise

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def clear(self, size: int = 0) -> None:
        """Cut the journal to its first ``size`` bytes, durably."""
        self._file.truncate(size)
        os.fsync(self._file.fileno())
        self.size = size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_entries(data: bytes, schema: Schema) -> Iterator[tuple[Entry, int]]:
    """The sealed entries of a journal and, for each, where in the file it ends.

    Stops at a torn tail: the caller sees it from the last end falling short of the file's size.

    Raises:
        MirrorCorrupt: an entry that further entries follow, or a sealed one, is damaged.
    """
    at = 0
    while at < len(data):
        whole = _frame(data, at)
        if whole is None:
            if data.find(_MAGIC, at + 1) != -1:
                raise MirrorCorrupt(f"the journal is damaged at byte {at}")
            return
        head, payload, at = whole
        yield _entry(head, payload, schema), at


def _frame(data: bytes, at: int) -> tuple[bytes, memoryview, int] | None:
    if at + _FRAME.size > len(data):
        return None
    magic, head_size, payload_size, seal = _FRAME.unpack_from(data, at)
    start = at + _FRAME.size
    end = start + head_size + payload_size
    if magic != _MAGIC or end > len(data):
        return None
    view = memoryview(data)
    head, payload = view[start : start + head_size], view[start + head_size : end]
    if _frame_hash(head_size, payload_size, [head, payload]) != seal:
        return None
    return bytes(head), payload, end


def _entry(head: bytes, payload: memoryview, schema: Schema) -> Entry:
    try:
        fields = json.loads(head)
        digests = {int(k): TensorDigest(*pair) for k, pair in fields["digests"].items()}
        patches = codec.decode(payload, schema)
        return Entry(fields["version"], fields["commit"], fields["parent"], digests, patches)
    except CorruptPayload as error:
        raise MirrorCorrupt(f"the journal holds an impossible entry: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ThinwireError):
            raise
        raise MirrorCorrupt(f"the journal holds an impossible entry: {error!r}") from None
