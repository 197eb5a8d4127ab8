"""A module that keeps a checkpoint the way serving engines do, and what to load into it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from thinwire.dtypes import dtype
from thinwire.patch import Bits, Patch
from thinwire.schema import Schema, TensorSpec

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("BF16", (10, 8)),
    "head": ("BF16", (10, 8)),
    "q": ("BF16", (12, 8)),
    "k": ("BF16", (4, 8)),
    "v": ("BF16", (4, 8)),
    "gate": ("BF16", (6, 8)),
    "up": ("BF16", (6, 8)),
    "down": ("BF16", (8, 6)),
    "conv1d": ("BF16", (8, 6)),
    "bias": ("BF16", (6,)),
    "norm": ("BF16", (8,)),
    "router": ("BF16", (3, 8)),
    "master": ("F32", (5,)),
    "scale": ("F32", ()),
    "experts.0.up": ("BF16", (6, 8)),
    "experts.1.up": ("BF16", (6, 8)),
    "experts.0.down": ("BF16", (8, 6)),
    "experts.1.down": ("BF16", (8, 6)),
    "steps": ("I64", (4,)),
    "mask": ("BOOL", (9,)),
    "eight": ("F8_E4M3", (4, 4)),
    "empty": ("F16", (0, 3)),
}


class Server(torch.nn.Module):
    """Rank ``rank`` of ``ranks``; ranks split heads, columns, vocabulary and experts' width."""

    def __init__(self, rank: int = 0, ranks: int = 1, device: str = "cpu") -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.loads = 0

        def make(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
            zeros = torch.zeros(shape, dtype=kind, device=device)
            return torch.nn.Parameter(zeros, requires_grad=False)

        self.embed = make(16 // ranks, 8)  # padded vocabulary
        self.head = make(16 // ranks, 8)
        self.qkv = make((12 + 4 + 4) // ranks, 8)
        self.gate_up = make(12 // ranks, 8)
        self.down = make(8, 6 // ranks)
        self.turned = make(6 // ranks, 8)
        self.bias = make(6 // ranks)
        self.norm = make(8)
        self.router = make(3, 8, kind=torch.float32)
        self.low = make(5)
        self.scale = make(kind=torch.float32)
        self.w13 = make(2, 6 // ranks, 8)
        self.w2 = make(2, 8, 6 // ranks)
        self.register_buffer("steps", torch.zeros(4, dtype=torch.int64, device=device))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool, device=device))
        eight = torch.zeros(4, 4, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.register_buffer("eight", eight.t())

    def shard(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        size = tensor.shape[axis] // self.ranks
        return tensor.narrow(axis, self.rank * size, size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        starts = {"q": 0, "k": 12 // self.ranks, "v": 16 // self.ranks}
        for name, tensor in weights:
            self.loads += 1
            if name in ("embed", "head"):
                rows = self.embed.shape[0]
                mine = tensor[self.rank * rows : (self.rank + 1) * rows]
                parameter = getattr(self, name)
                parameter.data[: mine.shape[0]].copy_(mine)
                parameter.data[mine.shape[0] :].fill_(0)
            elif name in starts:
                part = self.shard(tensor, 0)
                self.qkv.data.narrow(0, starts[name], part.shape[0]).copy_(part)
            elif name in ("gate", "up"):
                part = self.shard(tensor, 0)
                self.gate_up.data.view(2, -1, 8)[int(name == "up")] = part
            elif name == "down":
                self.down.data.copy_(self.shard(tensor, 1).to(self.down.device))
            elif name == "conv1d":
                self.turned.data.copy_(self.shard(tensor.t(), 0))
            elif name == "bias":
                self.bias[:] = self.shard(tensor, 0).clone()
            elif name == "master":
                self.low.data.copy_(tensor.to(torch.bfloat16))
            elif name.startswith("experts."):
                _, expert, kind = name.split(".")
                home, axis = (self.w13, 0) if kind == "up" else (self.w2, 1)
                home.data[int(expert)].copy_(self.shard(tensor, axis))
            elif name != "empty":
                getattr(self, name).data.copy_(tensor)

    def bits(self) -> dict[str, bytes]:
        """Everything it holds, byte by byte."""
        return {
            name: tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]
        }


@dataclass
class Checkpoint:
    """Random elements, NaNs and all, in schema order."""

    schema: Schema
    tensors: list[Bits]

    @classmethod
    def random(
        cls, seed: int, shapes: dict[str, tuple[str, tuple[int, ...]]] | None = None
    ) -> Checkpoint:
        rng = np.random.default_rng(seed)
        shapes = SHAPES if shapes is None else shapes
        specs = tuple(TensorSpec(n, dtype(k), shape) for n, (k, shape) in shapes.items())
        schema = Schema(specs)
        tensors = []
        for spec in schema:
            if spec.name in ("master", "router", "scale"):  # cast: NaNs have no single image
                values = rng.standard_normal(spec.numel).astype(np.float32)
                wide = values.view("<u4")
                tensors.append(wide if spec.dtype.width == 32 else (wide >> 16).astype("<u2"))
            elif spec.dtype.name == "BOOL":
                tensors.append(rng.integers(0, 2, spec.numel).astype("<u1"))
            else:
                top = np.iinfo(spec.dtype.bits).max
                tensors.append(
                    rng.integers(0, top, spec.numel, dtype=spec.dtype.bits, endpoint=True)
                )
        return cls(schema, tensors)

    def pairs(self, device: str = "cpu") -> Iterable[tuple[str, torch.Tensor]]:
        """What a loader takes."""
        for spec, bits in zip(self.schema, self.tensors):
            raw = torch.from_numpy(bits.copy().view(np.uint8)).to(device)
            kind = getattr(torch, spec.dtype.torch_name)
            yield spec.name, raw.view(kind).view(spec.shape)

    def patches(self, after: Checkpoint, density: float, seed: int) -> list[Patch]:
        """Some elements of every tensor, from another checkpoint."""
        rng = np.random.default_rng(seed)
        found = []
        for ordinal, spec in enumerate(self.schema):
            where = np.flatnonzero(rng.random(spec.numel) < density).astype(np.int32)
            found.append(Patch(ordinal, spec, where, after.tensors[ordinal][where]))
        return found

    def patched(self, patches: Iterable[Patch]) -> Checkpoint:
        tensors = [bits.copy() for bits in self.tensors]
        for patch in patches:
            tensors[patch.ordinal][patch.positions] = patch.bits
        return Checkpoint(self.schema, tensors)
