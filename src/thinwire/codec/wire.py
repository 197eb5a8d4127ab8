"""The safetensors container, written without copies and read without trust.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes one after
the other (https://github.com/huggingface/safetensors, "Format"). The reader accepts exactly what
the reference implementation accepts, less a few freedoms nobody uses: entries must cover the data
without gaps or overlaps, keys must not repeat.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.dtypes import DTYPES, DType
from thinwire.errors import CorruptPayload, InvalidCheckpoint
from thinwire.patch import Bits

__all__ = ["MAX_HEADER", "Entry", "Header", "build_header", "parse_header", "read_header", "split"]

MAX_HEADER = 100_000_000
"""Bytes of the JSON header; the reference implementation's cap."""

_MAX_DIMS = 32


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: element type, shape, and its byte range counted from the file's start."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a file holds.

    Attributes:
        entries: tensors by name.
        metadata: the ``__metadata__`` object.
        size: bytes of the whole file.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    size: int = 0


def build_header(
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """The bytes before the data, and the order in which the tensors' data must follow.

    Wider elements come first, so that every tensor is aligned to its element.
    """
    ordered = sorted(tensors, key=lambda t: (-t[1].width, t[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, kind, shape in ordered:
        end = at + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": kind.name, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [name for name, _, _ in ordered]


def parse_header(prefix: bytes | memoryview, size: int) -> Header:
    """Check and read a header.

    Args:
        prefix: at least the file's header: its first ``8 + n`` bytes.
        size: bytes of the whole file.

    Raises:
        CorruptPayload: anything about the header is not as the format demands.
    """
    length = header_length(prefix[:8], size)
    if len(prefix) < 8 + length:
        raise CorruptPayload("the header is cut short")
    try:
        parsed = json.loads(bytes(prefix[8 : 8 + length]).decode(), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise CorruptPayload(f"the header is not JSON: {str(error)[:100]}") from None
    if not isinstance(parsed, dict):
        raise CorruptPayload("the header is not a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptPayload("__metadata__ is not an object of strings")
    data = 8 + length
    entries = {name: _entry(name, value, data) for name, value in parsed.items()}
    at = data
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != at:
            raise CorruptPayload(f"{entry.name[:80]!r}: data has a gap or an overlap before it")
        at = entry.stop
    if at != size:
        raise CorruptPayload(f"the header describes {at} bytes, the file has {size}")
    return Header(entries, metadata, size)


def header_length(prefix: bytes | memoryview, size: int) -> int:
    """Bytes of the JSON header, from the file's first 8 bytes.

    Raises:
        CorruptPayload: the file is shorter than that, or the header longer than allowed.
    """
    if len(prefix) < 8 or size < 8:
        raise CorruptPayload(f"{size} bytes are too few for a safetensors file")
    length = int.from_bytes(prefix[:8], "little")
    if length > min(MAX_HEADER, size - 8):
        raise CorruptPayload(f"the header claims {length} bytes in a file of {size}")
    return length


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key is repeated")
    return mapping


def _entry(name: str, value: Any, data: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptPayload(f"{name[:80]!r}: not a tensor entry")
    kind = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    shape, offsets = value["shape"], value["data_offsets"]
    if kind is None:
        raise CorruptPayload(f"{name[:80]!r}: unknown dtype {str(value['dtype'])[:20]!r}")
    if not _counts(shape) or len(shape) > _MAX_DIMS or not _counts(offsets) or len(offsets) != 2:
        raise CorruptPayload(f"{name[:80]!r}: shape or offsets are not small lists of counts")
    if offsets[1] - offsets[0] != math.prod(shape) * kind.itemsize:
        raise CorruptPayload(f"{name[:80]!r}: offsets do not match shape and dtype")
    return Entry(name, kind, tuple(shape), data + offsets[0], data + offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def read_header(path: Path) -> Header:
    """The header of a file on disk.

    Raises:
        InvalidCheckpoint: it cannot be read, or is not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            prefix += file.read(header_length(prefix, size))
        return parse_header(prefix, size)
    except CorruptPayload as error:
        raise InvalidCheckpoint(f"{path}: {error}") from None
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: {error.strerror or error}") from None


def split(data: bytes | memoryview) -> tuple[Header, dict[str, Bits]]:
    """A whole file in memory: its header, and every tensor as a flat read-only view of its bits.

    Raises:
        CorruptPayload: as for :func:`parse_header`.
    """
    view = memoryview(data)
    header = parse_header(view, view.nbytes)
    tensors = {
        name: np.frombuffer(view[e.start : e.stop], e.dtype.bits)
        for name, e in header.entries.items()
    }
    return header, tensors
