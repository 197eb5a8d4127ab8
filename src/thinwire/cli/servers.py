"""Options of the commands that talk to serving engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from thinwire.engines.client import UpdateClient

__all__ = ["clients", "server_options"]

F = TypeVar("F", bound=Callable[..., Any])


def server_options(command: F) -> F:
    """``--url``, ``--api-key`` and ``--timeout``, as ``urls``, ``api_key`` and ``timeout``."""
    options = (
        click.option(
            "--url",
            "urls",
            multiple=True,
            required=True,
            metavar="URL",
            help="A server, as in http://host:8000; may be given more than once.",
        ),
        click.option(
            "--api-key",
            envvar="VLLM_API_KEY",
            show_envvar=True,
            help="The key that the servers were started with.",
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=300.0,
            show_default=True,
            help="Seconds to wait for a server's answer.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def clients(urls: Sequence[str], api_key: str | None, timeout: float) -> list[UpdateClient]:
    """One client per server, each named once.

    Raises:
        Misuse: a URL that is none, or comes twice.
    """
    from thinwire.engines.client import UpdateClient
    from thinwire.errors import Misuse

    found = [UpdateClient(url, timeout=timeout, token=api_key or None) for url in urls]
    if len({client.url for client in found}) < len(found):
        raise Misuse("a server is named twice", hint="give every --url once")
    return found
