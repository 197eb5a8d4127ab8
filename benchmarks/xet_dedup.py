"""What Xet's deduplication saves when a second anchor is uploaded.

    python benchmarks/xet_dedup.py FIRST SECOND [--json FILE]

FIRST and SECOND are two consecutive states of one model: safetensors files, or folders of them.
Both are uploaded as anchors to a Hub bucket, with the real client, and the bytes that arrive are
counted: xorbs (contents) and shards (what the files are made of). The bucket is on a server in a
process of its own (``tests/servers``): nothing leaves the machine. The second upload runs with the
first one's cache, as a trainer's does. Needs ``requirements/buckets.txt``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


@dataclass(frozen=True)
class Upload:
    """One anchor on its way up.

    Attributes:
        files: how many.
        size: their bytes.
        xorbs: bytes of xorbs that the server received.
        shards: bytes of shards that it received.
        requests: how many it answered.
        seconds: how long it took.
    """

    files: int
    size: int
    xorbs: int
    shards: int
    requests: int
    seconds: float


def files_of(place: Path) -> list[Path]:
    """The safetensors files that a path names."""
    found = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not found or not all(file.is_file() for file in found):
        raise SystemExit(f"no safetensors at {place}")
    return found


def measure(first: Path, second: Path) -> list[Upload]:
    """Upload both, one after the other, and count."""
    with tempfile.TemporaryDirectory() as folder:
        # Before huggingface_hub is imported, which reads them once.
        os.environ.update(HF_HOME=folder, HF_TOKEN="hf_bench", HF_HUB_DISABLE_TELEMETRY="1")
        from servers.hub.process import HubProcess
        from thinwire.bucket.hub import open_hub

        uploads = []
        with contextlib.ExitStack() as running:
            hub = running.enter_context(HubProcess(Path(folder), "--token", "hf_bench=bench"))
            url = f"hf://buckets/bench/run?endpoint={hub.url}"
            bucket = running.enter_context(open_hub(url))
            bucket.put("run.json", b"{}")
            for version, place in enumerate((first, second)):
                files = files_of(place)
                hub.reset()
                start = time.perf_counter()
                for number, file in enumerate(files):
                    bucket.put(f"anchors/{version:010}/model-{number:05}.safetensors", file)
                seconds = time.perf_counter() - start
                stats = hub.stats()
                received = stats["received"]
                uploads.append(
                    Upload(
                        files=len(files),
                        size=sum(file.stat().st_size for file in files),
                        xorbs=received.get("xorb-put", 0),
                        shards=received.get("shard", 0),
                        requests=sum(stats["requests"].values()),
                        seconds=round(seconds, 3),
                    )
                )
        return uploads


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    uploads = measure(options.first, options.second)
    print(f"{'anchor':8}{'bytes':>14}{'as xorbs':>14}{'shards':>10}{'share':>9}{'seconds':>9}")
    for name, upload in zip(("first", "second"), uploads):
        share = (upload.xorbs + upload.shards) / upload.size
        print(
            f"{name:8}{upload.size:14,}{upload.xorbs:14,}{upload.shards:10,}{share:9.1%}"
            f"{upload.seconds:9.2f}"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory of the client: {peak / 1024:,.0f} MiB")
    if options.json:
        options.json.write_text(json.dumps([asdict(upload) for upload in uploads], indent=2) + "\n")


if __name__ == "__main__":
    main()
