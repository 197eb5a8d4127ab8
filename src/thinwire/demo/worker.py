"""``python -m thinwire.demo.worker ROLE``: how the coordinator starts a trainer or a server.

The connection to the coordinator stands before torch is imported, which takes seconds: a process
whose coordinator dies meanwhile must not outlive it.
"""

from __future__ import annotations

import sys

from thinwire.demo.child import Channel, run_child
from thinwire.demo.events import Phase
from thinwire.errors import Misuse

__all__ = ["main"]


def main(role: str) -> None:
    """Run as ``trainer`` or ``server``."""

    def work(channel: Channel) -> None:
        channel.send(Phase("imports torch and transformers"))
        if role == "trainer":
            from thinwire.demo.trainer import train

            train(channel)
        elif role == "server":
            from thinwire.demo.server import serve

            serve(channel)
        else:
            raise Misuse(f"unknown role {role!r}", hint="trainer or server")

    run_child(work)


if __name__ == "__main__":
    main(sys.argv[1])
