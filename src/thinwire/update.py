"""What a replica hands to an engine: a version that is there now, and what it changed."""

from __future__ import annotations

from dataclasses import dataclass, fields

from thinwire.log.commit import Commit
from thinwire.patch import Patch, StepPatch

__all__ = ["Update", "UpdateStats"]


@dataclass(frozen=True)
class UpdateStats:
    """Where the time of one version went, and what it moved.

    Attributes:
        payload_bytes: bytes of payloads (or of the anchor) fetched.
        changed: elements changed.
        fetch_s, decode_s, verify_s, patch_s: seconds; fetching overlaps with the rest when
            several versions are caught up with.
    """

    payload_bytes: int = 0
    changed: int = 0
    fetch_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0
    patch_s: float = 0.0

    def __add__(self, other: UpdateStats) -> UpdateStats:
        """Of several versions together."""
        return UpdateStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Update:
    """A version that the mirror now holds.

    Attributes:
        version: the new version.
        patches: what changed since the version before, in schema order; None when the mirror was
            loaded from a whole checkpoint: reload from the mirror then. Without a mirror they may
            be steps, and None means that the engine must hold this version already.
        commit: the version's commit.
        stats: bytes and seconds.
    """

    version: int
    patches: tuple[Patch | StepPatch, ...] | None
    commit: Commit
    stats: UpdateStats
