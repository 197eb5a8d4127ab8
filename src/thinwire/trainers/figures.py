"""What publishes moved and took, as entries of a trainer's log."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from thinwire.receipt import PublishStats

__all__ = ["Figures"]

_SECONDS = ("diff_s", "encode_s", "upload_s", "commit_s")


class Figures:
    """Publishes since the last log record. Usable from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = -1
        self._stats: list[PublishStats] = []

    def add(self, version: int | None, stats: PublishStats) -> None:
        """Note a publish that is committed."""
        with self._lock:
            self._version = self._version if version is None else version
            self._stats.append(stats)

    def take(self) -> dict[str, float]:
        """The entries for a log record; empty if nothing was published since the last one.

        ``thinwire/version`` is the last version, ``publishes`` how many there were,
        ``payload_bytes_total`` and ``payload_bytes_max`` the sum and the largest of their payloads.
        All others are means over the publishes: ``changed_share`` (0 to 1), ``payload_bytes``, and
        the seconds ``diff_s`` (for which the trainer waited), ``encode_s``, ``upload_s`` and
        ``commit_s`` (in the background).
        """
        with self._lock:
            stats, self._stats = self._stats, []
            version = self._version
        if not stats:
            return {}
        payloads = [s.payload_bytes for s in stats]
        entries = {
            "publishes": len(stats),
            "changed_share": _mean([s.changed / max(1, s.elements) for s in stats]),
            "payload_bytes": _mean(payloads),
            "payload_bytes_total": sum(payloads),
            "payload_bytes_max": max(payloads),
            **{name: _mean([getattr(s, name) for s in stats]) for name in _SECONDS},
        }
        return {"thinwire/version": version} | {f"thinwire/{k}": v for k, v in entries.items()}

    def log_through(self, trainer: Any) -> None:
        """Have the trainer's ``log`` add the entries to every record it writes."""
        log = trainer.log

        def log_with_figures(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            logs.update(self.take())
            log(logs, *args, **kwargs)

        trainer.log = log_with_figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
