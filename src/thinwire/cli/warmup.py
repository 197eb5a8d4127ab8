"""``thinwire warmup``: compile kernels ahead of use."""

from __future__ import annotations

import time

import click

from thinwire.cli.console import Bar, emit, json_option

__all__ = ["warmup"]


@click.command()
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="A dtype that will be published; may be repeated.  [default: those models are served in]",
)
@json_option
def warmup(dtypes: tuple[str, ...], as_json: bool) -> None:
    """Compile every kernel and keep the result on disk.

    Kernels are otherwise compiled when a dtype is first met. They are kept beside the package, or,
    where that cannot be written, in the folder NUMBA_CACHE_DIR or the user's cache.

    \b
    JSON: dtypes, seconds
    """
    from thinwire.warmup import COMMON, warm_up

    started = time.perf_counter()
    names = dtypes or COMMON
    with Bar("compile") as bar:
        warm_up(names, progress=bar)
    seconds = round(time.perf_counter() - started, 3)
    if as_json:
        emit({"dtypes": list(names), "seconds": seconds})
    else:
        click.echo(f"kernels for {', '.join(names)} are compiled: {seconds:.1f} s")
