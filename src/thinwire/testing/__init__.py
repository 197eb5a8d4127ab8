"""For tests, ours and yours: a bucket that fails on schedule, and a suite for any bucket.

The suite is :class:`thinwire.testing.conformance.BucketConformance`, imported from there because
it needs pytest; :class:`FaultyBucket` does not.
"""

from __future__ import annotations

import sys

from thinwire.testing.faults import FaultyBucket

__all__ = ["FaultyBucket"]

if "pytest" in sys.modules:
    import pytest

    # Without it, a failing assert in the suite would not say what it compared.
    pytest.register_assert_rewrite("thinwire.testing.conformance")
