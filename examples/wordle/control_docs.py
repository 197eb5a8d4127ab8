"""The table of docs/wordle.md from what ``wordle.control`` measured.

    python examples/wordle/control_docs.py wordle-report/control/control.json docs/wordle.md

rewrites what stands between ``<!-- begin control -->`` and ``<!-- end control -->`` in the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wordle.markdown import rewrite, table

__all__ = ["main", "tables"]


def tables(document: Mapping[str, Any]) -> str:
    """Markdown: the verdict in a sentence, what a sync costs, and every sync."""
    costs = _costs(document["verdict"]["costs"])
    return "\n\n".join([_sentence(document), costs, _syncs(document), _setting(document)])


def _sentence(document: Mapping[str, Any]) -> str:
    verdict = document["verdict"]
    count = len(verdict["syncs"])
    if not verdict["identical"]:
        return "**Not identical**: " + "; ".join(verdict["differences"])
    runs = len(verdict["masters"])
    return (
        f"{runs} trainings on the same {document['samples']} samples, {document['parameters']:,} "
        f"weights, {document['steps']} optimizer steps at learning rate {document['lr']:g}: the "
        f"fp32 masters are bit-identical after each of {count} syncs, and so are the "
        f"{verdict['tensors']} tensors that each of {2 * runs} vLLM servers has in memory."
    )


def _setting(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    return (
        f"On {machine['cores']} cores ({machine['architecture']}), every process with one thread. "
        "Bucket and checkpoints are in a local folder, in the system's cache. No request is under "
        "way but where games are played."
    )


def _costs(found: Mapping[str, Any]) -> str:
    delta, full, ratio = found["delta"], found["full"], found["ratio"]
    rows = [
        ("bytes of a version", f"{delta['bytes']:,.0f}", f"{full['bytes']:,.0f}", "bytes"),
        ("a server cannot generate, ms", _ms(delta["held_s"]), _ms(full["held_s"]), "held_s"),
        ("… only while it loads, ms", _ms(delta["held_s"]), _ms(full["load_s"]), "load_s"),
        ("the trainer waits, ms", _ms(delta["wait_s"]), _ms(full["wait_s"]), "wait_s"),
    ]
    body = [(what, d, f, f"{ratio.get(key, 0.0):,.1f}") for what, d, f, key in rows]
    if "live_held_s" in found:
        live = "a server cannot generate, while games are played, ms"
        body.append((live, _ms(found["live_held_s"]), "", ""))
    return table(("a sync, median", "deltas", "whole checkpoints", "ratio"), body)


def _syncs(document: Mapping[str, Any]) -> str:
    delta, full = document["ways"]["delta"], document["ways"]["full"]
    rows = []
    for k, (d, f) in enumerate(zip(delta, full)):
        if k == 0:
            continue
        served = set(document["verdict"]["syncs"][k]["served"].values())
        rows.append(
            (
                str(k),
                f"{100 * d['changed'] / document['parameters']:.2f} %",
                f"{d['bytes']:,}",
                f"{f['bytes']:,}",
                _longest(d),
                _longest(f),
                "yes" if len(served) == 1 else "**no**",
            )
        )
    head = ("version", "changed", "bytes, delta", "bytes, whole")
    return table((*head, "held, delta, ms", "held, whole, ms", "same weights"), rows)


def _longest(sync: Mapping[str, Any]) -> str:
    """Of all servers; one that did not move has not held anything."""
    return _ms(max((s for s in sync["held_s"] if s is not None), default=0.0))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("json", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args(argv)
    document = json.loads(options.json.read_text(encoding="utf-8"))
    rewrite(options.page, {"control": tables(document)})


if __name__ == "__main__":
    main()
