"""Patching a checkpoint that others have mapped: new files beside it, renamed into place.

Whoever maps an old file keeps its bytes. Each shard appears whole; a kill in between leaves some
shards new and some old, which the mirror's journal finishes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from thinwire.checkpoint import Checkpoint
from thinwire.mirror_folder import CONTROL, INCOMING, fsync_file, fsync_folder
from thinwire.patch import Patch, apply_patch
from thinwire.workers import parallel_map

__all__ = ["swap_in"]


def swap_in(checkpoint: Checkpoint, patches: Sequence[Patch]) -> None:
    """Replace the shards of a mirror's checkpoint that the patches change, durably.

    Raises:
        OSError: a file could not be written; shards that were replaced stay so.
    """
    home = {name: shard for shard, h in checkpoint.headers.items() for name in h.entries}
    shards = sorted({home[patch.name] for patch in patches})
    staging = checkpoint.folder / CONTROL / INCOMING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    for shard in shards:
        shutil.copyfile(checkpoint.folder / shard, staging / shard)
    _patch(Checkpoint(staging, {shard: checkpoint.headers[shard] for shard in shards}), patches)
    for shard in shards:
        fsync_file(staging / shard)
        os.replace(staging / shard, checkpoint.folder / shard)
    fsync_folder(checkpoint.folder)
    staging.rmdir()


def _patch(checkpoint: Checkpoint, patches: Sequence[Patch]) -> None:
    """Scatter into the files; their mappings end with this call."""
    mapped = checkpoint.map(write=True)
    parallel_map(lambda patch: apply_patch(mapped[patch.name], patch), patches)
