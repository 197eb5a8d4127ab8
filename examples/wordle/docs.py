"""Tables and plots of docs/wordle.md from a run.

    python examples/wordle/docs.py wordle-report/run.json docs/wordle.md

rewrites what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in the page, NAME
being run, sync or proof, and writes the plots to the folder ``wordle`` next to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wordle.facts import facts
from wordle.markdown import rewrite, table
from wordle.plots import write_plots
from wordle.proven import proven

__all__ = ["main", "tables"]


def tables(run: Mapping[str, Any]) -> dict[str, str]:
    """Markdown by name, from ``run.json``'s content."""
    f = facts(run)
    return {
        "run": table(
            ("", "measured"),
            (
                ("weights of the model", f["parameters"]),
                ("versions published", f["versions"]),
                ("games played", f["games"]),
                ("games won", f"{f['won']} ({f['won_share']})"),
                ("games trained on", f["trained"]),
                ("games dropped as stale", f["dropped"]),
                ("reward in the first quarter of the steps", f["reward_first"]),
                ("reward in the last quarter", f["reward_last"]),
                ("weights that change per version, mean", f["changed"]),
                (
                    "versions behind the trainer, at most, when a game is taken from the queue",
                    f["staleness"],
                ),
                ("a server holds requests per version, mean", f["mean_pause"]),
                ("a server holds requests per version, longest", f["max_pause"]),
                ("tokens per second, all servers", f["speed"]),
                (
                    "tokens per second of a server, in the second before it has moved to a version "
                    "(the pause is in it)",
                    f["speed_before"],
                ),
                ("… in the second after", f["speed_after"]),
                ("from the first version to the last served", f["run"]),
            ),
        ),
        "sync": table(
            ("", "full checkpoint", "thinwire", "times less"),
            (
                ("a version, mean", f["one_full"], f["payload"], f["ratio"]),
                ("a version, largest", f["one_full"], f["largest_payload"], f["smallest_ratio"]),
                ("the run", f["full"], f["shipped"], f["ratio"]),
            ),
        ),
        "proof": table(
            ("what", "found", ""),
            ((what, f"`{held}`", verdict) for what, held, verdict, _ in proven(run.get("proof"))),
        ),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrite the page, and write the plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("json", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args(argv)
    run = json.loads(options.json.read_text(encoding="utf-8"))
    rewrite(options.page, tables(run))
    write_plots(run, options.page.parent / options.page.stem)


if __name__ == "__main__":
    main()
