"""Config and tokenizer of the model in training, so that a mirror is a loadable checkpoint."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.dtypes import dtype as as_dtype
from thinwire.weights import ServingDtype, names_one

__all__ = ["assets_of"]


@contextlib.contextmanager
def assets_of(model: Any, processing_class: Any, dtype: ServingDtype) -> Iterator[Path | None]:
    """A folder that holds them while the context is open; None if the model has no config.

    They are those of a model that serves, not of one that trains.

    Args:
        model: a transformers model, or any module.
        processing_class: its tokenizer or processor, or None.
        dtype: the serving dtype: if it is one for all tensors, the config names it instead of the
            trainer's.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="thinwire-assets-") as name:
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        if names_one(dtype):
            config.dtype = as_dtype(dtype).torch_name
        if hasattr(config, "use_cache"):
            config.use_cache = True  # training turns it off
        config.save_pretrained(name)
        parts: list[Any] = [getattr(model, "generation_config", None), processing_class]
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(name)
        yield Path(name)
