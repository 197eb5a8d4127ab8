"""Tables and plots of docs/benchmarks.md from what ``thinwire bench codec`` measured.

    python benchmarks/report.py bench/results/codec.json docs/benchmarks.md

rewrites what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in the page, and the
SVG files that the page shows. Nothing is measured or rounded up here.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "thinwire", "font.size": 9, "svg.fonttype": "none"})

import matplotlib.pyplot as plt  # noqa: E402

SCHEMES = {
    "raw": "raw (TRL's layout)",
    "xor_zstd": "dense XOR + zstd-1",
    "gaps_values_zstd": "u16 gaps, values, zstd-1",
    "gaps_xor_zstd": "u16 gaps, XOR, zstd-1",
    "arc_v3_as_shipped": "arc_v3 as shipped",
    "arc_v3": "arc_v3, smallest",
    "packed": "packed",
    "compact": "compact",
}
COLOURS = ("#b8b8b8", "#9aa7b5", "#8196ad", "#6885a5", "#d8a35d", "#c98426", "#4fae8c", "#087f5b")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def size(number: float) -> str:
    return f"{number / 1e6:,.2f} MB" if number >= 1e6 else f"{number / 1e3:,.1f} kB"


def pct(number: float) -> str:
    return f"{100 * number:.3g} %"


def name_of(row: dict[str, Any]) -> str:
    return f"{row['model']}, lr {row['lr']:.0e}".replace("e-0", "e-")


def sizes(d: dict[str, Any]) -> str:
    head = ["pair", "changed", "bound", *SCHEMES.values()]
    rows = [
        [name_of(r), pct(r["share"]), size(r["bound"]["bytes"])]
        + [size(r["sizes"][k]) for k in SCHEMES]
        for r in d["pairs"]
    ]
    return table(head, rows)


def per_change(d: dict[str, Any]) -> str:
    head = ["pair", "changes", "bound", *SCHEMES.values()]
    rows = [
        [name_of(r), f"{r['changed']:,}", f"{r['bound']['bytes'] / r['changed']:.3f}"]
        + [f"{r['per_change'][k]:.3f}" for k in SCHEMES]
        for r in d["pairs"]
    ]
    return table(head, rows)


def ratios(d: dict[str, Any]) -> str:
    head = [
        *("pair", "compact / bound", "raw / compact", "whole model / compact"),
        *("arc_v3 as shipped / compact", "arc_v3 smallest / compact", "arc_v3 smallest / bound"),
    ]
    rows = []
    for r in d["pairs"]:
        s, c = r["sizes"], r["sizes"]["compact"]
        rows.append(
            [
                name_of(r),
                f"{c / r['bound']['bytes']:.4f}",
                f"{s['raw'] / c:.1f}",
                f"{r['bytes'] / c:.0f}",
                f"{s['arc_v3_as_shipped'] / c:.2f}",
                f"{s['arc_v3'] / c:.2f}",
                f"{s['arc_v3'] / r['bound']['bytes']:.2f}",
            ]
        )
    return table(head, rows)


def synthetic(d: dict[str, Any]) -> str:
    head = [
        *("dtype", "changed", "dense", "raw", "packed", "compact", "compact / bound"),
        *("compact enc, MB/s", "compact dec", "packed enc", "packed dec"),
    ]
    rows = []
    for r in d["synthetic"]:
        s = r["sizes"]
        speeds = [
            f"{r['speed'][f'{codec}_{way}']['mb_per_s']:,.0f}"
            for codec in ("compact", "packed")
            for way in ("encode", "decode")
        ]
        rows.append(
            [
                *(r["dtype"], pct(r["density"]), size(r["bytes"])),
                *(size(s["raw"]), size(s["packed"]), size(s["compact"])),
                *(f"{s['compact'] / r['bound']['bytes']:.3f}", *speeds),
            ]
        )
    return table(head, rows)


def drawn(d: dict[str, Any]) -> str:
    r = d["drawn"]
    rows = [[k, size(r["sizes"][k]), f"{r['per_change'][k]:.3f}"] for k in r["sizes"]]
    rows += [
        ["bound", size(r["bound"]["bytes"]), f"{r['bound']['bytes'] / r['changed']:.3f}"],
        ["published by TRL for a 0.6B model", "20–35 MB", ""],
    ]
    return table(["scheme", "bytes per version", "per change"], rows)


STEPS = {
    "copy": "one copy of the checkpoint",
    "compact_encode": "diff + compact encode",
    "compact_decode": "compact decode + verify + apply",
    "packed_encode": "diff + packed encode",
    "packed_decode": "packed decode + verify + apply",
    "raw_encode": "diff + raw encode",
    "raw_decode": "raw decode + verify + apply",
}


def speed(d: dict[str, Any]) -> str:
    head = ["step", "seconds", "× copy", "CPU seconds", "× copy's CPU", "GB/s"]
    steps = d["speed"]["steps"]
    rows = [
        [
            what,
            f"{steps[k]['seconds']:.3f}",
            f"{steps[k]['copies']:.2f}",
            f"{steps[k]['cpu_seconds']:.3f}",
            f"{steps[k]['cpu_copies']:.2f}",
            f"{steps[k]['mb_per_s'] / 1e3:.2f}",
        ]
        for k, what in STEPS.items()
    ]
    return table(head, rows)


def arc(d: dict[str, Any]) -> str:
    head = ["on", "", "arc_v3, s", "compact, s", "times faster", "arc_v3, CPU s", "compact, CPU s"]
    rows = [
        [
            a["on"] if way == "encode" else "",
            way,
            f"{a['arc_v3'][way]['seconds']:.3f}",
            f"{a['compact'][way]['seconds']:.4f}",
            f"{a['times_faster'][way]:.1f}",
            f"{a['arc_v3'][way]['cpu_seconds']:.3f}",
            f"{a['compact'][way]['cpu_seconds']:.4f}",
        ]
        for a in d["speed"]["arc_v3"]
        for way in ("encode", "decode")
    ]
    return table(head, rows)


def targets(d: dict[str, Any]) -> str:
    rows = [
        [
            t["what"],
            f"{t['value']:,.0f}" if t["value"] >= 1e3 else f"{t['value']:.4g}",
            f"{'≤' if t['kind'] == 'most' else '≥'} {t['limit']:,g}",
            "met" if t["met"] else "**missed**",
        ]
        for t in d["targets"]
    ]
    return table(["target", "value", "limit", ""], rows)


def change_shares(d: dict[str, Any]) -> str:
    steps = (0, 1, 4, 9, 19)
    rows = [
        [name_of(r)]
        + [pct(r["shares"][k]) if k < len(r["shares"]) else "" for k in steps]
        + [pct(1 - r["shares"][-1])]
        for r in d["changed_shares"]
    ]
    return table(["run", *(f"step {k + 1}" for k in steps), "identical at the last step"], rows)


TABLES = {
    "sizes": sizes,
    "per-change": per_change,
    "ratios": ratios,
    "synthetic": synthetic,
    "drawn": drawn,
    "speed": speed,
    "arc": arc,
    "targets": targets,
    "shares": change_shares,
}


def plot_shares(d: dict[str, Any], file: Path) -> None:
    """Changed share by step, and at the last step by learning rate."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained")
    rates = sorted({r["lr"] for r in d["changed_shares"]})
    colours = dict(zip(rates, plt.cm.viridis([k / max(1, len(rates)) for k in range(len(rates))])))
    styles = dict(zip(sorted({r["model"] for r in d["changed_shares"]}), ("-", "--", ":")))
    for r in d["changed_shares"]:
        left.plot(
            range(1, len(r["shares"]) + 1),
            [100 * s for s in r["shares"]],
            styles[r["model"]],
            color=colours[r["lr"]],
            label=name_of(r),
        )
    for model, style in styles.items():
        mine = sorted(
            (r["lr"], r["shares"][-1]) for r in d["changed_shares"] if r["model"] == model
        )
        at, values = [lr for lr, _ in mine], [100 * share for _, share in mine]
        right.plot(at, values, style, color="0.5", zorder=1)
        right.scatter(at, values, color=[colours[lr] for lr in at], zorder=2)
        right.annotate(model, (at[0], values[0]), (9, -8), textcoords="offset points")
    left.set(xlabel="optimizer step", ylabel="bf16 weights that change, %", yscale="log")
    right.set(xlabel="learning rate (last step)", xscale="log", yscale="log")
    right.axhspan(1, 2, color="0.9", zorder=0)
    right.text(rates[-1], 1.4, "1–2 %", ha="right", va="center", color="0.4")
    left.set_xticks([1, 5, 10, 15, 20])
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    save(figure, file)


def plot_sizes(d: dict[str, Any], file: Path) -> None:
    """Bytes per changed element of every scheme and pair, with the bound."""
    figure, axes = plt.subplots(figsize=(8.4, 4), layout="constrained")
    width = 0.9 / len(SCHEMES)
    for k, (scheme, label) in enumerate(SCHEMES.items()):
        at = [i + (k - len(SCHEMES) / 2 + 0.5) * width for i in range(len(d["pairs"]))]
        heights = [r["per_change"][scheme] for r in d["pairs"]]
        axes.bar(at, heights, width, color=COLOURS[k], label=label)
    for i, r in enumerate(d["pairs"]):
        limit = r["bound"]["bytes"] / r["changed"]
        label = "order-0 bound" if i == 0 else None
        axes.hlines(limit, i - 0.47, i + 0.47, color="#c92a2a", linewidth=1, label=label)
    axes.set(ylabel="bytes per changed element", xticks=range(len(d["pairs"])))
    names = [f"{r['model']}\nlr {r['lr']:.0e}\n{pct(r['share'])}" for r in d["pairs"]]
    axes.set_xticklabels([name.replace("e-0", "e-") for name in names], fontsize=7)
    figure.legend(loc="outside upper center", ncols=5, fontsize=8)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    # matplotlib ends lines with blanks
    file.write_text("\n".join(line.rstrip() for line in file.read_text().splitlines()) + "\n")


def fill(page: str, name: str, content: str) -> str:
    """The page with what stands between the markers of ``name`` replaced."""
    pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    filled, count = re.subn(pattern, lambda m: f"{m[1]}{content}\n{m[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"the page has {count} places for {name!r}")
    return filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args()
    document = json.loads(options.results.read_text())
    page = options.page.read_text()
    for name, make in TABLES.items():
        page = fill(page, name, make(document))
    options.page.write_text(page)
    images = options.page.parent / "images"
    plot_shares(document, images / "changed-share.svg")
    plot_sizes(document, images / "codec-sizes.svg")


if __name__ == "__main__":
    main()
