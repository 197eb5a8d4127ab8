"""Is what serves what was trained? Compared bit for bit, in three places that share no code path.

The trainer casts its masters with torch, apart from its publisher; a mirror is read from disk with
plain safetensors; an engine reads back the weights it multiplies with, where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire import open_bucket
from thinwire.chain import Chain
from thinwire.demo.proof import folder_sha256
from thinwire.engines.client import UpdateClient
from thinwire.errors import ThinwireError
from wordle.proven import proven

__all__ = ["prove"]

Say = Callable[[str], None]


def prove(
    end: Mapping[str, Any],
    bucket: str,
    urls: Mapping[str, str],
    mirrors: Mapping[str, Path],
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Compare the trainer's end with the commit, the mirrors and the engines.

    What cannot be read, or does not answer, is not identical.

    Args:
        end: what the trainer told: ``version``, ``state_digest`` and ``sha256`` of its masters
            when cast by torch, and how many ``tensors`` they are.
        bucket: URL of the run.
        urls, mirrors: of every server, by name.
        say: told why something cannot be read.

    Returns:
        ``bit_identical``, ``version``, ``sha256``, ``state_digest``, ``tensors``, ``commit`` (the
        state digest of the version), ``mirrors`` (SHA-256 by server), ``engines`` (attestations by
        server, or their ``error``).
    """
    version = int(end["version"])
    proof = {
        "version": version,
        "sha256": end["sha256"],
        "state_digest": end["state_digest"],
        "tensors": int(end["tensors"]),
        "commit": _committed(bucket, version, say),
        "mirrors": {name: _held(folder, say) for name, folder in mirrors.items()},
        "engines": {name: _attested(url) for name, url in urls.items()},
    }
    complete = bool(urls) and urls.keys() == mirrors.keys()
    same = complete and all(good is not False for *_, good in proven(proof))
    return {"bit_identical": same, **proof}


def _committed(bucket: str, version: int, say: Say) -> str | None:
    try:
        with open_bucket(bucket) as store:
            return Chain(store).read(version).digest
    except ThinwireError as error:
        say(f"version {version} cannot be read: {error}")
        return None


def _held(mirror: Path, say: Say) -> str | None:
    try:
        return folder_sha256(mirror)
    except (OSError, ValueError) as error:
        say(f"{mirror} cannot be read: {error}")
        return None


def _attested(url: str) -> dict[str, Any]:
    try:
        return UpdateClient(url).attest()
    except ThinwireError as error:
        return {"error": str(error)}
