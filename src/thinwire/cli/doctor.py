"""``thinwire doctor``: what a bucket can do, how fast, and what a version would take there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import Bar, emit, json_option, percent, plain, print_table, size
from thinwire.cli.exits import exit_code
from thinwire.cli.sizes import size_option

if TYPE_CHECKING:
    from thinwire.doctor import Examination

__all__ = ["doctor"]

_price = click.FloatRange(min=0)


@click.command()
@click.argument("bucket")
@click.option("--full", is_flag=True, help="Run the conformance suite too; needs pytest.")
@click.option(
    "--size",
    "probe_size",
    type=size_option,
    metavar="SIZE",
    default="32MiB",
    show_default=True,
    help="Of the object that throughput is measured with.",
)
@click.option(
    "--model-size",
    type=size_option,
    metavar="SIZE",
    default="1.2GB",
    show_default=True,
    help="Estimate for a bf16 checkpoint of this size.",
)
@click.option("--price-put", type=_price, help="Of 1000 writing requests.")
@click.option("--price-get", type=_price, help="Of 1000 reading requests.")
@click.option("--price-egress-gb", type=_price, help="Of a GB that leaves the store.")
@json_option
@click.pass_context
def doctor(
    context: click.Context,
    bucket: str,
    full: bool,
    probe_size: int,
    model_size: int,
    price_put: float | None,
    price_get: float | None,
    price_egress_gb: float | None,
    as_json: bool,
) -> None:
    """Find out what BUCKET can do, by using it.

    Writes, reads and removes a few objects under doctor/<random>/ in the bucket's prefix. The
    exit status is that of the first step that failed.

    The estimate assumes bf16, 0.5 % or 1 % of the elements changed per version, and 0.9 bytes
    per change; it is the transfer alone. Costs are given where prices are.

    \b
    JSON: bucket, ok, capabilities {claimed, observed (null: not tried)}, missing_key,
      missing_bucket (classes of errors), latency_s {put, create, get, head, list},
      throughput {bytes, up, down (bytes per second)} (null: not measured),
      estimate [{changed (share), payload_bytes, full_bytes, publish_s, pull_s,
      requests {publish, pull}, cost {versions, publisher, replica (each), without
      (prices not given)}}], conformance {passed, failed, skipped, failures}
      (null without --full), findings [{step, ok, detail, error, hint}]
    """
    from thinwire.doctor import examine
    from thinwire.doctor.estimate import Prices

    with Bar("connecting") as bar:
        found = examine(bucket, size=probe_size, full=full, progress=bar)
    rows = found.estimate(model_size, Prices(price_put, price_get, price_egress_gb))
    document = _document(found, rows, probe_size)
    if as_json:
        emit(document)
    else:
        _print(document)
    for finding in found.failed[:1]:
        if finding.error is not None:
            context.exit(exit_code(finding.error))


def _document(found: Examination, rows: list[dict[str, Any]], probe_size: int) -> dict[str, Any]:
    speed = found.speed
    return {
        "bucket": found.url,
        "ok": not found.failed,
        "capabilities": {"claimed": found.claimed, "observed": found.observed},
        "missing_key": found.missing_key,
        "missing_bucket": found.missing_bucket,
        "latency_s": found.latency,
        "throughput": None
        if speed is None
        else {"bytes": probe_size, "up": speed.up, "down": speed.down},
        "estimate": rows,
        "conformance": found.suite,
        "findings": [finding.document() for finding in found.findings],
    }


def _print(document: dict[str, Any]) -> None:
    click.echo(plain(document["bucket"]))
    for finding in document["findings"]:
        mark = "ok  " if finding["ok"] else "FAIL"
        kind = "" if finding["ok"] else f"{finding['error']}: "
        click.echo(plain(f"{mark} {finding['step']}: {kind}{finding['detail']}"))
        if finding["hint"]:
            click.echo(plain(f"       hint: {finding['hint']}"))
    rows = document["estimate"]
    requests = rows[0]["requests"]
    click.echo(
        f"\nper version of a {size(rows[0]['full_bytes'])} bf16 checkpoint, transfer only "
        f"({requests['publish']} requests to publish, {requests['pull']} for each replica):"
    )
    print_table(
        ("changed", "payload", "publish", "pull"),
        [
            (
                percent(row["changed"]),
                size(row["payload_bytes"]),
                _seconds(row["publish_s"]),
                _seconds(row["pull_s"]),
            )
            for row in rows
        ],
    )
    for row in rows:
        if cost := row["cost"]:
            left_out = f" (without {', '.join(cost['without'])})" if cost["without"] else ""
            click.echo(
                f"cost of {cost['versions']} versions at {percent(row['changed'])} changed: "
                f"{cost['publisher']:.4g} to publish, {cost['replica']:.4g} for each replica"
                f"{left_out}"
            )


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.3g} s"
