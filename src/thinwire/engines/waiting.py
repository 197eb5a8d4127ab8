"""A server may be started before its trainer: it waits for a run's first version, and says so."""

from __future__ import annotations

import logging
import time

from thinwire.engines.host import HostMirror
from thinwire.errors import BucketNotFound, RunNotFound

__all__ = ["advance_patiently"]

_LOOK_S = 1.0
_SAY_EVERY_S = 30.0
_log = logging.getLogger("thinwire")


def advance_patiently(host: HostMirror, target: int | None, patience: float) -> None:
    """Like ``host.advance``, but a mirror that holds nothing waits for the run to begin.

    Args:
        patience: seconds.

    Raises:
        RunNotFound, BucketNotFound: there is still none.
        As for :meth:`~thinwire.engines.host.HostMirror.advance`.
    """
    give_up = time.monotonic() + patience
    said = -_SAY_EVERY_S
    while True:
        try:
            host.advance(target)
            return
        except (RunNotFound, BucketNotFound) as error:
            now = time.monotonic()
            if host.version is not None or now >= give_up:
                raise
            if now - said >= _SAY_EVERY_S:
                said = now
                _log.warning(
                    "thinwire: %s; waiting for a first version, %.0f s more", error, give_up - now
                )
        time.sleep(min(_LOOK_S, max(0.0, give_up - time.monotonic())))
