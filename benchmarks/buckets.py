"""``thinwire bench bucket`` on every kind of bucket that a server can be started for.

    python benchmarks/buckets.py bench/results/buckets.json docs/buckets.md

starts the tests' servers one after another, measures each, and rewrites the table between
``<!-- begin versions -->`` and ``<!-- end versions -->`` in the page. A server that is not
installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers.azurite import AzuriteServer
from servers.hub.process import HubProcess
from servers.seaweed import SeaweedServer

Place = tuple[str, Mapping[str, str]]
"""A bucket's URL and the environment that a client of it needs."""

COMMAND = [sys.executable, "-c", "from thinwire.cli import main; main()", "bench", "bucket"]
BARE = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "AZURE_", "HF_"))}


@contextlib.contextmanager
def directory(folder: Path) -> Iterator[Place]:
    """A folder on this machine's disk."""
    yield str(folder / "bucket"), {}


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Place]:
    """S3, by SeaweedFS."""
    with SeaweedServer(folder) as server:
        yield server.bucket_url(server.make_bucket(), "bench"), server.environment()


@contextlib.contextmanager
def azure(folder: Path) -> Iterator[Place]:
    """Azure, by Azurite."""
    with AzuriteServer(folder) as server:
        yield server.container_url(server.make_container(), "bench"), server.environment()


@contextlib.contextmanager
def hub(folder: Path, *, gateway: bool) -> Iterator[Place]:
    """The Hub, by the tests' own server."""
    with HubProcess(folder, "--token", "hf_bench=me") as server:
        environment = {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": "hf_bench",
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        url = "hf://buckets/me/bench/runs"
        if gateway:
            environment |= {"AWS_ACCESS_KEY_ID": "HFAKbench", "AWS_SECRET_ACCESS_KEY": "secret"}
            url += f"?create=s3&gateway={server.gateway}"
        yield url, environment


PLACES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Place]]] = {
    "directory": directory,
    "S3 (SeaweedFS)": seaweed,
    "Azure (Azurite)": azure,
    "Hub": lambda folder: hub(folder, gateway=False),
    "Hub, `?create=s3`": lambda folder: hub(folder, gateway=True),
}


def measured(place: Place) -> dict[str, Any]:
    """One run of the command in a process of its own."""
    url, environment = place
    done = subprocess.run(
        [*COMMAND, url, "--json"],
        env={**BARE, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return {key: value for key, value in found.items() if key != "bucket"}


def speed(row: Mapping[str, Any]) -> str:
    """Megabytes per second, and the ratio to plain obstore where that ran beside."""
    ratio = row["ratio"]
    return f"{row['mb_per_s']:.0f}" + (f" ({ratio:.2f} ×)" if ratio is not None else "")


def cost(row: Mapping[str, Any]) -> tuple[str, str]:
    """Requests and milliseconds of a version."""
    return f"{sum(row['requests'].values()):.0f}", f"{row['ms']:.1f}"


def table(results: Mapping[str, dict[str, Any]]) -> str:
    """Markdown."""
    head = "| bucket | put, MB/s | get, MB/s | publish: calls | ms | pull: calls | ms |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    for name, row in results.items():
        cells = (speed(row["put"]), speed(row["get"]), *cost(row["publish"]), *cost(row["pull"]))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, keep the figures, rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args()
    results = {}
    for name, place in PLACES.items():
        with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
            try:
                with place(Path(folder)) as opened:
                    results[name] = measured(opened)
            except RuntimeError as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    page = options.page.read_text()
    between = r"(<!-- begin versions -->\n).*?(<!-- end versions -->)"
    made = re.sub(
        between, lambda found: found[1] + table(results) + "\n" + found[2], page, flags=re.S
    )
    options.page.write_text(made)


if __name__ == "__main__":
    main()
