"""Is what serves what was trained? Compared bit for bit, in three places that share no code path.

The trainer casts its masters with torch, apart from its publisher; a mirror is read from disk with
plain safetensors; an engine reads back the weights it multiplies with, where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire import open_bucket
from thinwire.chain import Chain
from thinwire.demo.proof import folder_sha256
from thinwire.engines.client import UpdateClient

__all__ = ["exact", "prove"]


def prove(
    end: Mapping[str, Any], bucket: str, urls: Mapping[str, str], mirrors: Mapping[str, Path]
) -> dict[str, Any]:
    """Compare the trainer's end with the commit, the mirrors and the engines.

    Args:
        end: what the trainer told: ``version``, ``state_digest`` and ``sha256`` of its masters
            when cast by torch.
        bucket: URL of the run.
        urls, mirrors: of every server, by name.

    Returns:
        ``bit_identical``, ``version``, ``sha256``, ``state_digest``, ``commit`` (the state digest
        of the version), ``mirrors`` (SHA-256 by server), ``engines`` (attestations by server).

    Raises:
        ThinwireError: a server or the bucket does not answer.
    """
    version = int(end["version"])
    with open_bucket(bucket) as store:
        commit = Chain(store).read(version)
    engines = {name: UpdateClient(url).attest() for name, url in urls.items()}
    held = {name: folder_sha256(folder) for name, folder in mirrors.items()}
    same = (
        commit.digest == end["state_digest"]
        and all(sha256 == end["sha256"] for sha256 in held.values())
        and all(exact(answer, version) for answer in engines.values())
    )
    return {
        "bit_identical": same,
        "version": version,
        "sha256": end["sha256"],
        "state_digest": end["state_digest"],
        "commit": commit.digest,
        "mirrors": held,
        "engines": engines,
    }


def exact(answer: Mapping[str, Any], version: int) -> bool:
    """Whether every tensor was read back at this version and is what the commit says."""
    return bool(
        answer["version"] == version
        and answer["exact"]
        and answer["tensors"] > 0
        and not answer["differs"]
        and not answer["not_compared"]
    )
