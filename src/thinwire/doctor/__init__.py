"""What a bucket can do and how fast, found out by using it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thinwire.bucket import Bucket, LocalBucket, innermost, open_bucket
from thinwire.doctor.estimate import Prices, Speed, estimate
from thinwire.doctor.findings import Finding, Findings
from thinwire.doctor.probe import Probe
from thinwire.doctor.speed import latency, throughput
from thinwire.doctor.suite import run_suite
from thinwire.doctor.urls import missing_sibling
from thinwire.errors import Stop

__all__ = ["Examination", "examine"]

ROUNDS = 9
PATIENCE_S = 10.0
"""A store that does not answer for this long is a finding."""


@dataclass
class Examination:
    """What was found.

    Attributes:
        url: the bucket.
        claimed, observed: capabilities, by name; None where they could not be tried.
        missing_key, missing_bucket: classes of errors; None where it could not be told.
        latency: median seconds by operation; empty where it could not be measured.
        speed: the same with bytes per second.
        suite: counts of the conformance suite, if it was asked for and ran.
        findings: one per step.
    """

    url: str
    claimed: dict[str, bool] = field(default_factory=dict)
    observed: dict[str, bool | None] = field(default_factory=dict)
    missing_key: str | None = None
    missing_bucket: str | None = None
    latency: dict[str, float] = field(default_factory=dict)
    speed: Speed | None = None
    suite: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def failed(self) -> list[Finding]:
        """The steps that failed."""
        return [finding for finding in self.findings if finding.error is not None]

    def estimate(self, model_bytes: int, prices: Prices) -> list[dict[str, Any]]:
        """See :func:`thinwire.doctor.estimate.estimate`."""
        return estimate(model_bytes, self.speed, prices)


def examine(
    bucket: Bucket | str,
    *,
    size: int,
    full: bool = False,
    rounds: int = ROUNDS,
    progress: Callable[[str, int, int], None] | None = None,
) -> Examination:
    """Write, read and remove a few objects under ``doctor/<random>/`` and say what happened.

    A failing step becomes a finding, and steps that can do without it still run.

    Args:
        bucket: its URL, or a bucket; with a URL, a missing bucket is looked at too.
        size: bytes of the object that throughput is measured with.
        full: run the conformance suite as well, which needs a URL and pytest.
        rounds: of the measurement of latency.

    Raises:
        Misuse: the URL is none.
    """
    store = open_bucket(bucket, deadline=PATIENCE_S)
    findings = Findings()
    if progress is not None:
        findings.progress = progress
    probe = Probe(store, findings)
    found = Examination(store.url, findings=findings.rows, observed=probe.observed)
    url = _url(bucket, store)
    other = missing_sibling(url, probe.prefix.strip("/").replace("/", "-")) if url else None
    ours = contextlib.nullcontext() if isinstance(bucket, Bucket) else contextlib.closing(store)
    with ours, probe.cleaning_up():
        _steps(found, probe, other, size, rounds)
        if full:
            findings.step("conformance suite", lambda: _full(found, url, other))
    return found


def _steps(found: Examination, probe: Probe, other: str | None, size: int, rounds: int) -> None:
    step = probe.findings.step

    def claim() -> str:
        found.claimed = probe.claims()
        return ", ".join(name for name, can in found.claimed.items() if can) or "nothing"

    def answer() -> str:
        found.latency = latency(probe, rounds)
        return ", ".join(f"{name} {1000 * s:.3g} ms" for name, s in found.latency.items())

    def move() -> str:
        found.speed = throughput(probe, size, found.latency)
        return f"{found.speed.up / 1e6:.3g} MB/s up, {found.speed.down / 1e6:.3g} MB/s down"

    claims = step("what it claims", claim)
    writes = step("write and read", probe.write_and_read)
    step("missing key", probe.missing_keys)
    step(
        "missing bucket",
        lambda: probe.missing_buckets(open_bucket(other, deadline=PATIENCE_S) if other else None),
    )
    found.missing_key, found.missing_bucket = probe.missing_key, probe.missing_bucket
    if not writes:
        return
    if step("create twice", probe.create_twice) and claims:
        step("create race", probe.create_race)
    step("replace", probe.replace)
    if claims:
        step("replace under readers", probe.replace_whole)
        step("notifications", probe.notifications)
    step("list", probe.listing)
    step("delete", probe.deleting)
    if step("latency", answer):
        step("throughput", move)


def _url(bucket: Bucket | str, store: Bucket) -> str | None:
    """What other places are derived from; of a folder its absolute path."""
    inner = innermost(store)
    if isinstance(inner, LocalBucket):
        return str(inner.root)
    return None if isinstance(bucket, Bucket) else bucket


def _full(found: Examination, url: str | None, other: str | None) -> str:
    if url is None:
        return "needs a URL"
    found.suite = run_suite(url, other)
    counts = "{passed} passed, {failed} failed, {skipped} skipped".format_map(found.suite)
    if found.suite["failed"]:
        first = found.suite["failures"][0]
        raise Stop(
            f"{counts}; the first: {first['test']}: {first['message']}",
            hint="the store does not keep what thinwire builds on: report the names that fail",
        )
    return counts
