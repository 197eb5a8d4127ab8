"""thinwire: LLM weight updates as tiny, bit-exact deltas through an object store.

::

    from thinwire import Publisher, Replica, open_bucket

    publisher = Publisher(open_bucket(url), model, assets="checkpoint/")
    publisher.publish(model, step=42)

    replica = Replica(open_bucket(url), mirror="mirror/")
    for update in replica.follow():
        engine.apply(update)

Names are loaded when they are first used: importing thinwire imports neither numba nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.bucket import Bucket, open_bucket
    from thinwire.disk import DiskMirror
    from thinwire.errors import ThinwireError
    from thinwire.mirror import MemoryMirror
    from thinwire.publisher import Publisher
    from thinwire.receipt import Receipt
    from thinwire.replica import Replica
    from thinwire.update import Update

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "DiskMirror",
    "MemoryMirror",
    "Publisher",
    "Receipt",
    "Replica",
    "ThinwireError",
    "Update",
    "open_bucket",
]

_HOMES = {
    "Bucket": "bucket",
    "DiskMirror": "disk",
    "MemoryMirror": "mirror",
    "Publisher": "publisher",
    "Receipt": "receipt",
    "Replica": "replica",
    "ThinwireError": "errors",
    "Update": "update",
    "open_bucket": "bucket",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
