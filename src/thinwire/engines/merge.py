"""Several versions in one write: patches of consecutive versions as one patch per tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.patch import Patch

__all__ = ["merge"]


def merge(versions: Sequence[Sequence[Patch]]) -> list[Patch]:
    """Patches of consecutive versions as one per tensor: of each element, its last bits."""
    if len(versions) == 1:
        return list(versions[0])
    found: dict[int, list[Patch]] = {}
    for patches in versions:
        for patch in patches:
            found.setdefault(patch.ordinal, []).append(patch)
    return [_last(patches) for _, patches in sorted(found.items())]


def _last(patches: list[Patch]) -> Patch:
    if len(patches) == 1:
        return patches[0]
    # newest first, so that the first of equal positions is the one to keep
    positions = np.concatenate([patch.positions for patch in reversed(patches)])
    bits = np.concatenate([patch.bits for patch in reversed(patches)])
    unique, first = np.unique(positions, return_index=True)
    return Patch(patches[0].ordinal, patches[0].spec, unique, bits[first])
