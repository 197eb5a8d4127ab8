"""Decisions about the log, as functions of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from thinwire.errors import HistoryRewritten, RollbackRefused, VersionGone
from thinwire.log.commit import Commit, Tip

__all__ = ["Plan", "check_child", "find_head", "plan"]


def find_head(exists: Callable[[int], bool], known: int | None = None) -> int | None:
    """The newest version, with O(log n) questions.

    Gallops: asks for versions 1, 2, 4 … past the known one until one is missing, then bisects. A
    follower that is one version behind asks twice.

    Args:
        exists: whether a version's commit is there. Versions have no gaps.
        known: a version that is known to exist; None if not even version 0 is.
    """
    if known is None:
        if not exists(0):
            return None
        known = 0
    low, stride = known, 1
    while exists(low + stride):
        low += stride
        stride = low - known
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Plan:
    """How to reach a version: from an anchor, or from what is held, then delta by delta.

    Attributes:
        anchor: version of the anchor to start from; None to start from what is held.
        deltas: versions whose deltas are then applied, in order.
    """

    anchor: int | None
    deltas: range


def plan(held: int | None, target: int, anchors: Iterable[int]) -> Plan:
    """The path from the held version to the target.

    Args:
        held: the version at hand; None when there is none.
        target: the wanted version.
        anchors: versions that have a complete anchor.

    Raises:
        RollbackRefused: the target is older than what is held.
        VersionGone: nothing is held and no anchor is old enough.
    """
    if held is not None:
        if target < held:
            raise RollbackRefused(f"version {target} is older than version {held}, which is held")
        return Plan(None, range(held + 1, target + 1))
    usable = [version for version in anchors if version <= target]
    if not usable:
        raise VersionGone(f"no anchor leads to version {target}")
    return Plan(max(usable), range(max(usable) + 1, target + 1))


def check_child(child: Commit, parent: Tip) -> Commit:
    """Return ``child`` if it continues ``parent``.

    Raises:
        HistoryRewritten: it belongs to another run, or its parent is not the one seen before.
    """
    version = parent.version + 1
    if child.run != parent.run:
        raise HistoryRewritten(f"version {version} belongs to run {child.run}, not {parent.run}")
    if child.version != version or child.parent != parent.hash:
        raise HistoryRewritten(f"version {version} does not continue the history seen before")
    return child
