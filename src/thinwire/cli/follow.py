"""``thinwire follow``: servers are told of every version that appears in a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thinwire.cli.console import emit, json_option, plain
from thinwire.cli.servers import clients, server_options

if TYPE_CHECKING:
    from thinwire.engines.follow import Arrival, Trouble

__all__ = ["follow"]


@click.command()
@click.argument("bucket")
@click.option(
    "--engine",
    type=click.Choice(["vllm"]),
    default="vllm",
    show_default=True,
    help="What the servers are.",
)
@server_options
@click.option(
    "--poll",
    type=click.FloatRange(min=0, min_open=True, max=86_400),
    default=1.0,
    show_default=True,
    help="Seconds between looks into the bucket.",
)
@click.option(
    "--until",
    type=click.IntRange(min=0),
    metavar="VERSION",
    help="End when every server serves this version.",
)
@click.option("--attest", is_flag=True, help="Have every weight read back after each version.")
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    envvar="THINWIRE_PATIENCE",
    show_envvar=True,
    help="Seconds to wait for a first version, and for a bucket that does not answer.",
)
@json_option
def follow(
    bucket: str,
    engine: str,
    urls: tuple[str, ...],
    api_key: str | None,
    timeout: float,
    poll: float,
    until: int | None,
    attest: bool,
    patience: float,
    as_json: bool,
) -> None:
    """Tell serving engines of every new version of the run in BUCKET.

    The servers fetch and prove the versions themselves: they must run thinwire's plugin and follow
    the same bucket. One that is dead or slow holds up no other, and is brought to the newest
    version when it is back; one that an update left half-changed is healed from its mirror. This
    command may be killed at any moment: the servers go on serving.

    \b
    JSON: one line per server and version: url, version, moved, healed, stage_s,
      paused_s, apply_s (null where it did not move), attested {version, exact,
      tensors, differs, not_compared} (null without --attest)
    """
    from thinwire.bucket import open_bucket
    from thinwire.engines.follow import Arrival, Follower

    def report(event: Arrival | Trouble) -> None:
        if not isinstance(event, Arrival):
            hint = f" ({event.hint})" if event.hint else ""
            where = "" if event.url in event.message else f"{event.url}: "
            click.echo(plain(f"{where}{event.message}{hint}"), err=True)
        elif as_json:
            emit(_document(event), line=True)
        else:
            click.echo(plain(_line(event)))

    servers = clients(urls, api_key, timeout)
    Follower(
        open_bucket(bucket),
        servers,
        report,
        poll=poll,
        until=until,
        attest=attest,
        patience=patience,
    ).run()


def _document(event: Arrival) -> dict[str, object]:
    seconds = {key: event.seconds.get(key) for key in ("stage_s", "paused_s", "apply_s")}
    return {
        "url": event.url,
        "version": event.version,
        "moved": event.moved,
        "healed": event.healed,
        **seconds,
        "attested": event.attested,
    }


def _line(event: Arrival) -> str:
    parts = [f"{event.url}: version {event.version}"]
    if event.healed:
        parts.append("healed")
    if event.moved and "stage_s" in event.seconds:
        parts.append(f"staged in {event.seconds['stage_s']:.2f} s")
    if event.moved and "paused_s" in event.seconds:
        parts.append(f"paused {1000 * event.seconds['paused_s']:.1f} ms")
    if not event.moved and not event.healed:
        parts.append("already")
    if event.attested is not None:
        exact = "exact" if event.attested["exact"] else "NOT exact"
        parts.append(f"{event.attested['tensors']} tensors read back, {exact}")
    return ", ".join(parts)
