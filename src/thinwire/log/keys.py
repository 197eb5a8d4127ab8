"""Where things are in a run's prefix. Versions in keys are ten digits, zero-padded."""

from __future__ import annotations

import re

from thinwire.errors import InvalidKey

__all__ = [
    "ANCHORS",
    "COMMITS",
    "DELTAS",
    "MAX_VERSION",
    "RUN",
    "anchor_prefix",
    "anchor_version",
    "commit_key",
    "commit_version",
    "delta_key",
    "delta_version",
]

RUN = "run.json"
COMMITS = "commits/"
DELTAS = "deltas/"
ANCHORS = "anchors/"
MANIFEST = "manifest.json"

MAX_VERSION = 10**10 - 1

_COMMIT = re.compile(r"commits/([0-9]{10})\.json")
_DELTA = re.compile(r"deltas/([0-9]{10})-[0-9a-f]{32}\.safetensors")
_ANCHOR = re.compile(r"anchors/([0-9]{10})-[0-9a-f]{32}/manifest\.json")


def _digits(version: int) -> str:
    if not 0 <= version <= MAX_VERSION:
        raise InvalidKey(f"version {version} is not between 0 and {MAX_VERSION}")
    return f"{version:010d}"


def commit_key(version: int) -> str:
    """Key of the commit whose presence *is* the version."""
    return f"{COMMITS}{_digits(version)}.json"


def delta_key(version: int, sha256: str) -> str:
    """Key of a payload: named by version and content, so that two writers never collide."""
    return f"{DELTAS}{_digits(version)}-{sha256[:32]}.safetensors"


def anchor_prefix(version: int, sha256: str) -> str:
    """Folder of a whole checkpoint, named by version and its manifest's content."""
    return f"{ANCHORS}{_digits(version)}-{sha256[:32]}/"


def _version(pattern: re.Pattern[str], key: str) -> int | None:
    match = pattern.fullmatch(key)
    return int(match[1]) if match else None


def commit_version(key: str) -> int | None:
    """The version a commit key names; None for any other key."""
    return _version(_COMMIT, key)


def delta_version(key: str) -> int | None:
    """The version a payload key names; None for any other key."""
    return _version(_DELTA, key)


def anchor_version(key: str) -> int | None:
    """The version whose anchor this manifest key completes; None for any other key."""
    return _version(_ANCHOR, key)
