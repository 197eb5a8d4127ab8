"""The conformance suite against a scratch prefix of a bucket, in a pytest of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from thinwire.bucket import open_bucket
from thinwire.doctor.scratch import clear
from thinwire.doctor.urls import nested
from thinwire.errors import Misuse, ThinwireError

__all__ = ["run_suite"]

_TEST = """
import contextlib
import itertools
import os

import pytest

from thinwire.bucket import open_bucket
from thinwire.doctor.urls import nested
from thinwire.errors import BucketNotFound
from thinwire.testing.conformance import BucketConformance

numbers = itertools.count()


class TestBucket(BucketConformance):
    threads, rounds = 8, 2

    @pytest.fixture
    def bucket(self):
        url = nested(os.environ["THINWIRE_DOCTOR_URL"], f"{next(numbers):04}")
        with open_bucket(url) as bucket:
            yield bucket
            with contextlib.suppress(BucketNotFound):
                for info in list(bucket.list()):
                    bucket.delete(info.key)

    @pytest.fixture
    def missing_bucket(self):
        url = os.environ.get("THINWIRE_DOCTOR_MISSING")
        if not url:
            pytest.skip("no URL of a missing bucket")
        with open_bucket(url) as bucket:
            yield bucket
"""


def run_suite(url: str, missing: str | None) -> dict[str, Any]:
    """Run it and remove what it wrote.

    Returns:
        ``passed``, ``failed``, ``skipped`` and ``failures`` (name and first line of each).

    Raises:
        Misuse: pytest is not installed.
        ThinwireError: pytest came to no result.
    """
    if importlib.util.find_spec("pytest") is None:
        raise Misuse("the conformance suite needs pytest", hint="pip install pytest")
    scratch = nested(url, f"doctor/{secrets.token_hex(8)}")
    with tempfile.TemporaryDirectory() as folder:
        test, report = Path(folder, "test_bucket.py"), Path(folder, "report.xml")
        test.write_text(_TEST)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
        more = ["--rootdir", folder, "-c", os.devnull, f"--junitxml={report}", "--tb=line"]
        environment = {**os.environ, "THINWIRE_DOCTOR_URL": scratch, "PYTEST_ADDOPTS": ""}
        environment["THINWIRE_DOCTOR_MISSING"] = missing or ""
        try:
            done = subprocess.run(
                [*command, *more], env=environment, capture_output=True, text=True, check=False
            )
        finally:
            with open_bucket(scratch) as bucket:
                clear(bucket)
        if not report.exists():
            said = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
            raise ThinwireError(f"pytest ended with status {done.returncode}: {said[-1]}")
        return _counts(report)


def _counts(report: Path) -> dict[str, Any]:
    passed = skipped = 0
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((e for e in case if e.tag in ("failure", "error")), None)
        if problem is not None:
            first = (problem.get("message") or "").splitlines() or [""]
            failures.append({"test": case.get("name"), "message": first[0]})
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": failures}
