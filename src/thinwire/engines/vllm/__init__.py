"""thinwire inside vLLM: a plugin, a weight transfer engine, and routes on its API server.

Start the server next to an installed thinwire with::

    THINWIRE_BUCKET=s3://… THINWIRE_MIRROR=/var/lib/mirror VLLM_PLUGINS=thinwire \\
        vllm serve /var/lib/mirror --weight-transfer-config '{"backend": "thinwire"}'

========================  ==================================================================
``THINWIRE_BUCKET``       URL of the run: the server catches up with it before it serves
``THINWIRE_MIRROR``       folder of this host's mirror
``THINWIRE_UNPROVEN``     what to do about tensors that cannot be proved to be where the layout
                          says. ``reload``, the default: reload the model where they change, if
                          that passes a trial, else refuse to start. ``refuse``: do not try.
                          ``freeze``: leave them alone, and refuse versions that change them
``THINWIRE_PATIENCE``     seconds to wait at the start for a run that has no version yet; 300
``THINWIRE_PAUSE_LIMIT``  seconds that ranks may take to answer while requests are held; 120.
                          After that the engine is poisoned: it serves nothing until healed
========================  ==================================================================

``VLLM_PLUGINS`` names the plugin because vLLM adds routes only for plugins that are named; without
it, everything but the routes works. vLLM loads the plugin in every one of its processes, more than
once: both functions here are cheap, and harmless when called again.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BACKEND", "endpoints", "register"]

BACKEND = "thinwire"
"""What ``--weight-transfer-config`` calls the engine."""


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: make the engine known."""
    from thinwire.engines.vllm import versions

    versions.register_engine(BACKEND, "thinwire.engines.vllm.engine", "ThinwireEngine")
    versions.keep_plain_weights(BACKEND)


def endpoints() -> Any:
    """Entry point of the group ``vllm.endpoint_plugins``: the API server's further routes."""
    from thinwire.engines.vllm.routes import Routes

    return Routes()
