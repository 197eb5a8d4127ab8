"""vLLM's own reloading in place, as far as it repeats what the engine's start has done.

vLLM restores each layer's parameters as they were before processing, loads them, processes them
again (quantising, packing), and copies the outcome into the memory in use. thinwire tries that
before it relies on it: see :mod:`thinwire.engines.reload`. What is used of vLLM, besides
:mod:`thinwire.engines.vllm.versions`:

==================  ==========================================================================
what                where it is in vLLM
==================  ==========================================================================
reloading           ``model_executor.model_loader.reload``: ``initialize_layerwise_reload``,
                    ``finalize_layerwise_reload``, ``layerwise.get_layerwise_info``
experts' kernels    ``quant_method.moe_kernel`` of a layer of experts
==================  ==========================================================================

On the CPU, a layer of experts packs its weights only while it has no kernel yet; vLLM's own
reloading leaves them unpacked, and the model wrong. Here the kernel is made anew.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.engines.regions import storage_of
from thinwire.engines.vllm.versions import configured

__all__ = ["LayerwiseReloader"]


class LayerwiseReloader:
    """A :class:`~thinwire.engines.reload.Reloader` of one worker's model."""

    def __init__(self, vllm_config: Any, model: torch.nn.Module) -> None:
        self._config = vllm_config
        self._model: Any = model

    def load(
        self, weights: Iterable[tuple[str, torch.Tensor]], filled: set[str] | None = None
    ) -> None:
        """Load a whole checkpoint; see :class:`~thinwire.engines.reload.Reloader`."""
        from vllm.model_executor.model_loader import reload

        model = self._model
        slots = _Slots(model)
        try:
            with configured(self._config), torch.no_grad(), _quiet():
                _forget_packed_experts(model)
                reload.initialize_layerwise_reload(model)
                watch = contextlib.nullcontext() if filled is None else _Fills(model, filled)
                with watch:
                    model.load_weights(weights)
                reload.finalize_layerwise_reload(model, self._config.model_config)
        except BaseException:
            slots.restore()
            raise


class _Slots:
    """A model's parameters and buffers, to put back if a reload does not come to its end."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            (child, dict(child._parameters), dict(child._buffers)) for child in model.modules()
        ]
        self._fleeting = [set(child._non_persistent_buffers_set) for child in model.modules()]

    def restore(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for (child, parameters, buffers), fleeting in zip(self._modules, self._fleeting):
            child._parameters.clear()
            child._parameters.update(parameters)
            child._buffers.clear()
            child._buffers.update(buffers)
            child._non_persistent_buffers_set = fleeting
            get_layerwise_info(child).reset()


class _Fills(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which parameters a loader copies into; vLLM does so without memory first."""

    def __init__(self, model: torch.nn.Module, filled: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._filled = filled
        self._kept = [*model.named_parameters(), *model.named_buffers()]
        self._names = {storage_of(tensor): name for name, tensor in self._kept}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            name = self._names.get(storage_of(args[0]))
            if name is not None:
                self._filled.add(name)
        return func(*args, **(kwargs or {}))


def _forget_packed_experts(model: torch.nn.Module) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for child in model.modules():
        method: Any = getattr(child, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """vLLM warns of each layer without weights of its own, such as rotary embeddings."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
