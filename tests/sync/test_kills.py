"""SIGKILL at random moments of publishing and of pulling: the same again ends at correct bits.

The processes are forked, with the kernels compiled, so that the moments are those of the work
and not of Python starting up.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire import Publisher, Replica
from thinwire.bucket import LocalBucket
from thinwire.disk import DiskMirror

KILLS = 20


@pytest.fixture(scope="module")
def series(kit: SimpleNamespace) -> list[Any]:
    layout = [(f"layer.{n}.weight", "BF16", (250, 400)) for n in range(8)]
    series = [kit.State.random(0, [*layout, ("norm", "F32", (5000,))])]
    for seed in range(1, 6):
        series.append(series[-1].changed(seed, 0.02))
    return series


def publish(folder: Path, series: list[Any]) -> None:
    with Publisher(LocalBucket(folder), series[0].source, max_shard=500_000) as publisher:
        for step, state in enumerate(series[1:], 1):
            publisher.publish(state.source, step=step)


def pull(bucket: Path, folder: Path, **options: Any) -> None:
    with DiskMirror(folder, **options) as mirror:
        Replica(LocalBucket(bucket), mirror).sync()


class Killer:
    """Runs work in children and kills each at a random moment of what the work takes.

    A child that was done by then does not count, and shortens the estimate.
    """

    def __init__(self, kit: SimpleNamespace, seed: int) -> None:
        self.kit, self.rng, self.kills, self.took = kit, random.Random(seed), 0, 0.0

    def time(self, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        assert self.kit.in_child(work) == 0
        self.took = time.perf_counter() - began

    def strike(self, work: Callable[[], None]) -> None:
        part = (self.kills + self.rng.random()) / KILLS
        code = self.kit.in_child(work, kill_after=self.took * part)
        assert code in (0, -9)
        if code == 0:
            self.took *= 0.9
        self.kills += code != 0


def check_versions(kit: SimpleNamespace, bucket: Path, series: list[Any]) -> None:
    """Every version is one of the states, whole."""
    raw = [state.raw for state in series]
    assert all(found in raw for found in kit.history(LocalBucket(bucket)))


def test_publishing_killed_at_random_moments(
    kit: SimpleNamespace, series: list[Any], tmp_path: Path
) -> None:
    publish(tmp_path / "warm-up", series)
    killer = Killer(kit, 20)
    killer.time(lambda: publish(tmp_path / "timing", series))
    while killer.kills < KILLS:
        folder, mirror = tmp_path / "bucket", tmp_path / "mirror"
        killer.strike(lambda folder=folder: publish(folder, series))
        publish(folder, series)
        pull(folder, mirror)
        assert kit.on_disk(mirror) == series[-1].raw
        check_versions(kit, folder, series)
        shutil.rmtree(folder)
        shutil.rmtree(mirror)


def test_publishing_killed_again_and_again(
    kit: SimpleNamespace, series: list[Any], tmp_path: Path
) -> None:
    publish(tmp_path / "warm-up", series)
    killer = Killer(kit, 1)
    killer.time(lambda: publish(tmp_path / "timing", series))
    while killer.kills < KILLS // 2:
        killer.strike(lambda: publish(tmp_path / "bucket", series))
    publish(tmp_path / "bucket", series)
    check_versions(kit, tmp_path / "bucket", series)
    assert kit.pulled(LocalBucket(tmp_path / "bucket")) == series[-1].raw


@pytest.mark.parametrize("swap", [False, True], ids=["in place", "swap"])
@pytest.mark.parametrize("journal_limit", [150_000, 1 << 28], ids=["short", "long"])
def test_pulling_killed_at_random_moments(
    kit: SimpleNamespace, series: list[Any], tmp_path: Path, swap: bool, journal_limit: int
) -> None:
    bucket, folder = tmp_path / "bucket", tmp_path / "mirror"
    publish(bucket, series)
    raw = [state.raw for state in series]

    def work(folder: Path = folder) -> None:
        pull(bucket, folder, swap=swap, journal_limit=journal_limit)

    work(tmp_path / "warm-up")
    killer = Killer(kit, 3)
    killer.time(lambda: work(tmp_path / "timing"))
    while killer.kills < KILLS:
        killer.strike(work)
        if folder.exists():
            with DiskMirror(folder) as mirror:
                if mirror.held is not None:
                    assert kit.held(mirror) == raw[mirror.held.version]
                    mirror.verify()
        work()
        assert kit.on_disk(folder) == raw[-1]
        with DiskMirror(folder) as mirror:
            mirror.verify()
        shutil.rmtree(folder)


def test_pulling_killed_again_and_again(
    kit: SimpleNamespace, series: list[Any], tmp_path: Path
) -> None:
    publish(tmp_path / "bucket", series)
    pull(tmp_path / "bucket", tmp_path / "warm-up")
    killer = Killer(kit, 2)
    killer.time(lambda: pull(tmp_path / "bucket", tmp_path / "timing"))
    while killer.kills < KILLS // 2:
        killer.strike(lambda: pull(tmp_path / "bucket", tmp_path / "mirror"))
        if killer.kills % 4 == 0:  # else it is soon at its end, and nothing is left to kill
            shutil.rmtree(tmp_path / "mirror", ignore_errors=True)
    pull(tmp_path / "bucket", tmp_path / "mirror")
    assert kit.on_disk(tmp_path / "mirror") == series[-1].raw


@pytest.mark.parametrize("command", ["publish", "pull"])
def test_the_command_killed_and_given_again(
    kit: SimpleNamespace, series: list[Any], tmp_path: Path, command: str
) -> None:
    """The same through the command line, killed a little after it has begun to write."""
    pytest.importorskip("thinwire.cli")
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, state in ((old, series[0]), (new, series[1])):
        publish(tmp_path / f"{folder.name}-bucket", [state])
        pull(tmp_path / f"{folder.name}-bucket", folder)
        shutil.rmtree(folder / ".thinwire")

    def thinwire(*args: object, watch: Path, delay: float | None) -> int:
        """Run the command; kill it ``delay`` seconds after ``watch`` has changed."""
        code = "import sys; from thinwire.cli import main; sys.exit(main())"
        before = len(list(watch.rglob("*")))
        child = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if delay is not None:
            while child.poll() is None and len(list(watch.rglob("*"))) == before:
                time.sleep(0.001)
            time.sleep(delay)
            child.kill()
        return child.wait()

    rng = random.Random(4)
    killed = 0
    for number in range(KILLS):
        bucket, mirror = tmp_path / f"bucket-{number}", tmp_path / f"mirror-{number}"
        publish(bucket, series[:1])
        delay = rng.random() * 0.02
        if command == "publish":
            status = thinwire("publish", new, bucket, watch=bucket, delay=delay)
            assert thinwire("publish", new, bucket, watch=bucket, delay=None) == 0
            pull(bucket, mirror)
            assert kit.on_disk(mirror) == series[1].raw
            check_versions(kit, bucket, series)
        else:
            publish(bucket, series)
            status = thinwire("pull", bucket, mirror, watch=mirror, delay=delay * 3)
            assert thinwire("pull", bucket, mirror, watch=mirror, delay=None) == 0
            assert kit.on_disk(mirror) == series[-1].raw
        killed += status == -signal.SIGKILL
    assert killed >= KILLS // 4  # some end before the kill reaches them
