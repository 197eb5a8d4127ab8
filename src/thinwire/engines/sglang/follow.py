"""Moves a mirror with a run, and an SGLang server with the mirror.

All that may fail for reasons of the network happens here, in a process of its own: fetching,
decoding, verifying. The server only reads what is verified and on its disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.bucket import open_bucket
from thinwire.engines.sglang.client import SGLangClient
from thinwire.replica import Replica

__all__ = ["follow"]


def follow(
    bucket: str,
    mirror: str | Path,
    client: SGLangClient,
    report: Callable[[dict[str, Any]], None] = lambda arrival: None,
    *,
    poll: float = 1.0,
    until: int | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Bring the server to every version as it appears.

    A mirror that holds a version already is not moved before the server has proved its layout
    against it. Ends at the first error; may be started again at any time.

    Args:
        bucket: URL of the run.
        mirror: the server's mirror; nobody else may write it.
        client: of the server.
        report: told what :meth:`SGLangClient.move` returned.
        poll: seconds between looks into the bucket.
        until: end after this version.
        stop: end when it is set.

    Raises:
        What :meth:`SGLangClient.move` and :meth:`~thinwire.replica.Replica.follow` raise.
    """
    with Replica(open_bucket(bucket), Path(mirror)) as replica:
        if replica.version is not None:
            report(client.move(replica.version))
        for update in replica.follow(poll=poll, until=until, stop=stop):
            report(client.move(update.version))
