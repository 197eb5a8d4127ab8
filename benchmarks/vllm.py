"""Tables of docs/vllm.md from what ``thinwire bench vllm`` measured.

    python benchmarks/vllm.py bench/results/vllm.json docs/vllm.md

rewrites what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in the page.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HELD = {
    "thinwire": "thinwire: scatter",
    "vllm_patches": "vLLM: `load_checkpoint_weight_patches`",
    "load_from_memory": "vLLM: `load_weights`, from memory",
    "load_from_disk": "vLLM: `load_weights`, from files in the system's cache",
}
STEPS = {
    "fetch_s": "fetch (a local bucket)",
    "decode_s": "decode",
    "verify_s": "verify",
    "patch_s": "journal and mirror",
    "stage_s": "stage",
    "paused_s": "held",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def held(document: Mapping[str, Any]) -> str:
    """For how long requests are held, by way of updating."""
    rows = [
        (what, f"{1000 * row['seconds']:.1f}", f"{row['times_thinwire']:.1f}")
        for name, what in HELD.items()
        for row in [document["held"][name]]
    ]
    return table(
        ("requests are held for", f"ms, median of {document['repeat']}", "× thinwire"), rows
    )


def steps(document: Mapping[str, Any]) -> str:
    """Where the time of a version goes."""
    rows = [(what, f"{1000 * document['sync'][name]:.1f}") for name, what in STEPS.items()]
    return table(("a version, step by step", "ms, median"), rows)


def main() -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args()
    document = json.loads(options.json.read_text())
    page = options.page.read_text()
    for name, made in (("held", held(document)), ("steps", steps(document))):
        between = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        page, found = re.subn(between, rf"\g<1>{made}\n\g<2>", page, flags=re.S)
        if found != 1:
            raise SystemExit(f"{options.page} has no place for {name}")
    options.page.write_text(page)


if __name__ == "__main__":
    main()
