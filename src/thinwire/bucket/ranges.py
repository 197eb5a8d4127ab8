"""Reading one large object in several ranges at once, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

__all__ = ["read_ahead", "spans"]

T = TypeVar("T")


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of at most ``size`` bytes that make up ``start`` to ``stop``, in order."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


def read_ahead(
    read: Callable[[int, int], T],
    ranges: Iterator[tuple[int, int]],
    workers: Executor,
    depth: int,
) -> Iterator[T]:
    """What ``read`` returns for each range, in order, while later ones are read by ``workers``.

    ``depth`` ranges are asked for before this returns, and never more than that are held. An error
    of ``read`` is raised in its range's turn. Leaving the iterator early abandons the rest.
    """
    pending = deque(workers.submit(read, *span) for span in islice(ranges, depth))
    return _in_turn(read, ranges, workers, pending)


def _in_turn(
    read: Callable[[int, int], T],
    ranges: Iterator[tuple[int, int]],
    workers: Executor,
    pending: deque[Future[T]],
) -> Iterator[T]:
    try:
        while pending:
            result = pending.popleft().result()
            pending.extend(workers.submit(read, *span) for span in islice(ranges, 1))
            yield result
    finally:
        for future in pending:
            future.cancel()
