"""The mirror on disk: killed, torn, damaged, full, mapped, locked. It is always a whole version."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import thinwire.disk
import thinwire.mirror
from thinwire import Publisher, Replica
from thinwire.bucket import MemoryBucket
from thinwire.disk import DiskMirror
from thinwire.errors import (
    DigestMismatch,
    MirrorBusy,
    MirrorCorrupt,
    MirrorInUse,
    Misuse,
    ThinwireError,
)
from thinwire.journal import Journal
from thinwire.mirror import MemoryMirror
from thinwire.mirror_folder import locked
from thinwire.patch import Patch, apply_patch

JOURNAL = Path(".thinwire/journal")

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="who maps a file is told by Linux only"
)


@pytest.fixture
def bucket(kit: SimpleNamespace, states: list[Any]) -> MemoryBucket:
    """A run with versions 0 to 3, in two shards."""
    bucket = MemoryBucket()
    kit.start_run(bucket, *states[:4], max_shard=1000).close()
    return bucket


@pytest.fixture
def at_1(bucket: MemoryBucket, tmp_path: Path) -> Path:
    """A mirror at version 1, closed properly."""
    with Replica(bucket, tmp_path / "at_1") as replica:
        replica.sync(1)
    return tmp_path / "at_1"


@pytest.fixture
def unfinished(kit: SimpleNamespace, bucket: MemoryBucket, at_1: Path, tmp_path: Path) -> Path:
    """A mirror at version 3 whose process died: versions 2 and 3 are in the journal."""
    folder = tmp_path / "unfinished"
    shutil.copytree(at_1, folder)

    def work() -> None:
        Replica(bucket, folder).sync()
        os._exit(42)

    assert kit.in_child(work) == 42
    assert (folder / JOURNAL).stat().st_size
    return folder


def check(kit: SimpleNamespace, folder: Path, states: list[Any]) -> int | None:
    """Open a mirror: it is whole, and its bits are those of the version it says it holds."""
    with DiskMirror(folder) as mirror:
        if mirror.held is None:
            return None
        mirror.verify()
        assert kit.held(mirror) == states[mirror.held.version].raw
        version = mirror.held.version
    assert kit.on_disk(folder) == states[version].raw
    assert (folder / JOURNAL).stat().st_size == 0
    return version


# --- crashes at every step -----------------------------------------------------------------


@pytest.fixture
def _nobody_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through all processes at every one of thousands of updates would take minutes."""
    monkeypatch.setattr(thinwire.disk, "mapped_elsewhere", lambda _: [])


class Steps:
    """Counts the steps that touch the disk, and does something terrible at one of them."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at, self.act, self.seen = at, act, 0
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self.seen += 1
            strike = self.seen == self.at
        if strike:
            self.act()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.step()
            result = function(*args, **kwargs)
            self.step()
            return result

        return wrapped

    def half_patch(self, target: Any, patch: Patch) -> None:
        half = len(patch) // 2
        self.step()
        apply_patch(
            target, replace(patch, positions=patch.positions[:half], bits=patch.bits[:half])
        )
        self.step()
        apply_patch(target, patch)
        self.step()

    def half_write(self, journal: Journal, data: memoryview) -> None:
        half = data.nbytes // 2
        for part in (data[:half], data[half:]):
            journal._file.write(part)
            self.step()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(os, "fsync", self.around(os.fsync))
        patch.setattr(os, "replace", self.around(os.replace))
        patch.setattr(shutil, "copyfile", self.around(shutil.copyfile))
        patch.setattr(pathlib.Path, "unlink", self.around(pathlib.Path.unlink))
        patch.setattr(Journal, "clear", self.around(Journal.clear))
        patch.setattr(Journal, "_write", lambda journal, data: self.half_write(journal, data))
        patch.setattr(thinwire.mirror, "apply_patch", self.half_patch)


SCENARIOS = [
    "first pull",
    "pull on",
    "pull on, checkpointing each version",
    "pull on with swap",
    "recover",
    "recover with swap",
    "adopt another run",
]


def scenario(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    at_1: Path,
    unfinished: Path,
    name: str,
) -> tuple[Path | None, Callable[[Path], None], MemoryBucket, list[Any], set[int | None]]:
    """Where it starts, what is done, the bucket to go on with, its states, versions allowed."""
    if name == "adopt another run":
        other = MemoryBucket()
        kit.start_run(other, *states[2::-1], max_shard=400).close()

        def adopt(folder: Path) -> None:
            with Replica(other, folder, adopt=True) as replica:
                replica.sync()

        return at_1, adopt, other, states[2::-1], {None, 0, 1, 2}
    options: dict[str, Any] = {}
    if "swap" in name:
        options["swap"] = True
    if "checkpointing" in name:
        options["journal_limit"] = 0

    def pull(folder: Path) -> None:
        with DiskMirror(folder, **options) as mirror:
            Replica(bucket, mirror).sync()

    if name == "first pull":
        return None, pull, bucket, states, {None, 0, 1, 2, 3}
    if name.startswith("recover"):
        return unfinished, pull, bucket, states, {3}
    return at_1, pull, bucket, states, {1, 2, 3}


@pytest.mark.usefixtures("_nobody_maps")
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("how", ["killed", "I/O error", "interrupted"])
def test_whatever_happens_at_any_step_leaves_a_whole_version(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    at_1: Path,
    unfinished: Path,
    tmp_path: Path,
    how: str,
    name: str,
) -> None:
    start, work, source, truth, allowed = scenario(kit, states, bucket, at_1, unfinished, name)
    reached: set[int | None] = set()
    steps = 0
    stride = 1 if how == "killed" else 3
    for at in itertools.count(1, stride):
        folder = tmp_path / f"mirror-{at}"
        if start is not None:
            shutil.copytree(start, folder)
        if not struck(kit, work, folder, at, how):
            break
        steps += 1
        first_run = kit.on_disk(folder) if name == "adopt another run" else None
        try:
            version: int | None
            if name == "adopt another run" and held_run(folder) != held_run_of(source):
                if held_run(folder) is None:
                    version = None
                else:
                    assert first_run == states[1].raw
                    version = 1
            else:
                version = check(kit, folder, truth)
            reached.add(version)
            assert version in allowed
            with Replica(source, folder, adopt=True) as replica:
                replica.sync()
                replica.mirror.rescan()
            assert check(kit, folder, truth) == len(kit.history(source)) - 1
        except (AssertionError, ThinwireError) as error:
            raise AssertionError(f"{name}, {how} at step {at}") from error
        shutil.rmtree(folder)
    assert steps > 10 // stride
    assert reached <= allowed
    assert len(reached) > 1 or name.startswith("recover")


def struck(
    kit: SimpleNamespace, work: Callable[[Path], None], folder: Path, at: int, how: str
) -> bool:
    """Do the work with a misfortune at one step; whether there was such a step."""
    if how == "killed":
        steps = Steps(at, lambda: os._exit(42))

        def doomed() -> None:
            steps.install(pytest.MonkeyPatch())
            work(folder)

        code = kit.in_child(doomed)
        assert code in (0, 42)
        return bool(code)

    def strike() -> None:
        raise OSError(errno.EIO, "injected") if how == "I/O error" else KeyboardInterrupt

    steps = Steps(at, strike)
    with pytest.MonkeyPatch.context() as patch:
        steps.install(patch)
        with contextlib.suppress(OSError, KeyboardInterrupt, ThinwireError):
            work(folder)
    return steps.seen >= at


def held_run(folder: Path) -> str | None:
    with DiskMirror(folder) as mirror:
        return mirror.held.run if mirror.held else None


def held_run_of(bucket: MemoryBucket) -> str:
    return Replica(bucket, MemoryMirror()).chain.read_run().run


def test_an_update_interrupted_half_way_is_finished_by_opening_the_mirror_again(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    at_1: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half(tensors: Any, patches: Any) -> None:
        apply_patch(tensors[patches[0].ordinal], patches[0])
        raise KeyboardInterrupt

    with Replica(bucket, at_1) as replica:
        with monkeypatch.context() as patch:
            patch.setattr(thinwire.disk, "patch_all", half)
            with pytest.raises(KeyboardInterrupt):
                replica.sync(2)
        with pytest.raises(MirrorCorrupt, match="half-way"):
            replica.sync(2)
        with pytest.raises(Misuse):
            replica.mirror.rescan()
    assert check(kit, at_1, states) == 2


def test_a_mirror_in_memory_that_was_interrupted_starts_over(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirror = MemoryMirror()
    replica = Replica(bucket, mirror)
    replica.sync(1)

    def half(tensors: Any, patches: Any) -> None:
        apply_patch(tensors[patches[0].ordinal], patches[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thinwire.mirror, "patch_all", half)
        with pytest.raises(KeyboardInterrupt):
            replica.sync(2)
    assert [u.version for u in replica.sync()] == [0, 1, 2, 3]
    assert kit.held(mirror) == states[3].raw


def test_pages_lost_in_a_power_failure_come_back_from_the_journal(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path, unfinished: Path
) -> None:
    """Only what was fsynced is sure to be there: of the shards, any mixture of old and new."""
    rng = np.random.default_rng(5)
    for _ in range(8):
        folder = unfinished.with_name("lost")
        shutil.copytree(unfinished, folder)
        for shard in folder.glob("*.safetensors"):
            new, old = shard.read_bytes(), (at_1 / shard.name).read_bytes()
            pages = range(0, len(new), 64)
            shard.write_bytes(
                b"".join((new if rng.random() < 0.5 else old)[at : at + 64] for at in pages)
            )
        assert check(kit, folder, states) == 3
        shutil.rmtree(folder)


# --- torn and damaged ----------------------------------------------------------------------


@pytest.mark.usefixtures("_nobody_maps")
@pytest.mark.parametrize("filler", [b"", b"\0"], ids=["short", "zeros"])
def test_an_entry_torn_at_any_byte_is_dropped_and_the_next_sync_works(
    kit: SimpleNamespace, tmp_path: Path, filler: bytes
) -> None:
    layout = [("w", "BF16", (20,))]
    states = [kit.State.random(0, layout)]
    for seed in range(3):
        states.append(states[-1].changed(seed, 0.2))
    bucket = MemoryBucket()
    kit.start_run(bucket, *states)
    mirror = DiskMirror(tmp_path / "mirror")
    replica = Replica(bucket, mirror)
    replica.sync(2)
    before = kit.files(mirror.folder)
    good = len(before[str(JOURNAL)])
    replica.sync(3)
    journal = (mirror.folder / JOURNAL).read_bytes()
    assert 0 < good < len(journal)
    folder = tmp_path / "torn"
    for at in range(good, len(journal), 1 if not filler else 13):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / ".thinwire").mkdir(parents=True)
        for name, data in before.items():
            (folder / name).write_bytes(data)
        tail = filler * (len(journal) - at)
        (folder / JOURNAL).write_bytes(journal[:at] + tail)
        if at % 5 == 0:
            assert check(kit, folder, states) == 2
        with Replica(bucket, folder) as again:
            assert [u.version for u in again.sync()] == [3]
        assert kit.on_disk(folder) == states[3].raw
    mirror.close()


def opened_and_verified(folder: Path) -> None:
    with DiskMirror(folder) as mirror:
        mirror.verify()


def test_a_flipped_byte_anywhere_is_caught_by_opening_or_by_verify(
    kit: SimpleNamespace, unfinished: Path, tmp_path: Path
) -> None:
    originals = kit.files(unfinished)
    assert {"model.safetensors.index.json", str(JOURNAL), ".thinwire/state.json"} < set(originals)
    closed = tmp_path / "closed"
    shutil.copytree(unfinished, closed)
    DiskMirror(closed).close()
    checkpointed = kit.files(closed)
    for folder, contents in ((unfinished, originals), (closed, checkpointed)):
        for name, data in contents.items():
            # a shard is rewritten in part by the journal, which heals it: that is checked below
            if folder is unfinished and name.endswith(".safetensors"):
                continue
            for at in range(0, len(data), max(1, len(data) // 60)):
                damaged = bytearray(data)
                damaged[at] ^= 1 << (at % 8)
                (folder / name).write_bytes(damaged)
                # what is replayed is proved at once, everything else by verify()
                look = DiskMirror if name == str(JOURNAL) else opened_and_verified
                with pytest.raises((MirrorCorrupt, DigestMismatch)):
                    look(folder)
                for restored, content in contents.items():
                    (folder / restored).write_bytes(content)
    with DiskMirror(closed) as mirror:
        mirror.verify()


def test_every_byte_of_a_shard_counts(kit: SimpleNamespace, states: list[Any], at_1: Path) -> None:
    for shard in at_1.glob("*.safetensors"):
        data = shard.read_bytes()
        for at in range(0, len(data), 7):
            damaged = bytearray(data)
            damaged[at] ^= 0x10
            shard.write_bytes(damaged)
            with pytest.raises((MirrorCorrupt, DigestMismatch)), DiskMirror(at_1) as mirror:
                mirror.verify()
        shard.write_bytes(data)
    assert check(kit, at_1, states) == 1


def test_rot_under_an_open_mirror_is_found_by_verify(bucket: MemoryBucket, at_1: Path) -> None:
    with DiskMirror(at_1) as mirror:
        mirror.verify()
        shard = at_1 / "model-00001-of-00002.safetensors"
        data = shard.read_bytes()
        for at in (0, 7, 30, len(data) - 1):
            with shard.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 0x80]))
            with pytest.raises((MirrorCorrupt, DigestMismatch)):
                mirror.verify()
            with shard.open("r+b") as file:
                file.write(data)
        mirror.verify()


@pytest.mark.parametrize(
    "name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_a_missing_file_is_caught(at_1: Path, name: str) -> None:
    (at_1 / name).unlink()
    with pytest.raises(MirrorCorrupt), DiskMirror(at_1) as mirror:
        mirror.verify()


def test_rot_in_the_elements_of_an_update_is_refused_by_digest(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path
) -> None:
    """The next version follows from what is held; if that is not what it should be, it shows."""
    with DiskMirror(at_1) as mirror:
        replica = Replica(bucket, mirror)
        name, _, _ = states[0].layout[0]
        index = int(np.flatnonzero(states[1].bits[name] != states[2].bits[name])[0])
        tensor = mirror.tensors[mirror.schema.ordinal(name)]
        tensor[index] ^= 1
        before = kit.files(at_1)
        with pytest.raises(DigestMismatch):
            replica.sync()
        assert kit.files(at_1) == before


# --- a full disk ---------------------------------------------------------------------------


def test_a_full_disk_leaves_the_version_that_was(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    at_1: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(journal: Journal, data: memoryview) -> None:
        journal._file.write(data[: data.nbytes // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Replica(bucket, at_1) as replica:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_write", full)
            for _ in range(2):
                with pytest.raises(OSError, match="No space"):
                    replica.sync()
        assert replica.version == 1
        assert (at_1 / JOURNAL).stat().st_size == 0
        assert kit.on_disk(at_1) == states[1].raw
        assert [u.version for u in replica.sync()] == [2, 3]
    assert check(kit, at_1, states) == 3


def test_a_file_size_limit_of_the_system_leaves_the_version_that_was(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path
) -> None:
    """The same with errors that the kernel makes, in a process of its own."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        replica = Replica(bucket, at_1)
        replica.sync(2)
        size = (at_1 / JOURNAL).stat().st_size
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 300, hard))
        with pytest.raises(OSError, match="too large"):
            replica.sync(3)
        assert (at_1 / JOURNAL).stat().st_size == size
        assert replica.version == 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        os._exit(42)

    assert kit.in_child(work) == 42
    assert check(kit, at_1, states) == 2


def test_an_entry_interrupted_while_it_is_written_is_taken_back(
    kit: SimpleNamespace,
    states: list[Any],
    bucket: MemoryBucket,
    at_1: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(journal: Journal, data: memoryview) -> None:
        journal._file.write(data[: data.nbytes // 2])
        raise KeyboardInterrupt

    def work() -> None:
        replica = Replica(bucket, at_1)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                replica.sync()
        replica.sync()
        os._exit(42)  # the journal must be readable, with nothing torn in the middle

    assert kit.in_child(work) == 42
    assert check(kit, at_1, states) == 3


def test_a_load_that_fails_leaves_nothing_behind_and_the_old_version_in_place(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path
) -> None:
    other = MemoryBucket()
    kit.start_run(other, states[4], max_shard=100)
    shard = next(info for info in other.list("anchors/") if "-00003-of-" in info.key)
    other.put(shard.key, bytes(shard.size))
    before = kit.files(at_1)
    with Replica(other, at_1, adopt=True) as replica, pytest.raises(ThinwireError):
        replica.sync()
    assert kit.files(at_1) == before
    assert not (at_1 / ".thinwire/incoming").exists()


# --- locks, mappings, swap -----------------------------------------------------------------


@contextlib.contextmanager
def child_that(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A process that has done what ``code`` says and waits."""
    script = f"import sys\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.wait()


MAP = "import mmap; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"


def test_a_second_writer_is_refused_in_this_and_in_another_process(
    kit: SimpleNamespace, at_1: Path
) -> None:
    with DiskMirror(at_1):
        with pytest.raises(MirrorBusy):
            DiskMirror(at_1)

        def work() -> None:
            with pytest.raises(MirrorBusy):
                DiskMirror(at_1)

        assert kit.in_child(work) == 0
    DiskMirror(at_1).close()


def test_a_killed_writers_lock_is_free(at_1: Path) -> None:
    code = "from thinwire.disk import DiskMirror; mirror = DiskMirror(sys.argv[1])"
    with child_that(code, at_1) as child:
        with pytest.raises(MirrorBusy):
            DiskMirror(at_1)
        child.kill()
        child.wait()
        DiskMirror(at_1).close()


@needs_proc
def test_a_mirror_that_another_process_has_mapped_is_not_patched(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path
) -> None:
    shard = at_1 / "model-00002-of-00002.safetensors"
    with Replica(bucket, at_1) as replica:
        before = kit.files(at_1)
        with child_that(MAP, shard) as child:
            with pytest.raises(MirrorInUse, match=str(child.pid)):
                replica.sync()
            assert kit.files(at_1) == before
        assert [u.version for u in replica.sync()] == [2, 3]
    assert check(kit, at_1, states) == 3


@needs_proc
def test_a_journal_is_not_replayed_into_a_mapped_mirror(
    kit: SimpleNamespace, states: list[Any], unfinished: Path
) -> None:
    before = kit.files(unfinished)
    with child_that(MAP, unfinished / "model-00001-of-00002.safetensors"):
        with pytest.raises(MirrorInUse):
            DiskMirror(unfinished)
        assert kit.files(unfinished) == before
    assert check(kit, unfinished, states) == 3


@needs_proc
@pytest.mark.parametrize("loader", ["safe_open", "memmap", "load_file"])
def test_a_mirror_that_this_process_serves_from_is_not_patched(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path, loader: str
) -> None:
    shard = at_1 / "model-00001-of-00002.safetensors"
    with Replica(bucket, at_1) as replica:
        before = kit.files(at_1)
        held: Any
        if loader == "memmap":
            held = np.memmap(shard, np.uint8, "r")
        elif loader == "safe_open":
            held = pytest.importorskip("safetensors").safe_open(shard, "np")
        else:
            pytest.importorskip("torch")
            held = pytest.importorskip("safetensors.torch").load_file(shard)
        with pytest.raises(MirrorInUse):
            replica.sync()
        assert kit.files(at_1) == before
        del held
        assert [u.version for u in replica.sync()] == [2, 3]
    assert check(kit, at_1, states) == 3


def test_a_forked_child_that_inherits_the_mirror_is_nobody_else(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path
) -> None:
    with Replica(bucket, at_1) as replica:
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            signal.pause()
        try:
            assert [u.version for u in replica.sync()] == [2, 3]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert check(kit, at_1, states) == 3


def test_swap_moves_on_beside_old_mappings_which_keep_their_bytes(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path
) -> None:
    shards = sorted(at_1.glob("*.safetensors"))
    old = [np.memmap(path, np.uint8, "r") for path in shards]
    bytes_then = [path.read_bytes() for path in shards]
    with child_that(MAP, shards[0]), DiskMirror(at_1, swap=True) as mirror:
        replica = Replica(bucket, mirror)
        for version in (2, 3):
            replica.sync(version)
            assert kit.held(mirror) == kit.on_disk(at_1) == states[version].raw
        mirror.verify()
        assert [m.tobytes() for m in old] == bytes_then
    assert check(kit, at_1, states) == 3


def test_adopting_replaces_the_files_under_old_mappings(
    kit: SimpleNamespace, states: list[Any], bucket: MemoryBucket, at_1: Path
) -> None:
    shard = at_1 / "model-00001-of-00002.safetensors"
    old, then = np.memmap(shard, np.uint8, "r"), shard.read_bytes()
    other = MemoryBucket()
    kit.start_run(other, states[4]).close()
    with Replica(other, at_1, adopt=True) as replica:
        replica.sync()
    assert old.tobytes() == then
    assert sorted(p.name for p in at_1.glob("*.safetensors*")) == ["model.safetensors"]
    assert kit.on_disk(at_1) == states[4].raw


def test_the_journal_is_emptied_when_it_grows_past_its_limit(
    kit: SimpleNamespace, bucket: MemoryBucket, tmp_path: Path
) -> None:
    many = [kit.State.random(0)]
    for seed in range(1, 20):
        many.append(many[-1].changed(seed, 0.02))
    run = MemoryBucket()
    kit.start_run(run, *many)
    sizes = []
    with DiskMirror(tmp_path / "mirror", journal_limit=4000) as mirror:
        for update in Replica(run, mirror).catch_up():
            sizes.append((tmp_path / "mirror" / JOURNAL).stat().st_size)
            assert kit.on_disk(tmp_path / "mirror") == many[update.version].raw
    assert max(sizes) <= 4000
    assert sizes[1:].count(0) >= 2
    assert any(sizes)


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(Misuse):
        DiskMirror(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(Misuse):
        DiskMirror(tmp_path / "precious.txt")


def test_a_closed_mirror_is_not_used_further(bucket: MemoryBucket, at_1: Path) -> None:
    replica = Replica(bucket, at_1)
    replica.close()
    with pytest.raises(Misuse):
        replica.mirror.rescan()
    with pytest.raises(Misuse):
        replica.sync()
    replica.close()
    DiskMirror(at_1).close()


# --- readers -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "disk", "swap"])
def test_readers_never_see_half_a_version(kit: SimpleNamespace, tmp_path: Path, kind: str) -> None:
    layout = [("a", "BF16", (40_000,)), ("b", "F32", (20_000,))]
    many = [kit.State.random(0, layout)]
    for seed in range(1, 25):
        many.append(many[-1].changed(seed, 0.9))
    raw = [state.raw for state in many]
    bucket = MemoryBucket()
    publisher = Publisher(bucket, many[0].source)
    mirror = (
        MemoryMirror() if kind == "memory" else DiskMirror(tmp_path / "mirror", swap=kind == "swap")
    )
    replica = Replica(bucket, mirror)
    replica.sync()
    done = threading.Event()
    seen: list[set[int]] = [set(), set()]
    wrong: list[int] = []

    def read(found: set[int]) -> None:
        while not done.is_set():
            with mirror.reading():
                assert mirror.held is not None
                version = mirror.held.version
                copies = {s.name: t.tobytes() for s, t in zip(mirror.schema, mirror.tensors)}
            found.add(version)
            if copies != raw[version]:
                wrong.append(version)

    readers = [threading.Thread(target=read, args=(found,)) for found in seen]
    for reader in readers:
        reader.start()
    try:
        for state in many[1:]:
            publisher.publish(state.source).result()
            replica.sync()
    finally:
        done.set()
        for reader in readers:
            reader.join()
    mirror.close()
    assert not wrong
    assert all(len(found) > 3 for found in seen)


def test_readers_in_another_process_never_see_half_a_version(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    many = [kit.State.random(0, [("a", "BF16", (100_000,))])]
    for seed in range(1, 25):
        many.append(many[-1].changed(seed, 0.9))
    raw = [state.raw for state in many]
    bucket = MemoryBucket()
    kit.start_run(bucket, *many)
    folder = tmp_path / "mirror"
    with Replica(bucket, folder) as replica:
        replica.sync(0)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            try:
                seen = set()
                while len(raw) - 1 not in seen:
                    with locked(folder, exclusive=False):
                        found = kit.on_disk(folder)
                    seen.add(raw.index(found))
                os._exit(0 if len(seen) > 2 else 3)
            except BaseException:  # noqa: BLE001 - nothing may leave a forked child
                os._exit(1)
        for _ in replica.catch_up():
            pass
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
