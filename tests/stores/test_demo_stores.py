"""``thinwire demo --bucket``: three processes that share nothing but a store over the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from servers.hub.process import HubProcess
from servers.seaweed import SeaweedServer

COMMAND = [sys.executable, "-c", "from thinwire.cli import main; main()", "demo", "--quick"]
BARE = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "HF_"))}


def demo(url: str, folder: Path, environment: Mapping[str, str]) -> None:
    pytest.importorskip("gguf")
    command = [*COMMAND, "--bucket", url, "--report", str(folder / "report"), "--json", "-"]
    done = subprocess.run(
        command, env={**BARE, **environment}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    assert figures["bit_identical"] is True
    assert len(figures["versions"]) >= 8


def test_over_s3(seaweed: SeaweedServer, tmp_path: Path) -> None:
    url = seaweed.bucket_url(seaweed.make_bucket(), "demo")
    demo(url, tmp_path, seaweed.environment())


def test_over_the_hub(tmp_path: Path) -> None:
    """The first write makes the bucket; servers look for it before that."""
    with HubProcess(tmp_path, "--token", "hf_demo=me") as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_demo", "HF_HOME": str(tmp_path / "hf")}
        demo("hf://buckets/me/demo/run-1", tmp_path, settings)


def test_a_missing_s3_bucket_is_told_before_anything_starts(
    seaweed: SeaweedServer, tmp_path: Path
) -> None:
    command = [*COMMAND, "--bucket", seaweed.bucket_url("not-there", "x")]
    environment = {**BARE, **seaweed.environment()}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "no bucket at s3://not-there" in done.stderr
