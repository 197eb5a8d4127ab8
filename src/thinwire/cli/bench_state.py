"""Synthetic weights for benchmarks: a real model's shapes, plausible values, sparse changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.dtypes import dtype
from thinwire.patch import Bits, Patch, position_dtype
from thinwire.schema import Schema, TensorSpec
from thinwire.weights import FlatTensor

__all__ = ["QUICK", "QWEN3_06B", "Shape", "changes", "make_weights", "named"]

BF16 = dtype("BF16")
_BLOCK = 4_000_037
"""Elements drawn once and repeated; a prime, so that no tensor repeats in step with its rows."""


@dataclass(frozen=True)
class Shape:
    """What decides the tensors of a Qwen3 model with tied embeddings."""

    vocab: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def schema(self) -> Schema:
        """The tensors that ``save_pretrained`` would write, in bf16."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (self.intermediate, h),
            "mlp.up_proj": (self.intermediate, h),
            "mlp.down_proj": (h, self.intermediate),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, h),
            "model.norm.weight": (h,),
        }
        for number in range(self.layers):
            shapes |= {f"model.layers.{number}.{k}.weight": shape for k, shape in layer.items()}
        return Schema(tuple(TensorSpec(name, BF16, shape) for name, shape in shapes.items()))


QWEN3_06B = Shape(151_936, 1024, 28, 3072, heads=16, kv_heads=8, head_dim=128)
QUICK = Shape(32_768, 256, 12, 1024, heads=4, kv_heads=2, head_dim=64)


def make_weights(schema: Schema) -> list[Bits]:
    """Normally distributed bf16 values, per tensor, in schema order."""
    values = np.random.default_rng(0).standard_normal(_BLOCK, np.float32) * np.float32(0.02)
    block = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensors: list[Bits] = []
    at = 0
    for spec in schema:
        bits = np.empty(spec.numel, np.uint16)
        filled = 0
        while filled < bits.size:
            some = block[at : at + bits.size - filled]
            bits[filled : filled + some.size] = some
            filled += some.size
            at = (at + some.size) % _BLOCK
        tensors.append(bits)
    return tensors


def changes(schema: Schema, tensors: list[Bits], density: float) -> list[Patch]:
    """Every element changed with the given probability, by one or a few ULP up or down."""
    random = np.random.default_rng(1)
    patches = []
    for ordinal, spec in enumerate(schema):
        positions = _bernoulli(random, spec.numel, density).astype(position_dtype(spec.numel))
        if not positions.size:
            continue
        steps = random.choice(
            np.array([1, 1, 1, 2, 3, -1, -1, -1, -2, -3], np.int16), positions.size
        )
        bits = tensors[ordinal][positions] + steps.view(np.uint16)
        patches.append(Patch(ordinal, spec, positions, bits))
    return patches


def _bernoulli(
    random: np.random.Generator, numel: int, density: float
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Increasing positions, each taken with the same probability: gaps are geometric."""
    if density <= 0:
        return np.empty(0, np.int64)
    gaps = random.geometric(density, int(numel * density + 10 * (numel * density) ** 0.5 + 10))
    positions = np.cumsum(gaps) - 1
    return positions[positions < numel]


def named(schema: Schema, tensors: list[Bits]) -> list[tuple[str, FlatTensor]]:
    """(name, tensor) pairs as a publisher takes them."""
    return [(s.name, FlatTensor(bits, s.dtype, s.shape)) for s, bits in zip(schema, tensors)]
