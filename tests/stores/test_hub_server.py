"""The Hub of our own, used as the Hub is: by huggingface_hub, its follower, and S3 clients."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("hf_xet")
pytest.importorskip("obstore")

import obstore
from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import BucketBatchError, BucketNotFoundError, HfHubHTTPError
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
)
from obstore.store import S3Store

from servers.hub.process import HubProcess

pytestmark = pytest.mark.stores

WRITER, READER, STRANGER = "hf_writer", "hf_reader", "hf_stranger"


@pytest.fixture(scope="module", autouse=True)
def client_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("hf-home")
        patch.setenv("HF_HOME", str(home))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        patch.delenv("HF_TOKEN", raising=False)
        yield


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    accounts = [f"{WRITER}=me", f"{READER}=me:read", f"{STRANGER}=else"]
    options = [part for account in accounts for part in ("--token", account)]
    with HubProcess(tmp_path, *options, "--page", "3") as hub:
        yield hub


@pytest.fixture
def api(hub: HubProcess) -> HfApi:
    """A client with a bucket ``me/b``, private."""
    api = HfApi(hub.url, token=WRITER)
    api.create_bucket("me/b", private=True)
    return api


def code_of(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return int(error.value.response.status_code)


def test_buckets_come_and_go(api: HfApi) -> None:
    assert api.bucket_info("me/b").private
    with pytest.raises(HfHubHTTPError) as again:
        api.create_bucket("me/b")
    assert code_of(again) == 409
    api.create_bucket("me/b", exist_ok=True)
    api.create_bucket("me/public", private=False)
    assert not api.bucket_info("me/public").private
    api.delete_bucket("me/b")
    with pytest.raises(BucketNotFoundError):
        api.bucket_info("me/b")


def test_files_come_back(api: HfApi, tmp_path: Path) -> None:
    contents = {"a/b/c.bin": os.urandom(3_000_000), "a/text": b"text " * 100_000, "empty": b""}
    api.batch_bucket_files("me/b", add=[(data, path) for path, data in contents.items()])
    targets = [(path, tmp_path / path) for path in contents]
    api.download_bucket_files("me/b", targets, raise_on_missing_files=True)  # type: ignore[arg-type]
    for path, target in targets:
        assert target.read_bytes() == contents[path]
        assert api.get_bucket_file_metadata("me/b", path).size == len(contents[path])
    info = api.bucket_info("me/b")
    assert (info.size, info.total_files) == (sum(map(len, contents.values())), 3)
    api.batch_bucket_files("me/b", delete=["a/text"])
    assert [file.path for file in api.get_bucket_paths_info("me/b", list(contents))] == [
        "a/b/c.bin",
        "empty",
    ]


def test_listings_have_pages_folders_and_prefixes(api: HfApi) -> None:
    paths = ["a/1", "a/2", "a/3", "a-b", "b/c/1", "b/c/2", "c"]
    api.batch_bucket_files("me/b", add=[(path.encode(), path) for path in paths])

    def listed(prefix: str | None = None, *, recursive: bool) -> list[str]:
        return [entry.path for entry in api.list_bucket_tree("me/b", prefix, recursive=recursive)]

    assert sorted(listed(recursive=True)) == sorted(paths)
    assert sorted(listed("a", recursive=True)) == ["a-b", "a/1", "a/2", "a/3"]
    assert sorted(listed("a/", recursive=True)) == ["a/1", "a/2", "a/3"]
    assert sorted(listed(recursive=False)) == ["a", "a-b", "b", "c"]
    assert sorted(listed("b/", recursive=False)) == ["b/c"]


def test_equal_contents_are_stored_once(hub: HubProcess, api: HfApi) -> None:
    content = os.urandom(2_000_000)
    api.batch_bucket_files("me/b", add=[(content, "first")])
    before = hub.stats()["received"]["xorb-put"]
    assert before >= len(content)
    api.batch_bucket_files("me/b", add=[(content, "second")])
    assert hub.stats()["received"]["xorb-put"] == before


def test_a_batch_is_no_transaction(hub: HubProcess, api: HfApi) -> None:
    hub.faults(fail_batch={"bad": 1})
    with pytest.raises(BucketBatchError) as partly:
        api.batch_bucket_files("me/b", add=[(b"1", "good"), (b"2", "bad")])
    assert partly.value.response.status_code == 200
    assert partly.value.failures == [{"path": "bad", "error": "internal error, please retry"}]
    hub.faults(fail_batch={"bad": 1})
    with pytest.raises(BucketBatchError) as wholly:
        api.batch_bucket_files("me/b", add=[(b"2", "bad")])
    assert wholly.value.response.status_code == 422
    assert [entry.path for entry in api.list_bucket_tree("me/b")] == ["good"]


def test_a_file_needs_its_content(hub: HubProcess, api: HfApi) -> None:
    line = b'{"type": "addFile", "path": "x", "xetHash": "' + b"1" * 64 + b'", "mtime": 1}\n'
    answer = get_session().post(
        f"{hub.url}/api/buckets/me/b/batch",
        content=line,
        headers={"Authorization": f"Bearer {WRITER}"},
    )
    assert answer.status_code == 422
    assert answer.json()["failed"] == [{"path": "x", "error": "xet hash not found"}]


@pytest.mark.parametrize(
    ("token", "private", "read", "write"),
    [
        (WRITER, True, 200, 200),
        (READER, True, 200, 403),
        (STRANGER, True, 404, 404),
        (STRANGER, False, 200, 403),
        ("hf_unknown", False, 401, 401),
        (False, True, 401, 401),
        (False, False, 200, 401),
    ],
)
def test_rights(
    hub: HubProcess, api: HfApi, token: str | bool, private: bool, read: int, write: int
) -> None:
    name = "me/b"
    if not private:
        name = "me/public"
        api.create_bucket(name, private=False)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    session = get_session()
    answers = [
        session.get(f"{hub.url}/api/buckets/{name}", headers=headers),
        session.get(f"{hub.url}/api/buckets/{name}/tree", headers=headers),
        session.get(f"{hub.url}/api/buckets/{name}/xet-read-token", headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [read] * 3
    answers = [
        session.post(f"{hub.url}/api/buckets/{name}/batch", headers=headers),
        session.get(f"{hub.url}/api/buckets/{name}/xet-write-token", headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [write] * 2


def test_xet_tokens_have_a_scope_and_an_end(hub: HubProcess, api: HfApi) -> None:
    session, hub_headers = get_session(), {"Authorization": f"Bearer {WRITER}"}

    def token(scope: str) -> dict[str, str]:
        url = f"{hub.url}/api/buckets/me/b/xet-{scope}-token"
        return {
            "Authorization": f"Bearer {session.get(url, headers=hub_headers).json()['accessToken']}"
        }

    def upload(headers: dict[str, str]) -> int:
        answer = session.post(f"{hub.url}/v2/shards", headers=headers, content=b"no shard")
        return int(answer.status_code)

    write = token("write")
    assert upload(write) == 400  # let in, and then refused for what it is
    assert upload(token("read")) == 403
    assert upload(hub_headers) == 401
    hub.faults(expire_tokens=True)
    assert upload(write) == 401


def test_the_content_url_takes_no_token(hub: HubProcess, api: HfApi) -> None:
    api.batch_bucket_files("me/b", add=[(b"0123456789", "key")])
    headers = {"Authorization": f"Bearer {WRITER}"}
    answer = get_session().get(
        f"{hub.url}/buckets/me/b/resolve/key", headers=headers, follow_redirects=False
    )
    assert (answer.status_code, answer.headers["X-Linked-Size"]) == (302, "10")
    place = answer.headers["Location"]
    assert get_session().get(place, headers=headers).status_code == 400
    assert get_session().get(place).content == b"0123456789"
    part = get_session().get(place, headers={"Range": "bytes=3-5"})
    assert (part.status_code, part.content) == (206, b"345")
    assert part.headers["Content-Range"] == "bytes 3-5/10"
    assert get_session().get(place, headers={"Range": "bytes=10-"}).status_code == 416


def test_a_missing_file_and_a_missing_bucket_differ(hub: HubProcess, api: HfApi) -> None:
    headers = {"Authorization": f"Bearer {WRITER}"}
    for place, code in (("me/b", "EntryNotFound"), ("me/none", "RepoNotFound")):
        answer = get_session().head(f"{hub.url}/buckets/{place}/resolve/x", headers=headers)
        assert (answer.status_code, answer.headers["X-Error-Code"]) == (404, code)


def test_faults_and_counters(hub: HubProcess, api: HfApi) -> None:
    hub.reset()
    api.bucket_info("me/b")
    assert hub.stats()["requests"] == {"info": 1}
    hub.faults(unavailable=1, only="info", retry_after=3)
    with pytest.raises(HfHubHTTPError) as unavailable:
        api.bucket_info("me/b")
    assert code_of(unavailable) == 503
    assert unavailable.value.response.headers["Retry-After"] == "3"
    api.bucket_info("me/b")
    with pytest.raises(OSError, match="400"):
        hub.faults(no_such_fault=1)


def test_the_clients_own_follower(hub: HubProcess, api: HfApi) -> None:
    live = pytest.importorskip("huggingface_hub._bucket_live_follow")
    told: list[Any] = []
    came, following = threading.Event(), threading.Event()

    def on_changes(changes: list[Any]) -> None:
        told.extend((change.path, change.op) for change in changes)
        came.set()

    follower = live.BucketFollower(
        endpoint=hub.url,
        bucket_id="me/b",
        token=WRITER,
        on_changes=on_changes,
        on_reconcile=following.set,
        is_alive=lambda: True,
    )
    follower.start()
    assert following.wait(10)
    api.batch_bucket_files("me/b", add=[(b"1", "x")])
    assert came.wait(10)
    came.clear()
    follower.stop()
    api.batch_bucket_files("me/b", delete=["x"])
    follower.join(10)
    assert not follower.is_alive()
    assert told[0] == ("x", "add")


# --- S3 -----------------------------------------------------------------------------------------


def gateway(hub: HubProcess, bucket: str = "b", **options: Any) -> S3Store:
    return S3Store(
        bucket,
        endpoint=f"{hub.gateway}/me",
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
        **{"access_key_id": "HFAKTEST", "secret_access_key": "secret", **options},
    )


def test_conditional_puts(hub: HubProcess, api: HfApi) -> None:
    store = gateway(hub)
    first = obstore.put(store, "d/k", b"1", mode="create", use_multipart=False)
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "d/k", b"2", mode="create", use_multipart=False)
    second = obstore.put(store, "d/k", b"2", mode={"e_tag": first["e_tag"]}, use_multipart=False)
    with pytest.raises(PreconditionError):
        obstore.put(store, "d/k", b"3", mode={"e_tag": first["e_tag"]}, use_multipart=False)
    assert obstore.head(store, "d/k")["e_tag"] == second["e_tag"]
    assert bytes(obstore.get(store, "d/k").bytes()) == b"2"  # through a redirect
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "d/other")


def test_files_are_the_same_from_both_sides(hub: HubProcess, api: HfApi, tmp_path: Path) -> None:
    content = os.urandom(1_000_000)
    obstore.put(gateway(hub), "by/s3", content, use_multipart=False)
    api.batch_bucket_files("me/b", add=[(content, "by/hub")])
    api.download_bucket_files("me/b", [("by/s3", tmp_path / "file")])
    assert (tmp_path / "file").read_bytes() == content
    assert bytes(obstore.get(gateway(hub), "by/hub").bytes()) == content


def test_the_gateway_wants_a_signature_and_a_bucket(hub: HubProcess, api: HfApi) -> None:
    with pytest.raises(PermissionDeniedError):
        obstore.put(gateway(hub, skip_signature=True), "k", b"1", use_multipart=False)
    with pytest.raises((NotFoundError, FileNotFoundError, BaseError), match="NoSuchBucket"):
        obstore.put(gateway(hub, "none"), "k", b"1", use_multipart=False)
