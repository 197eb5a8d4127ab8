"""Who has a file mapped into memory. Linux tells in ``/proc``; elsewhere nobody is found."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["mapped_elsewhere"]

_PROC = Path("/proc")


def mapped_elsewhere(paths: Iterable[Path]) -> list[int]:
    """Processes that map any of the files, apart from this process's own single mapping.

    A file that this process maps more than once counts as mapped by itself: some loader in here
    (safetensors, ``from_pretrained``) looks at the same pages. Processes of other users, whose
    maps may not be read, are not seen.
    """
    names = {os.fsencode(path.resolve()) for path in paths}
    if not names or not _PROC.is_dir():
        return []
    own = os.getpid()
    found = []
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            maps = Path(entry.path, "maps").read_bytes()
        except OSError:
            continue  # gone, or not ours to look at
        counts = [_mappings(maps, name) for name in names]
        pid = int(entry.name)
        if any(count > (pid == own) for count in counts):
            found.append(pid)
    return sorted(found)


def _mappings(maps: bytes, name: bytes) -> int:
    """Mappings of a file from its start on, in the text of a ``maps`` file."""
    if name not in maps:
        return 0
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    return sum(
        1 for fields in lines if len(fields) == 6 and fields[5] == name and int(fields[2], 16) == 0
    )
