"""The suite, and a short run, on a real store of yours: only where THINWIRE_LIVE_BUCKET names one.

    export THINWIRE_TEST_STORES=1 THINWIRE_LIVE_BUCKET=hf://buckets/me/scratch
    pytest tests/stores/test_live.py

Anything that ``open_bucket`` takes will do; several URLs are separated by spaces. Credentials come
from where the store's client finds them. Everything is written under a prefix of its own,
``thinwire-live-<random>``, which is emptied afterwards.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

import pytest

from stores._runs import check_history, pulled, series, start
from thinwire import Publisher, Replica
from thinwire.bucket import Bucket, open_bucket
from thinwire.errors import BucketNotFound
from thinwire.mirror import MemoryMirror
from thinwire.testing.conformance import BucketConformance

URLS = os.environ.get("THINWIRE_LIVE_BUCKET", "").split()

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not URLS,
        reason="set THINWIRE_LIVE_BUCKET to the URL of a bucket, such as hf://buckets/me/scratch "
        "or s3://mine, and the credentials that its client looks for",
    ),
]


def below(url: str, name: str) -> str:
    """``url`` with a folder appended to its path."""
    path, mark, query = url.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


@pytest.fixture(params=URLS)
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """An empty prefix, emptied again when the test is done."""
    with open_bucket(below(request.param, f"thinwire-live-{secrets.token_hex(8)}")) as bucket:
        try:
            yield bucket
        finally:
            with contextlib.suppress(BucketNotFound):  # a test that wrote nothing made none
                for info in list(bucket.list()):
                    bucket.delete(info.key)
                assert not list(bucket.list())


class TestLive(BucketConformance):
    """Fewer competitors than on a server of our own: every request may cost."""

    threads = 4
    rounds = 2

    @pytest.fixture
    def bucket(self, bucket: Bucket) -> Bucket:
        return bucket


def test_a_short_run(bucket: Bucket) -> None:
    states = series(5)
    mirror = MemoryMirror()
    with start(bucket, *states[:3]):
        replica = Replica(bucket, mirror)
        assert [update.version for update in replica.sync()] == [0, 1, 2]
    with Publisher(bucket, states[2].source) as heir:
        heir.publish(states[3].source).result()
        heir.publish(states[4].source).result()
    assert [update.version for update in replica.sync()] == [3, 4, 5]
    assert pulled(bucket) == states[4].raw
    assert check_history(bucket, states) == [0, 1, 2, 2, 3, 4]
