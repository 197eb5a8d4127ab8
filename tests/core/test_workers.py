from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from thinwire.errors import Misuse
from thinwire.workers import available_threads, parallel_map


@pytest.mark.parametrize("threads", [None, -1, 0, 1, 2, 7, 100])
def test_results_keep_their_order(threads: int | None) -> None:
    def slow_first(x: int) -> int:
        time.sleep(0.002 * (x < 3))
        return x * x

    assert parallel_map(slow_first, range(20), threads=threads) == [x * x for x in range(20)]
    assert parallel_map(slow_first, [], threads=threads) == []


def test_threads_really_run_at_once() -> None:
    meeting = threading.Barrier(3, timeout=20)
    parallel_map(lambda _: meeting.wait(), range(3), threads=3)


def test_the_first_error_is_raised_when_all_have_ended() -> None:
    started, ended = [], []

    def fail(x: int) -> None:
        started.append(x)
        if x in (1, 2):
            raise ValueError(f"item {x}")
        time.sleep(0.01)
        ended.append(x)

    with pytest.raises(ValueError, match="item 1"):
        parallel_map(fail, range(6), threads=2)
    assert sorted(ended) == sorted(x for x in started if x not in (1, 2))


def test_number_of_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_NUM_THREADS", "3")
    assert available_threads() == 3
    monkeypatch.setenv("THINWIRE_NUM_THREADS", "")
    assert available_threads() >= 1


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5", "²", " "])
def test_wrong_number_of_threads(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("THINWIRE_NUM_THREADS", wrong)
    with pytest.raises(Misuse, match="THINWIRE_NUM_THREADS"):
        available_threads()


USE = """
import os, signal, sys, threading
import numpy as np
from thinwire.diff import diff
from thinwire.digest import digest_tensors
from thinwire.weights import Weights

old = [np.arange(5_000_000, dtype=np.uint16)]
new = old[0] ^ (np.arange(5_000_000) % 97 == 0)
weights = Weights.of({"w": new.astype(np.uint16)})

def use():
    patches = diff(old, weights, threads=2)
    assert len(patches[0]) == len(range(0, 5_000_000, 97)), len(patches[0])
    return digest_tensors(old, threads=2)

expected = use()
"""

FORK = """
for generation in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        assert use() == expected
        grandchild = os.fork()
        if grandchild == 0:
            assert use() == expected
            os._exit(0)
        assert os.waitpid(grandchild, 0)[1] == 0
        sys.exit(0)  # with everything the interpreter does at exit
    assert os.waitpid(child, 0)[1] == 0
    assert use() == expected
print("done")
"""

FORK_AMID_WORK = """
stop = threading.Event()
def busy():
    while not stop.is_set():
        assert use() == expected
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if use() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
print("done")
"""

MULTIPROCESSING = """
import multiprocessing
def child(_):
    return use() == expected
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map_async(child, range(4)).get(40) == [True] * 4
print("done")
"""


@pytest.mark.parametrize("script", [FORK, FORK_AMID_WORK, MULTIPROCESSING])
def test_kernels_work_in_a_forked_child(run_python: Callable[..., str], script: str) -> None:
    assert run_python(USE + script) == "done\n"


def test_two_threads_may_enter_the_kernels_at_once(run_python: Callable[..., str]) -> None:
    script = """
results = []
threads = [threading.Thread(target=lambda: results.append(use())) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [expected] * 6
print("done")
"""
    assert run_python(USE + script) == "done\n"


def test_work_under_way_is_finished_while_the_interpreter_ends(
    run_python: Callable[..., str],
) -> None:
    script = """
import threading, time
from thinwire.workers import parallel_map

def late():
    threading.main_thread().join()
    time.sleep(0.2)
    print(sum(parallel_map(lambda x: x * x, range(100), threads=2)))

threading.Thread(target=late).start()
"""
    assert run_python(script) == f"{sum(x * x for x in range(100))}\n"
