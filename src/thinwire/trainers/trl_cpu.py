"""What TRL's asynchronous GRPO needs replaced to run on a CPU.

    use_cpu(threads=2)  # before AsyncGRPOTrainer is made
    trainer = AsyncGRPOTrainer(..., AsyncGRPOConfig(use_cpu=True, bf16=False, ...))

==============================  ================================================================
in TRL 1.16                     instead
==============================  ================================================================
FlashAttention 3 from the Hub   the same attention through torch, segment by segment
the device's peak FLOPs         unknown: utilisation is not logged
vLLM must be importable         need not be: the rollout worker talks HTTP to a server elsewhere
==============================  ================================================================

With a GPU, everything but the last is left as it is.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from thinwire.errors import Misuse

__all__ = ["use_cpu", "varlen_attention"]

_KNOWN = "1.16"
_ROOM = "trl.experimental.async_grpo"


def use_cpu(threads: int | None = None) -> None:
    """Replace it, in this process. Harmless when called again.

    Args:
        threads: for torch in this process; servers on the same machine need some as well.

    Raises:
        Misuse: this TRL has no such places.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if find_spec("vllm") is None:
        _replace("async_rollout_worker", "is_vllm_available", lambda *_, **__: True)
    if not torch.cuda.is_available():
        kernels = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
        _replace("packing", "_flash_attn", lambda: kernels)
        _replace("async_grpo_trainer", "get_peak_flops_per_device", lambda *_, **__: None)


def _replace(module: str, name: str, value: object) -> None:
    place: ModuleType = importlib.import_module(f"{_ROOM}.{module}")
    if not hasattr(place, name):
        from trl import __version__

        raise Misuse(
            f"TRL {__version__} has no {_ROOM}.{module}.{name}", hint=f"install TRL {_KNOWN}"
        )
    setattr(place, name, value)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    **options: Any,
) -> torch.Tensor:
    """``flash_attn_varlen_func``: sequences laid end to end, each query seeing its own keys.

    Args:
        q: ``(tokens, heads, width)``.
        k, v: ``(keys, key heads, width)``; heads share key heads evenly.
        cu_seqlens_q, cu_seqlens_k: ``(sequences + 1,)`` where each sequence starts. A sequence's
            last query stands at its last key.
        window_size: keys before a query's own that it sees; -1: all.

    Returns:
        ``(tokens, heads, width)``.

    Raises:
        Misuse: an option that this does not do.
    """
    if not causal or any(options.values()):
        raise Misuse(f"attention with causal={causal}, {options} is not there for the CPU")
    outputs = []
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for first, last, first_key, last_key in zip(starts, starts[1:], key_starts, key_starts[1:]):
        queries = q[first:last].transpose(0, 1)
        keys, values = (x[first_key:last_key].transpose(0, 1) for x in (k, v))
        own = torch.arange(last - first, device=q.device) + (last_key - first_key) - (last - first)
        behind = own[:, None] - torch.arange(last_key - first_key, device=q.device)
        seen = behind >= 0
        if window_size[0] >= 0:
            seen &= behind <= window_size[0]
        out = torch.nn.functional.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=seen,
            scale=softmax_scale,
            enable_gqa=True,
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
