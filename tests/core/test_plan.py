from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from thinwire.errors import HistoryRewritten, InvalidKey, RollbackRefused, VersionGone
from thinwire.log import keys
from thinwire.log.commit import Commit, Tip
from thinwire.log.plan import Plan, check_child, find_head, plan


class Versions:
    """A log with versions 0 … head (none if head is None) that counts the questions asked."""

    def __init__(self, head: int | None) -> None:
        self.head = head
        self.asked: list[int] = []

    def exists(self, version: int) -> bool:
        assert version >= 0
        self.asked.append(version)
        return self.head is not None and version <= self.head


def test_find_head_for_every_small_log() -> None:
    assert find_head(Versions(None).exists) is None
    for head in range(71):
        assert find_head(Versions(head).exists) == head
        for known in range(head + 1):
            assert find_head(Versions(head).exists, known) == head


@given(st.integers(0, 10**9), st.integers(0, 10**6))
@example(0, 0)
@example(10**6, 0)
def test_questions_grow_with_the_logarithm_of_what_is_new(known: int, new: int) -> None:
    log = Versions(known + new)
    assert find_head(log.exists, known) == known + new
    assert len(log.asked) <= 2 * math.log2(new + 1) + 2
    assert len(log.asked) == len(set(log.asked))
    assert min(log.asked) > known  # what is known is not asked again


def test_in_step_the_head_costs_one_question() -> None:
    log = Versions(41)
    assert find_head(log.exists, 41) == 41
    assert log.asked == [42]


@pytest.mark.parametrize(
    ("held", "target", "anchors", "expected"),
    [
        (3, 5, [0, 4], Plan(None, range(4, 6))),
        (5, 5, [], Plan(None, range(6, 6))),
        (None, 0, [0], Plan(0, range(1, 1))),
        (None, 5, [0], Plan(0, range(1, 6))),
        (None, 5, [4, 0, 7, 2], Plan(4, range(5, 6))),
        (None, 5, iter([5, 6]), Plan(5, range(6, 6))),
    ],
)
def test_plans(held: int | None, target: int, anchors: list[int], expected: Plan) -> None:
    assert plan(held, target, anchors) == expected


@given(
    st.none() | st.integers(0, 30),
    st.integers(0, 30),
    st.sets(st.integers(0, 30), max_size=4),
)
def test_every_plan_ends_at_the_target(held: int | None, target: int, anchors: set[int]) -> None:
    try:
        path = plan(held, target, anchors)
    except RollbackRefused:
        assert held is not None
        assert target < held
    except VersionGone:
        assert held is None
        assert all(anchor > target for anchor in anchors)
    else:
        start = path.anchor if held is None else held
        assert start is not None
        assert path.anchor is None or path.anchor in anchors
        assert list(path.deltas) == list(range(start + 1, target + 1))


PARENT = Tip("a" * 32, 4, "b" * 64)
CHILD = Commit("a" * 32, 5, "b" * 64, "c" * 32, (), "d" * 64)


def test_check_child() -> None:
    assert check_child(CHILD, PARENT) is CHILD
    assert check_child(dataclasses.replace(CHILD, version=0), PARENT._replace(version=-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "e" * 32}, "belongs to run eeee"),
        ({"version": 4}, "does not continue"),
        ({"version": 6}, "does not continue"),
        ({"parent": "e" * 64}, "does not continue"),
    ],
)
def test_children_of_others(change: dict[str, object], message: str) -> None:
    with pytest.raises(HistoryRewritten, match=message):
        check_child(dataclasses.replace(CHILD, **change), PARENT)  # type: ignore[arg-type]


SHA = "0123456789abcdef" * 4


@given(st.integers(0, keys.MAX_VERSION))
@example(0)
@example(keys.MAX_VERSION)
def test_keys_round_trip_and_sort_like_versions(version: int) -> None:
    commit, delta = keys.commit_key(version), keys.delta_key(version, SHA)
    anchor = keys.anchor_prefix(version, SHA) + keys.MANIFEST
    assert keys.commit_version(commit) == version
    assert keys.delta_version(delta) == version
    assert keys.anchor_version(anchor) == version
    assert keys.commit_key(0) <= commit <= keys.commit_key(keys.MAX_VERSION)
    for key, readers in (
        (commit, (keys.delta_version, keys.anchor_version)),
        (delta, (keys.commit_version, keys.anchor_version)),
        (anchor, (keys.commit_version, keys.delta_version)),
    ):
        assert [reader(key) for reader in readers] == [None, None]


def test_keys_are_those_of_the_format_page() -> None:
    assert keys.RUN == "run.json"
    assert keys.commit_key(42) == "commits/0000000042.json"
    assert keys.delta_key(42, SHA) == f"deltas/0000000042-{SHA[:32]}.safetensors"
    assert keys.anchor_prefix(42, SHA) == f"anchors/0000000042-{SHA[:32]}/"


@pytest.mark.parametrize("version", [-1, keys.MAX_VERSION + 1])
def test_versions_that_have_no_key(version: int) -> None:
    for make in (
        keys.commit_key,
        lambda v: keys.delta_key(v, SHA),
        lambda v: keys.anchor_prefix(v, SHA),
    ):
        with pytest.raises(InvalidKey, match="is not between"):
            make(version)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "commits/",
        "commits/42.json",
        "commits/00000000042.json",
        "commits/000000004２.json",
        "commits/٠٠٠٠٠٠٠٠٠٠.json",
        "commits/-000000042.json",
        "commits/0000000042.json\n",
        "commits/0000000042.json.tmp",
        "commits/0000000042.jsonx",
        "commits/0000000042xjson",
        "x/commits/0000000042.json",
        "/commits/0000000042.json",
        f"deltas/0000000042-{SHA[:31]}.safetensors",
        f"deltas/0000000042-{SHA[:31]}A.safetensors",
        f"deltas/0000000042-{SHA}.safetensors",
        f"deltas/٠٠٠٠٠٠٠٠٠٠-{SHA[:32]}.safetensors",
        f"anchors/0000000042-{SHA[:32]}/model.safetensors",
        f"anchors/0000000042-{SHA[:32]}/x/manifest.json",
        f"anchors/0000000042/{SHA[:32]}/manifest.json",
        f"anchors/٠٠٠٠٠٠٠٠٠٠-{SHA[:32]}/manifest.json",
    ],
)
def test_keys_that_name_no_version(key: str) -> None:
    readers = (keys.commit_version, keys.delta_version, keys.anchor_version)
    assert [reader(key) for reader in readers] == [None] * 3
