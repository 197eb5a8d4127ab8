"""Object buckets against Azurite, Microsoft's own local Blob Storage."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from servers.azurite import AzuriteServer, azurite
from thinwire.bucket import Bucket, objects
from thinwire.bucket.objects import open_objects
from thinwire.errors import AccessDenied, AlreadyExists, BucketNotFound
from thinwire.testing.conformance import OPERATIONS, BucketConformance

LARGE = objects.SINGLE + objects.PART + 12_345

every_operation = pytest.mark.parametrize("operation", [*OPERATIONS, "list"])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    if azurite() is None:
        pytest.skip("no `azurite-blob`: npm install azurite, or set THINWIRE_AZURITE")
    with AzuriteServer(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def url(server: AzuriteServer, credentials: pytest.MonkeyPatch) -> str:
    for name, value in server.environment().items():
        credentials.setenv(name, value)
    return server.container_url(server.make_container(), "runs/one")


@pytest.fixture
def bucket(url: str) -> Bucket:
    return open_objects(url)


class TestConformance(BucketConformance):
    rounds = 100

    @pytest.fixture
    def bucket(self, url: str) -> Bucket:
        return open_objects(url)

    @pytest.fixture
    def missing_bucket(self, server: AzuriteServer, url: str) -> Bucket:
        return open_objects(server.container_url("never-made", "runs"))


def run(bucket: Bucket, operation: str) -> object:
    return list(bucket.list()) if operation == "list" else OPERATIONS[operation](bucket, "key")


@pytest.mark.parametrize("operation", ["put", "create"])
def test_large_objects_come_back(bucket: Bucket, operation: str) -> None:
    content = os.urandom(LARGE)
    getattr(bucket, operation)("large", [content[:5], memoryview(content)[5:]])
    assert bucket.get("large") == content
    assert b"".join(bucket.stream("large", chunk=1 << 20)) == content
    with pytest.raises(AlreadyExists):
        bucket.create("large", content)


@every_operation
def test_a_missing_container(server: AzuriteServer, url: str, operation: str) -> None:
    with pytest.raises(BucketNotFound):
        run(open_objects(server.container_url("never-made")), operation)


@every_operation
def test_a_wrong_key(url: str, credentials: pytest.MonkeyPatch, operation: str) -> None:
    credentials.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(AccessDenied) as caught:
        run(open_objects(url), operation)
    assert caught.value.hint


@every_operation
def test_secrets_in_a_request_are_not_repeated(
    url: str, credentials: pytest.MonkeyPatch, operation: str
) -> None:
    credentials.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    credentials.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2021-08-06&sp=r&sig=hushhush")
    with pytest.raises(AccessDenied) as caught:
        run(open_objects(url), operation)
    assert "hushhush" not in str(caught.value)
    assert caught.value.__suppress_context__
