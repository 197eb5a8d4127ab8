"""Threads for the kernels.

Kernels are numba ``nogil`` functions over chunks, run by this pool. numba's own ``parallel=True``
is not used: its workqueue layer aborts when two threads enter it and its omp layer kills a forked
child, and trainers do both. A forked child gets a pool of its own.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from thinwire.errors import Misuse

__all__ = ["available_threads", "parallel_imap", "parallel_map"]

T = TypeVar("T")
R = TypeVar("R")

_pools: dict[int, ThreadPoolExecutor] = {}


def available_threads() -> int:
    """Threads to use by default: ``THINWIRE_NUM_THREADS`` or the cores this process may run on.

    Raises:
        Misuse: the environment variable is not a positive integer.
    """
    wanted = os.environ.get("THINWIRE_NUM_THREADS")
    if wanted:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise Misuse(f"THINWIRE_NUM_THREADS={wanted!r} is not a positive integer")
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parallel_map(
    function: Callable[[T], R], items: Iterable[T], *, threads: int | None = None
) -> list[R]:
    """``[function(x) for x in items]`` on several threads, results in order.

    The first exception is raised once every started call has ended. ``function`` must not call
    ``parallel_map`` itself.
    """
    return list(parallel_imap(function, items, threads=threads))


def parallel_imap(
    function: Callable[[T], R], items: Iterable[T], *, threads: int | None = None
) -> Iterator[R]:
    """Like :func:`parallel_map`, but each result is let go of once it is handed out."""
    work = list(items)
    count = min(available_threads() if threads is None else threads, len(work))
    if count <= 1:
        yield from map(function, work)
        return
    pool = _pools.get(count)
    if pool is None:
        pool = _pools.setdefault(count, ThreadPoolExecutor(count, thread_name_prefix="thinwire"))
    futures: collections.deque[Future[R]] = collections.deque()
    try:
        futures.extend(pool.submit(function, item) for item in work)
    except RuntimeError:
        # the interpreter is shutting down: no pool takes work any more, but what is under way
        # in a thread that it waits for (a publish in flight) must still come to its end
        wait(futures)
        yield from map(function, work)
        return
    try:
        while futures:
            yield futures.popleft().result()
    finally:
        # an error, or a KeyboardInterrupt: nothing may run on behind the caller's back
        for future in futures:
            future.cancel()
        wait(futures)


if hasattr(os, "register_at_fork"):
    # the child has none of the threads: forget their pools without joining them
    os.register_at_fork(after_in_child=_pools.clear)
