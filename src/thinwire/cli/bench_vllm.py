"""``thinwire bench vllm``: how long a real vLLM holds requests for a version."""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from thinwire.cli.console import Bar, count, percent, print_table

__all__ = ["vllm"]

_WAYS = {
    "thinwire": "thinwire: scatter",
    "vllm_patches": "vLLM: load_checkpoint_weight_patches",
    "load_from_memory": "vLLM: load_weights, from memory",
    "load_from_disk": "vLLM: load_weights, from files in the cache",
}

_STEPS = {
    "fetch_s": "fetch",
    "decode_s": "decode",
    "verify_s": "verify",
    "patch_s": "journal and mirror",
    "stage_s": "stage",
    "paused_s": "held",
}


@click.command()
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report to this file, too.",
)
@click.option("--quick", is_flag=True, help="20 M parameters in place of 596 M.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Versions; medians are shown.",
)
@click.option(
    "--density",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.01,
    show_default=True,
    help="Share of elements that change, at random positions.",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to make a scratch folder of 4 GB; the system's own place for them otherwise.",
)
def vllm(file: Path | None, quick: bool, repeat: int, density: float, folder: Path | None) -> None:
    """Time updates of an engine that runs Qwen3-0.6B's shape: thinwire's and vLLM's own.

    Runs where vLLM is installed. Requests are held while a version is applied; what is timed is
    that, for every way on the same version in the same process, in changing order.

    \b
    JSON: environment, model, parameters, bytes, changed, density, repeat,
      held {thinwire, vllm_patches, load_from_memory, load_from_disk: {seconds
      (median), all, times_thinwire}}, sync {fetch_s, decode_s, verify_s, patch_s,
      stage_s, paused_s} (medians), attested, target (vllm_patches over thinwire,
      at least), target_met
    """
    from thinwire.errors import Misuse

    if find_spec("vllm") is None:
        raise Misuse(
            "vLLM is not installed here", hint="run this in an environment with vLLM and thinwire"
        )
    from thinwire.engines.vllm.bench import measure

    with tempfile.TemporaryDirectory(dir=folder) as scratch, Bar("starting") as bar:
        document = measure(Path(scratch), quick=quick, density=density, repeat=repeat, progress=bar)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n")
    _print(document)


def _print(document: dict[str, Any]) -> None:
    changed = f"{count(document['changed'])} changed ({percent(document['density'])})"
    click.echo(f"{document['model']}, {changed}, median of {document['repeat']} versions\n")
    held = document["held"]
    print_table(
        ("requests are held for", "ms", "× thinwire"),
        [
            (what, f"{1000 * held[way]['seconds']:.1f}", f"{held[way]['times_thinwire']:.1f}")
            for way, what in _WAYS.items()
        ],
    )
    click.echo()
    print_table(
        ("a version, step by step", "ms"),
        [(what, f"{1000 * document['sync'][key]:.1f}") for key, what in _STEPS.items()],
    )
    met = "met" if document["target_met"] else "MISSED"
    click.echo(f"\ntarget: {document['target']:g} times vLLM's own patches: {met}")
