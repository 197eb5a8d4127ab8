"""The model whose weights a trainer trains, found under what it is wrapped in."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, extract_model_from_parallel

from thinwire.errors import Misuse

__all__ = ["whole_model"]

_GATHER = (
    "gather the weights yourself and pass the full state dict to thinwire.Publisher on one rank"
)


def whole_model(model: Any) -> torch.nn.Module:
    """The model itself, without data parallelism and compilation, if this process holds all of it.

    Raises:
        Misuse: its weights are spread over processes, or are a base and adapters.
    """
    sharding = _sharding(model)
    if sharding:
        raise Misuse(f"the model's weights are sharded by {sharding}", hint=_GATHER)
    inner = model
    while True:
        outer, inner = inner, extract_model_from_parallel(inner, keep_torch_compile=False)
        if inner is outer:
            break
    if hasattr(inner, "peft_config") and hasattr(inner, "merge_adapter"):
        raise Misuse(
            f"a {type(inner).__name__} has a base and adapters, not one checkpoint's weights",
            hint="train without adapters, or merge them and publish the merged weights",
        )
    plain: torch.nn.Module = inner
    return plain


def _sharding(model: torch.nn.Module) -> str:
    """What keeps parts of the weights in other processes; empty if nothing does."""
    if AcceleratorState._shared_state:
        state = AcceleratorState()
        if state.distributed_type == DistributedType.FSDP:
            return "FSDP"
        plugin = getattr(state, "deepspeed_plugin", None)
        if plugin is not None and plugin.zero_stage == 3:
            return "DeepSpeed ZeRO-3"
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "FSDP"
    for parameter in model.parameters():
        if hasattr(parameter, "ds_status"):
            return "DeepSpeed ZeRO-3"
        if hasattr(parameter, "full_tensor"):
            return "DTensor (FSDP2 or tensor parallelism)"
    return ""
