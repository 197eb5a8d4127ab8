"""Checkpoint folders in the Hugging Face layout: safetensors shards, an index, and other files.

Reading maps the shards and hands out views; writing lays tensors out in shards of bounded size.
Only canonical tensors are stored, as ``save_pretrained`` does: a tied weight once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinwire.codec import wire
from thinwire.errors import InvalidCheckpoint
from thinwire.patch import Bits
from thinwire.schema import Schema, TensorSpec
from thinwire.weights import FlatTensor

__all__ = [
    "INDEX",
    "SINGLE",
    "Checkpoint",
    "Shard",
    "asset_files",
    "index_json",
    "is_weights",
    "lay_out",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD = 5 << 30
"""Bytes of tensor data per shard; the usual size on the Hub."""

MANIFEST = "manifest.json"
"""An anchor's own file: a checkpoint that was copied out of a bucket has one, too."""

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".pkl")
"""Endings of weight files that never travel: not canonical, and many of them pickles."""


@dataclass(frozen=True)
class Shard:
    """A file to write.

    Attributes:
        name: file name.
        head: bytes before the tensor data.
        ordinals: tensors whose data follows, in this order.
        size: bytes of the whole file.
    """

    name: str
    head: bytes
    ordinals: tuple[int, ...]
    size: int


def lay_out(schema: Schema, *, max_shard: int = MAX_SHARD) -> list[Shard]:
    """Distribute the tensors over shards, in schema order, each at most ``max_shard`` bytes.

    A single tensor that is larger gets a shard of its own.
    """
    groups: list[list[int]] = [[]]
    filled = 0
    for ordinal, spec in enumerate(schema):
        if groups[-1] and filled + spec.nbytes > max_shard:
            groups.append([])
            filled = 0
        groups[-1].append(ordinal)
        filled += spec.nbytes
    shards = []
    for number, group in enumerate(groups, 1):
        head, order = wire.build_header(
            [(schema[k].name, schema[k].dtype, schema[k].shape) for k in group], {"format": "pt"}
        )
        name = (
            SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        ordinals = tuple(schema.ordinal(tensor) for tensor in order)
        size = len(head) + sum(schema[k].nbytes for k in group)
        shards.append(Shard(name, head, ordinals, size))
    return shards


def index_json(schema: Schema, shards: Sequence[Shard]) -> bytes:
    """The bytes of ``model.safetensors.index.json`` for several shards."""
    weight_map = {schema[k].name: shard.name for shard in shards for k in shard.ordinals}
    index = {"metadata": {"total_size": schema.nbytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def is_weights(name: str) -> bool:
    """Whether a file of a checkpoint holds tensors."""
    return name.endswith(".safetensors")


def asset_files(folder: Path) -> list[Path]:
    """Everything beside the weights that makes a folder loadable: config, tokenizer and the like.

    Plain files at the top level; hidden ones, weights of any format and their indices are left out.

    Raises:
        InvalidCheckpoint: there is no such folder.
    """
    if not folder.is_dir():
        raise InvalidCheckpoint(f"{folder} is not a folder")
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith((".safetensors", *OTHER_WEIGHTS))
        and not path.name.endswith(".index.json")
        and path.name != MANIFEST
    )


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a folder.

    Attributes:
        folder: where they are.
        headers: header of every shard, by file name.
    """

    folder: Path
    headers: Mapping[str, wire.Header]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read the headers of a folder's shards.

        Raises:
            InvalidCheckpoint: there is no readable safetensors checkpoint.
        """
        folder = Path(folder)
        names, promised = _shard_names(folder)
        checkpoint = cls(folder, {name: wire.read_header(folder / name) for name in names})
        seen: dict[str, str] = {}
        for shard, entry in checkpoint._entries():
            if seen.setdefault(entry.name, shard) != shard:
                raise InvalidCheckpoint(f"{folder}: {entry.name!r} is in two shards")
        if missing := sorted(promised - seen.keys()):
            raise InvalidCheckpoint(f"{folder / INDEX}: {missing[0]!r} is not in the shards")
        return checkpoint

    def _entries(self) -> Iterator[tuple[str, wire.Entry]]:
        for shard, header in self.headers.items():
            for entry in header.entries.values():
                yield shard, entry

    def schema(self, aliases: Mapping[str, str] | None = None) -> Schema:
        """Names, dtypes and shapes of the stored tensors."""
        specs = [TensorSpec(e.name, e.dtype, e.shape) for _, e in self._entries()]
        return Schema(tuple(specs), aliases or {})

    def map(self, *, write: bool = False) -> dict[str, Bits]:
        """Every tensor as a flat view into its mapped file; written through if ``write``.

        Raises:
            InvalidCheckpoint: a file cannot be opened or has changed its size.
        """
        tensors: dict[str, Bits] = {}
        for shard, header in self.headers.items():
            data = map_file(self.folder / shard, header.size, write=write)
            for entry in header.entries.values():
                tensors[entry.name] = data[entry.start : entry.stop].view(entry.dtype.bits)
        return tensors

    def tensors(self) -> list[tuple[str, FlatTensor]]:
        """(name, tensor) pairs that a publisher takes: read from the mapped files as needed."""
        mapped = self.map()
        return [
            (entry.name, FlatTensor(mapped[entry.name], entry.dtype, entry.shape))
            for _, entry in self._entries()
        ]


def map_file(
    path: Path, size: int, *, write: bool = False
) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
    """A file's bytes, mapped.

    Raises:
        InvalidCheckpoint: it cannot be opened or does not have ``size`` bytes.
    """
    try:
        data = np.memmap(path, np.uint8, "r+" if write else "r")
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{path}: {error}") from None
    if data.size != size:
        raise InvalidCheckpoint(f"{path}: {data.size} bytes, expected {size}")
    return data


def _shard_names(folder: Path) -> tuple[list[str], set[str]]:
    """The files of a checkpoint, and the tensors that an index promises in them."""
    if not folder.is_dir():
        raise InvalidCheckpoint(f"{folder} is not a folder")
    if not (folder / INDEX).exists():
        if (folder / SINGLE).is_file():
            return [SINGLE], set()
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(found) != 1:
            raise InvalidCheckpoint(f"{folder} holds no {SINGLE} and no {INDEX}")
        return found, set()
    try:
        text = (folder / INDEX).read_text(encoding="utf-8")
        weight_map = dict(json.loads(text)["weight_map"].items())
        names = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidCheckpoint(f"{folder / INDEX}: {error!r}") from None
    if not names:
        raise InvalidCheckpoint(f"{folder / INDEX} names no shard")
    if not all(map(_is_file_name, names)):
        raise InvalidCheckpoint(f"{folder / INDEX}: a shard name leads out of the folder")
    return sorted(names), set(weight_map)


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name:
        return False
    return Path(name).name == name
