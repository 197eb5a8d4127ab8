"""A Hub in a process of its own: ``python -m servers.hub --port 8765 --token hf_secret=me``."""

from __future__ import annotations

import argparse

from servers.hub.access import parse_account
from servers.hub.hub import Hub
from servers.hub.server import HubServer


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="servers.hub", description=__doc__)
    parser.add_argument("--port", type=int, default=8765, help="0 takes a free one")
    parser.add_argument(
        "--token",
        action="append",
        default=[],
        type=parse_account,
        metavar="TOKEN=NAME[:read]",
        help="an account: its token, its name and what it may do; may be repeated",
    )
    parser.add_argument("--page", type=int, default=1000, help="entries per page of a listing")
    parser.add_argument("--ttl", type=float, default=3600, help="seconds a Xet token is good for")
    parser.add_argument("--direct", action="store_true", help="resolve without a redirect")
    options = parser.parse_args()
    hub = Hub(options.token, page=options.page, ttl=options.ttl, redirect=not options.direct)
    server = HubServer(hub, options.port)
    print(server.started(), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
