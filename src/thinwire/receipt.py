"""What publishing returns at once, and what it can tell once the commit is there."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from thinwire.errors import PublishFailed
from thinwire.log.commit import Commit

__all__ = ["PublishStats", "Receipt", "Shipped"]


@dataclass(frozen=True)
class PublishStats:
    """What one publish moved and where its time went.

    Attributes:
        changed, elements: elements that changed, and elements in all.
        tensors: tensors that changed.
        payload_bytes: bytes uploaded as payload.
        full_bytes: bytes of a dense checkpoint.
        diff_s: seconds that publish() blocked.
        encode_s, upload_s, commit_s: seconds in the background.
    """

    changed: int = 0
    elements: int = 0
    tensors: int = 0
    payload_bytes: int = 0
    full_bytes: int = 0
    diff_s: float = 0.0
    encode_s: float = 0.0
    upload_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True)
class Shipped:
    """A version that is committed, and what it took."""

    commit: Commit
    stats: PublishStats


class Receipt:
    """A publish under way.

    Attributes:
        version: the version it will be; None if it was skipped.
    """

    def __init__(
        self,
        version: int | None,
        future: Future[Shipped] | None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.version = version
        self._future = future
        self._on_error = on_error

    @property
    def skipped(self) -> bool:
        """Whether another publish was in flight; the next one carries these changes."""
        return self._future is None

    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return self._future is None or self._future.done()

    def _shipped(self, timeout: float | None) -> Shipped:
        if self._future is None:
            raise PublishFailed("this publish was skipped", hint="the next one carries its changes")
        try:
            error = self._future.exception(timeout)
        except concurrent.futures.TimeoutError:  # not the builtin one before Python 3.11
            raise TimeoutError(f"not committed after {timeout} s") from None
        if error is None:
            return self._future.result()
        if self._on_error is not None:
            self._on_error(error)
        raise error

    def result(self, timeout: float | None = None) -> Commit:
        """Wait for the commit.

        Raises:
            CommitUnresolved: the outcome is not known; it is settled before the next publish.
            WriterConflict: another writer has taken the run over.
            PublishFailed: the publish was skipped.
            TimeoutError: not done after ``timeout`` seconds.
            Bucket errors: not committed. The next publish carries the changes, or first commits
                this version if it had come as far as its commit.
        """
        return self._shipped(timeout).commit

    def stats(self, timeout: float | None = None) -> PublishStats:
        """Wait, then tell what was moved. Raises as :meth:`result`."""
        return self._shipped(timeout).stats
