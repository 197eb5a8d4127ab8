"""``thinwire attest``: serving engines read their weights back and compare them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import count, emit, json_option, plain
from thinwire.cli.servers import clients, server_options

if TYPE_CHECKING:
    from thinwire.engines.client import UpdateClient
    from thinwire.errors import ThinwireError

__all__ = ["attest"]

_SHOWN = 10


@click.command()
@server_options
@json_option
def attest(urls: tuple[str, ...], api_key: str | None, timeout: float, as_json: bool) -> None:
    """Have serving engines prove that their memory is the version they say they serve.

    Every weight is read back on every rank, summed up where it lies, and compared with the
    version's digests. A server generates nothing while it reads. The exit status is 4 if a weight
    differs anywhere.

    \b
    JSON: exact, servers [{url, version, exact, tensors (compared), differs
      [names], not_compared [names: reloaded, or left alone], reloaded}] or
      {url, error} for a server that does not answer
    """
    from thinwire.errors import ThinwireError

    def ask(client: UpdateClient) -> dict[str, Any] | ThinwireError:
        try:
            return {"url": client.url, **client.attest()}
        except ThinwireError as error:
            return error

    servers = clients(urls, api_key, timeout)
    with ThreadPoolExecutor(len(servers)) as pool:
        found = list(pool.map(ask, servers))
    answers = [answer for answer in found if isinstance(answer, dict)]
    exact = len(answers) == len(found) and all(answer["exact"] for answer in answers)
    if as_json:
        rows = [
            answer if isinstance(answer, dict) else {"url": client.url, "error": str(answer)}
            for client, answer in zip(servers, found)
        ]
        emit({"exact": exact, "servers": rows})
    else:
        for answer in answers:
            _show(answer)
    if not all(answer["exact"] for answer in answers):
        from thinwire.cli.exits import RESYNC

        for error in (answer for answer in found if not isinstance(answer, dict)):
            click.echo(plain(str(error)), err=True)
        click.get_current_context().exit(RESYNC)
    for error in (answer for answer in found if not isinstance(answer, dict)):
        raise error


def _show(answer: dict[str, Any]) -> None:
    what = f"version {answer['version']}, {count(answer['tensors'])} tensors read back"
    left = f", {count(len(answer['not_compared']))} not compared" if answer["not_compared"] else ""
    if answer.get("reloaded"):
        left += f", {count(answer['reloaded'])} unchanged since they were reloaded"
    differs = answer["differs"]
    verdict = "all exact" if answer["exact"] else f"{count(len(differs))} differ"
    if not answer["exact"] and not differs:
        verdict = "its ranks are at different versions"
    click.echo(plain(f"{answer['url']}: {what}{left}: {verdict}"))
    for name in differs[:_SHOWN]:
        click.echo(plain(f"  differs: {name}"))
    if len(differs) > _SHOWN:
        click.echo(f"  and {count(len(differs) - _SHOWN)} more")
