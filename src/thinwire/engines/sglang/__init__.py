"""thinwire inside SGLang, through its interface for custom weight loaders. Read, never run.

Start the server and the follower on the same host::

    THINWIRE_MIRROR=/var/lib/mirror THINWIRE_CHECKPOINT=/models/base \\
        python -m sglang.launch_server --model-path /models/base \\
            --custom-weight-loader thinwire.engines.sglang.load

:func:`load` is what SGLang calls in each of its workers; :mod:`thinwire.engines.sglang.follow`
moves the mirror and tells the server. ``docs/sglang.md`` says what is known of which release.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LOAD_FORMAT", "load"]

LOAD_FORMAT = "thinwire.engines.sglang.load"
"""What ``--custom-weight-loader`` and a request's ``load_format`` name."""


def load(model: Any, named_tensors: Any) -> None:
    """Bring this worker to the version that the tensors name; see :mod:`.loader`.

    Raises:
        EnginePoisoned: the weights may be half a version. SGLang then ends the server.
    """
    from thinwire.engines.sglang.loader import this_worker

    this_worker().load(model, named_tensors)
