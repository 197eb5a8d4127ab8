"""Blocks of a checkpoint tensor, and the engine's memory that holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Piece", "Region", "Unordered", "blocks", "integer_view", "storage_of"]

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_COPIES = 64


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as signed integers of the element's width (bytes: unsigned)."""
    return tensor.detach().view(_INTEGER[tensor.element_size()])


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor, for as long as the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class Region:
    """A strided block of a tensor, in flat row-major element indices.

    Attributes:
        offset: index of the first element.
        shape: elements per dimension; none of them 1.
        stride: distance between neighbours per dimension; falling, and large enough that no two
            elements have the same index.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the block."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One more than the largest index in the block."""
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride))

    @property
    def is_run(self) -> bool:
        """Whether the indices are consecutive."""
        return self.shape == () or (len(self.shape) == 1 and self.stride == (1,))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The block of a flat tensor: a view."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def indices(self, device: torch.device) -> torch.Tensor:
        """int64 flat indices, in the shape of the block."""
        index = torch.full(self.shape, self.offset, dtype=torch.int64, device=device)
        for axis, (size, step) in enumerate(zip(self.shape, self.stride)):
            steps = torch.arange(size, dtype=torch.int64, device=device) * step
            index += steps.view([-1 if a == axis else 1 for a in range(len(self.shape))])
        return index


@dataclass(frozen=True, eq=False)
class Piece:
    """A block of a checkpoint tensor, and the engine's memory that holds it.

    Attributes:
        region: in the checkpoint tensor.
        target: a view of the engine's memory in the region's shape.
        casts: dtypes that values go through on the way; empty if their bits are kept.
        home: the engine's name of the parameter or buffer.
    """

    region: Region
    target: torch.Tensor
    casts: tuple[torch.dtype, ...]
    home: str

    def split(self, limit: int) -> Iterator[Piece]:
        """The same in pieces of at most ``limit`` elements."""
        if self.region.numel <= limit:
            yield self
            return
        (size, *rest), (step, *_) = self.region.shape, self.region.stride
        rows = max(1, limit // math.prod(rest))
        for first in range(0, size, rows):
            count = min(rows, size - first)
            parts = blocks(
                self.region.offset + first * step,
                (count, *rest),
                self.region.stride,
                self.target[first : first + count],
            )
            for region, target in parts:
                yield from Piece(region, target, self.casts, self.home).split(limit)


class Unordered(Exception):
    """Elements of a block cannot be told from their index alone."""


def blocks(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...], target: torch.Tensor
) -> list[tuple[Region, torch.Tensor]]:
    """Blocks in the form that :class:`Region` promises: copies apart, dimensions sorted, merged.

    Raises:
        Unordered: elements overlap.
    """
    if 0 in shape:
        return []
    repeated = next((a for a, (n, s) in enumerate(zip(shape, stride)) if n > 1 and s == 0), None)
    if repeated is not None:
        if shape[repeated] > _MOST_COPIES:
            raise Unordered(f"{shape[repeated]} copies")
        rest = [a for a in range(len(shape)) if a != repeated]
        return [
            block
            for copy in target.unbind(repeated)
            for block in blocks(
                offset, tuple(shape[a] for a in rest), tuple(stride[a] for a in rest), copy
            )
        ]
    dims = sorted(
        (s, n, t) for n, s, t in zip(shape, stride, target.stride(), strict=True) if n > 1
    )[::-1]
    merged: list[tuple[int, int, int]] = []
    for step, size, jump in dims:
        if merged:
            outer_step, outer_size, outer_jump = merged[-1]
            if outer_step < step * size:
                raise Unordered("overlapping slices")
            if outer_step == step * size and outer_jump == jump * size:
                merged[-1] = (step, outer_size * size, jump)
                continue
        merged.append((step, size, jump))
    sizes = tuple(size for _, size, _ in merged)
    view = target.as_strided(sizes, tuple(jump for *_, jump in merged), target.storage_offset())
    return [(Region(offset, sizes, tuple(step for step, *_ in merged)), view)]
