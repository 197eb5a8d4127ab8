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
    (safetensors, ``from_pretrained``) looks at the same pages. A forked child inherits our own
    mapping, at the same address, and is no one else. Processes of other users, whose maps may not
    be read, are not seen.
    """
    names = {os.fsencode(path.resolve()) for path in paths}
    if not names or not _PROC.is_dir():
        return []
    own = os.getpid()
    ours = _mappings(_PROC / "self" / "maps", names)
    found = [own] if len(ours) > len({name for name, _ in ours}) else []
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit() or int(entry.name) == own:
            continue
        if _mappings(Path(entry.path, "maps"), names) - ours:
            found.append(int(entry.name))
    return sorted(found)


def _mappings(maps: Path, names: set[bytes]) -> set[tuple[bytes, bytes]]:
    """Which of the files a process maps from their start on, and at which addresses."""
    try:
        text = maps.read_bytes()
    except OSError:
        return set()  # gone, or not ours to look at
    if not any(name in text for name in names):
        return set()
    lines = (line.split(maxsplit=5) for line in text.splitlines())
    return {
        (fields[5], fields[0])
        for fields in lines
        if len(fields) == 6 and fields[5] in names and int(fields[2], 16) == 0
    }
