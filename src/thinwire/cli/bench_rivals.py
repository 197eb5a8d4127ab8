"""What else ships weight deltas, as far as it can be run here: sizes on the same two states.

The zstd variants follow what is published of each scheme, with everything in its favour: all
tensors in one zstd frame, and no byte counted for names, counts or headers. ``arc_v3`` is the
package that Fireworks publishes. It unpickles: never give it a file from somebody else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.errors import Misuse
from thinwire.patch import Bits, Patch
from thinwire.schema import Schema

__all__ = ["RIVALS", "Delta", "arc_compress", "arc_decompress", "gaps16", "torch_states"]

_ZSTD_LEVEL = 1
_LAST = 0xFFFF


@dataclass(frozen=True)
class Delta:
    """Two states and what lies between them.

    Attributes:
        schema: their tensors.
        old, new: per tensor ``(numel,)`` bits.
        patches: the changes.
    """

    schema: Schema
    old: Sequence[Bits]
    new: Sequence[Bits]
    patches: Sequence[Patch]


def gaps16(positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Distances between positions (the first one counts from -1), less 1, in u16.

    65535 stands for that many elements passed without a change; the distance goes on behind it.
    """
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    passes = gaps // _LAST
    out = np.full(gaps.size + int(passes.sum()), _LAST, "<u2")
    out[np.cumsum(passes + 1) - 1] = gaps % _LAST
    return out


def _zstd(chunks: Iterator[Bits]) -> int:
    """Bytes of one zstd frame over all chunks."""
    zstandard = _need("zstandard")
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()
    size = 0
    for chunk in chunks:
        size += len(compressor.compress(chunk.tobytes()))
    return size + len(compressor.flush())


def _dense_xor(delta: Delta) -> int:
    return _zstd(old ^ new for old, new in zip(delta.old, delta.new))


def _gaps_and_values(delta: Delta) -> int:
    def chunks() -> Iterator[Bits]:
        for patch in delta.patches:
            yield gaps16(patch.positions)
        for patch in delta.patches:
            yield patch.bits

    return _zstd(chunks())


def _gaps_and_xor(delta: Delta) -> int:
    def chunks() -> Iterator[Bits]:
        for patch in delta.patches:
            yield gaps16(patch.positions)
        for patch in delta.patches:
            yield patch.bits ^ delta.old[patch.ordinal][patch.positions]

    return _zstd(chunks())


def torch_states(delta: Delta) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both states as torch tensors that share memory with them."""
    torch = _need("torch")

    def state(tensors: Sequence[Bits]) -> dict[str, Any]:
        return {
            spec.name: torch.from_numpy(np.require(bits, requirements="W"))
            .view(getattr(torch, spec.dtype.torch_name))
            .reshape(spec.shape)
            for spec, bits in zip(delta.schema, tensors)
        }

    return state(delta.old), state(delta.new)


def _arc_v3_as_shipped(delta: Delta) -> int:
    """Bytes of the file. The package drops candidates that take long, so this varies with load."""
    return arc_compress(*torch_states(delta))[1]


def _arc_v3(delta: Delta) -> int:
    """Bytes of the file when the package waits for all its candidates: the smallest it can do."""
    arc3 = _need("fireworks_delta_compression.backends.arc3")
    usual, arc3._CANDIDATE_WAIT_MULTIPLIER = arc3._CANDIDATE_WAIT_MULTIPLIER, 1e6
    try:
        return arc_compress(*torch_states(delta))[1]
    finally:
        arc3._CANDIDATE_WAIT_MULTIPLIER = usual


def arc_compress(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Any, int]:
    """(diffs, checksums) by tensor name, and the size of the file that holds them."""
    package = _need("fireworks_delta_compression")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "delta.safetensors"
        made = package.delta_compress_dicts_to_file(
            src=old, dst=new, diff_file=str(file), compression_format="arc_v3"
        )
        return made, file.stat().st_size


def arc_decompress(old: Mapping[str, Any], made: Any) -> dict[str, Any]:
    """The new state, from the old one and the first of what :func:`arc_compress` returns."""
    package = _need("fireworks_delta_compression")
    diffs, checksums = made
    return {
        name: package.delta_decompress(
            src=old[name],
            compressed_diff=diffs[name],
            checksum=checksums[name],
            compression_format="arc_v3",
        )
        for name in old
    }


def _need(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Misuse(
            f"the comparison needs {module.partition('.')[0]}: {error}",
            hint='pip install "thinwire[bench]"',
        ) from error


RIVALS: dict[str, Callable[[Delta], int]] = {
    "xor_zstd": _dense_xor,
    "gaps_values_zstd": _gaps_and_values,
    "gaps_xor_zstd": _gaps_and_xor,
    "arc_v3": _arc_v3,
    "arc_v3_as_shipped": _arc_v3_as_shipped,
}
"""Bytes of a delta, by scheme."""
