"""The ``thinwire`` command line.

Results go to stdout, messages and progress to stderr; ``--json`` turns results into JSON. One
module per command, imported when it is run, so that ``thinwire --help`` answers at once.
"""

from __future__ import annotations

import click

import thinwire
from thinwire.cli.exits import MEANINGS
from thinwire.cli.group import LazyCommand, LazyGroup

__all__ = ["main"]

_COMMANDS = {
    "publish": LazyCommand("thinwire.cli.publish:publish", "Publish a checkpoint as a version."),
    "pull": LazyCommand("thinwire.cli.pull:pull", "Bring a mirror folder to a version."),
    "follow": LazyCommand("thinwire.cli.follow:follow", "Tell serving engines of new versions."),
    "attest": LazyCommand(
        "thinwire.cli.attest:attest", "Have serving engines prove their weights."
    ),
    "log": LazyCommand("thinwire.cli.log:log", "List the versions in a bucket."),
    "inspect": LazyCommand("thinwire.cli.inspect:inspect", "Say what a file or folder is."),
    "diff": LazyCommand("thinwire.cli.diff:diff", "Compare two checkpoints bit by bit."),
    "verify": LazyCommand(
        "thinwire.cli.verify:verify", "Check everything a bucket or mirror holds."
    ),
    "doctor": LazyCommand("thinwire.cli.doctor:doctor", "Find out what a bucket can do."),
    "bench": LazyCommand("thinwire.cli.bench:bench", "Measure on this machine."),
    "warmup": LazyCommand("thinwire.cli.warmup:warmup", "Compile every kernel ahead of use."),
    "demo": LazyCommand("thinwire.demo.command:demo", "Train a model and watch it sync.", "demo"),
}

_EXITS = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())


@click.group(
    cls=LazyGroup,
    lazy=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"\b\nExit status:\n{_EXITS}",
)
@click.option(
    "--traceback",
    is_flag=True,
    envvar="THINWIRE_TRACEBACK",
    help="Show the Python traceback of errors, too.",
)
@click.version_option(thinwire.__version__, prog_name="thinwire")
def main(traceback: bool) -> None:
    """LLM weight updates as tiny, bit-exact deltas through an object store.

    A BUCKET is a folder's path or a URL: hf://buckets/…, s3://…, gs://…, az://…
    """
