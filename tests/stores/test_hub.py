"""The Hub bucket: real clients (huggingface_hub, hf_xet, obstore) against a Hub of our own."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("hf_xet")

from huggingface_hub import HfApi, constants, hf_api

from servers.hub.process import HubProcess
from servers.liar import Liar, answer
from servers.ports import free_port
from stores._runs import check_history, pulled, series, start
from thinwire.bucket import _hub_client
from thinwire.bucket._hub_errors import retry_after, translated
from thinwire.bucket._hub_events import concerns, parse_events
from thinwire.bucket._hub_gateway import GATEWAY_LIMIT
from thinwire.bucket._hub_url import parse_hub_url
from thinwire.bucket.hub import SMALL, HubBucket, _whole, open_hub
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    KeyNotFound,
    Misuse,
    ThinwireError,
    WriterConflict,
)
from thinwire.testing.conformance import BucketConformance, together

pytestmark = pytest.mark.stores

WRITER, READER, STRANGER = "hf_writer", "hf_reader", "hf_stranger"
ACCOUNTS = [f"{WRITER}=me", f"{READER}=me:read", f"{STRANGER}=else"]
OPTIONS = [part for account in ACCOUNTS for part in ("--token", account)]
LARGE = b"".join(number.to_bytes(4, "little") for number in range(SMALL // 4 + 1))

_names = (f"bucket-{number}" for number in itertools.count())


@pytest.fixture(scope="module", autouse=True)
def client_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The clients keep their things apart from the user's, and find our token."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("hf-home")
        patch.setenv("HF_HOME", str(home))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # requests are counted
        patch.setenv("HF_TOKEN", WRITER)
        patch.setenv("AWS_ACCESS_KEY_ID", "HFAKTEST")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """Pages of five, so that most listings have several."""
    with HubProcess(tmp_path_factory.mktemp("hub"), *OPTIONS, "--page", "5") as hub:
        yield hub


@pytest.fixture
def hub(running: HubProcess) -> Iterator[HubProcess]:
    running.heal()
    running.reset()
    yield running
    running.heal()


@pytest.fixture
def bucket(hub: HubProcess) -> Iterator[HubBucket]:
    with contextlib.closing(opened(hub)) as bucket:
        yield bucket


@pytest.fixture
def conditional(hub: HubProcess) -> Iterator[HubBucket]:
    with contextlib.closing(opened(hub, f"create=s3&gateway={hub.gateway}")) as bucket:
        yield bucket


def opened(hub: HubProcess, options: str = "", place: str | None = None) -> HubBucket:
    """A bucket of a new name, or the one at ``place``."""
    place = place or f"me/{next(_names)}/runs/7"
    return open_hub(f"hf://buckets/{place}?endpoint={hub.url}&{options}".rstrip("&"))


def again(hub: HubProcess, bucket: HubBucket) -> HubBucket:
    """The same place, seen with the token that is set now."""
    return opened(hub, place=f"{bucket.location.bucket_id}/{bucket.location.prefix}")


class TestHubBucket(BucketConformance):
    @pytest.fixture
    def bucket(self, hub: HubProcess) -> Iterator[HubBucket]:
        with contextlib.closing(opened(hub)) as bucket:
            yield bucket

    @pytest.fixture
    def missing_bucket(self, hub: HubProcess) -> HubBucket:
        return opened(hub)


class TestHubBucketWithGateway(BucketConformance):
    rounds = 100

    @pytest.fixture
    def bucket(self, hub: HubProcess) -> Iterator[HubBucket]:
        with contextlib.closing(opened(hub, f"create=s3&gateway={hub.gateway}")) as bucket:
            yield bucket

    @pytest.fixture
    def missing_bucket(self, hub: HubProcess) -> HubBucket:
        return opened(hub, f"create=s3&gateway={hub.gateway}")

    @pytest.mark.skip(reason="shown without the gateway, which has no part in it")
    def test_readers_see_old_or_new_while_it_is_replaced(self) -> None:  # type: ignore[override]
        raise NotImplementedError


# --- what a URL says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://buckets/me/run", ("me/run", "")),
        ("hf://buckets/me/run/", ("me/run", "")),
        ("HF://buckets/my-org/a.b_c/runs/7/", ("my-org/a.b_c", "runs/7/")),
        ("hf://buckets/me/run/a%2Bb", ("me/run", "a+b/")),
    ],
)
def test_places(url: str, expected: tuple[str, str]) -> None:
    location = parse_hub_url(url)
    assert (location.bucket_id, location.prefix) == expected
    assert (location.create, location.endpoint, location.gateway) == ("hub", None, None)
    assert open_hub(url).url == url


def test_options() -> None:
    location = parse_hub_url(
        "hf://buckets/me/run/p?create=s3&gateway=http://127.0.0.1:1/s3/&endpoint=https://hub.local"
    )
    assert location.create == "s3"
    assert location.gateway == "http://127.0.0.1:1/s3"
    assert location.endpoint == "https://hub.local"
    assert parse_hub_url("hf://buckets/me/run?create=hub").create == "hub"


@pytest.mark.parametrize(
    "url",
    [
        "hf://me/run",
        "hf://models/me/run",
        "hf://buckets",
        "hf://buckets/me",
        "hf://buckets/me/",
        "hf://buckets//run",
        "hf://buckets/me/run//x",
        "hf://buckets/me/run/../x",
        "hf://buckets/me/.run",
        "hf://buckets/me/ru n",
        "hf://buckets/me/run@main",
        "hf://buckets/me/run#x",
        "hf://buckets/me/run?token=hf_x",
        "hf://buckets/me/run?create=maybe",
        "hf://buckets/me/run?create=s3&create=s3",
        "hf://buckets/me/run?gateway=https://s3.hf.co",
        "hf://buckets/me/run?endpoint=hub.local",
        "hf://buckets/me/run?endpoint=ftp://hub.local",
        "hf://buckets/me/run?create=s3&gateway=https://me:secret@s3.hf.co",
    ],
)
def test_urls_that_say_nothing(url: str) -> None:
    with pytest.raises(Misuse):
        open_hub(url)


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(Misuse) as unknown:
        open_hub("hf://buckets/me/run?region=eu")
    assert "create, endpoint, gateway" in unknown.value.hint


# --- what an answer means -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "12"}, 12),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Mon, 01 Jan 99999999999 00:00:00 GMT"}, None),
        ({"ratelimit": '"api";r=0;t=55'}, 55),
        ({"ratelimit": '"api";r=3;t=55'}, None),
        ({"retry-after": "2", "ratelimit": '"api";r=0;t=55'}, 2),
    ],
)
def test_how_long_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ConnectionError("Request error: HTTP status client error (401 Unauthorized), …"), True),
        (ConnectionError("Request error: HTTP status client error (403 Forbidden), …"), True),
        (ConnectionError("cannot refresh the token: connection refused"), False),
        (RuntimeError("Request error: HTTP status client error (404 Not Found), …/403"), False),
        (PermissionError("the token is not valid"), True),
        (PermissionError(13, "Permission denied", "/tmp/x"), False),
    ],
)
def test_what_hf_xet_means(error: OSError | RuntimeError, refused: bool) -> None:
    expected = AccessDenied if refused else BucketUnavailable
    with pytest.raises(expected), translated("read", "'key'"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("Task error: IO Error: No space left on device (os error 28)"),
        FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
    ],
)
def test_a_full_disk_is_no_outage(error: OSError | RuntimeError) -> None:
    with pytest.raises(Misuse) as caught, translated("read", "'key'"):
        raise error
    assert "TMPDIR" in caught.value.hint


@pytest.mark.parametrize(
    ("prefix", "name", "data", "wakes"),
    [
        ("", "ready", "{}", True),
        ("", "reset", "{}", True),
        ("", "reconnect", "{}", False),
        ("", "unheard of", "{}", False),
        ("a/", "changes", '{"changes": [{"path": "b/1"}, {"path": "a/1"}]}', True),
        ("a/", "changes", '{"changes": [{"path": "a"}]}', False),
        ("a/", "changes", '{"changes": []}', False),
        ("a/", "changes", "not JSON", True),
        ("a/", "changes", '{"changes": 7}', True),
        ("a/", "changes", '{"changes": [{"path": 7}]}', True),
    ],
)
def test_which_events_wake(prefix: str, name: str, data: str, wakes: bool) -> None:
    assert concerns(name, data, prefix) is wakes


def test_events_in_lines() -> None:
    lines = [": ping", "", "event: a", "data: 1", "data:2", "", "data: 3", "", "event: b", ""]
    assert list(parse_events(lines)) == [("a", "1\n2"), ("", "3")]


# --- what it costs -------------------------------------------------------------------------------


def test_requests(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("first", b"makes the bucket and fetches a token")
    upload = {"grants": 1, "chunks": 1, "xorb-put": 1, "shard": 1, "batch": 1}
    costs: list[tuple[Callable[[], object], dict[str, int]]] = [
        (lambda: bucket.put("key", os.urandom(1000)), upload),
        (lambda: bucket.create("new", os.urandom(1000)), {"head": 1, **upload}),
        (lambda: bucket.head("key"), {"head": 1}),
        (lambda: bucket.get("key"), {"resolve": 1, "content": 1}),
        (lambda: bucket.delete("key"), {"batch": 1}),
    ]
    for call, expected in costs:
        hub.reset()
        call()
        assert hub.stats()["requests"] == expected


def test_a_create_looks_last(hub: HubProcess, bucket: HubBucket) -> None:
    """When the content is there already, so that only its name can come too late."""
    bucket.put("first", b"makes the bucket and fetches a token")
    real = bucket.head

    def head(key: str) -> object:
        asked = hub.stats()["requests"]
        assert asked["xorb-put"] == asked["shard"] == 1
        assert "batch" not in asked
        return real(key)

    bucket.head = head  # type: ignore[method-assign, assignment]
    hub.reset()
    bucket.create("new", os.urandom(1000))
    assert hub.stats()["requests"]["batch"] == 1


def test_a_large_create_looks_before_it_uploads_as_well(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("key", b"x")
    hub.reset()
    with pytest.raises(AlreadyExists):
        bucket.create("key", LARGE)
    assert hub.stats()["requests"] == {"head": 1}


def test_a_gateway_create_is_one_request(hub: HubProcess, conditional: HubBucket) -> None:
    conditional.create("first", b"")
    hub.reset()
    conditional.create("second", b"x")
    assert hub.stats()["requests"] == {"s3-put": 1}


def test_nothing_is_read_on_opening(hub: HubProcess, bucket: HubBucket) -> None:
    assert bucket.capabilities.notifications
    assert not bucket.capabilities.create_only
    assert hub.stats()["requests"] == {}


# --- making the bucket ---------------------------------------------------------------------------


def test_the_first_write_makes_a_private_bucket(
    hub: HubProcess, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("key", b"x")
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    with pytest.raises(BucketNotFound):
        again(hub, bucket).get("key")


def test_many_first_writers(bucket: HubBucket, conditional: HubBucket) -> None:
    together(lambda number: bucket.put(f"{number}", b"x"), range(8))
    together(lambda number: conditional.create(f"{number}", b"x"), range(8))
    for place in (bucket, conditional):
        assert len(list(place.list())) == 8


def test_reading_makes_none(hub: HubProcess, bucket: HubBucket) -> None:
    for read in (bucket.get, bucket.head, bucket.delete, lambda key: list(bucket.list(key))):
        with pytest.raises(BucketNotFound):
            read("key")
    assert "create" not in hub.stats()["requests"]


def test_no_bucket_in_someone_elses_namespace(hub: HubProcess) -> None:
    with pytest.raises(AccessDenied, match="create the bucket"):
        opened(hub, place="else/bucket").put("key", b"x")


def test_an_unreadable_file_makes_none(hub: HubProcess, bucket: HubBucket, tmp_path: Path) -> None:
    with pytest.raises(Misuse):
        bucket.put("key", tmp_path / "nowhere")
    assert hub.stats()["requests"] == {}


# --- who may ------------------------------------------------------------------------------------


def test_no_token(hub: HubProcess, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("key", b"x")
    monkeypatch.delenv("HF_TOKEN")
    stranger = again(hub, bucket)
    for call in (stranger.get, stranger.head, stranger.delete, lambda key: stranger.put(key, b"")):
        with pytest.raises(AccessDenied) as denied:
            call("key")
        assert "hf auth login" in denied.value.hint


def test_an_unknown_token(
    hub: HubProcess, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("key", b"x")
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    for call in (bucket.get, bucket.head, lambda key: bucket.put(key, b"")):
        with pytest.raises(AccessDenied) as denied:
            call("key")
        assert "does not accept this token" in denied.value.hint


def test_a_token_that_may_only_read(
    hub: HubProcess, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("key", b"x")
    monkeypatch.setenv("HF_TOKEN", READER)
    assert bucket.get("key") == b"x"
    for call in (bucket.delete, lambda key: bucket.put(key, b"")):
        with pytest.raises(AccessDenied) as denied:
            call("key")
        assert "write access" in denied.value.hint
    assert bucket.get("key") == b"x"


def test_the_token_is_not_kept(
    hub: HubProcess, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not in the tokens for the Xet store, which were given for it."""
    bucket.put("key", LARGE)
    assert bucket.get("key") == LARGE
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    with pytest.raises(BucketNotFound):
        bucket.get("key")
    hub.reset()
    with pytest.raises(ThinwireError):
        bucket.put("key", os.urandom(100))
    assert "shard" not in hub.stats()["requests"]


def test_offline_mode(hub: HubProcess, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("key", LARGE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.reset()
    for call in (bucket.get, bucket.head, lambda key: bucket.put(key, b"x")):
        with pytest.raises(Misuse, match="offline mode") as offline:
            call("key")
        assert "HF_HUB_OFFLINE" in offline.value.hint
    assert hub.stats()["requests"] == {}


@pytest.mark.parametrize("module", [None, ModuleType("hf_xet")])
def test_hf_xet_is_missing_or_old(
    bucket: HubBucket, monkeypatch: pytest.MonkeyPatch, module: ModuleType | None
) -> None:
    bucket.put("key", LARGE)
    monkeypatch.setitem(sys.modules, "hf_xet", module)
    for call in (bucket.get, lambda key: bucket.put(key, b"x")):
        with pytest.raises(Misuse, match="need hf_xet"):
            call("key")


def test_a_gateway_needs_keys_for_creating_only(
    hub: HubProcess, conditional: HubBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conditional.create("key", b"x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AccessDenied, match="no S3 keys") as denied:
        conditional.create("other", b"x")
    assert "Generate S3 credentials" in denied.value.hint
    assert conditional.get("key") == b"x"


# --- faults -------------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    bucket = open_hub(f"hf://buckets/me/b?endpoint=http://127.0.0.1:{free_port()}")
    for call in (bucket.get, bucket.head, bucket.delete, lambda key: bucket.put(key, b"x")):
        with pytest.raises(BucketUnavailable):
            call("key")


class Moved(BaseHTTPRequestHandler):
    """A Hub whose every bucket has another name now."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(307)
        self.send_header("Location", self.path.replace("/me/b", "/me/renamed"))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_a_renamed_bucket() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Moved) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bucket = open_hub(f"hf://buckets/me/b?endpoint=http://127.0.0.1:{server.server_port}")
        calls: list[Callable[[str], object]] = [
            bucket.get,
            bucket.head,
            bucket.delete,
            lambda key: bucket.put(key, b"x"),
            lambda key: list(bucket.list(key)),
        ]
        for call in calls:
            with pytest.raises(Misuse, match=r"moved to .*renamed") as moved:
                call("key")
            assert "new name" in moved.value.hint
        server.shutdown()


ENDLESS = b"HTTP/1.1 200 x\r\nX-Linked-Size: 10\r\nConnection: close\r\n\r\n" + bytes(3 << 20)
NO_PAGE = b"[]"
TOKEN = b'{"casUrl": "http://127.0.0.1:9", "accessToken": "t", "exp": %s}'

ODD: dict[str, tuple[str, bytes]] = {
    "batch is a list": ("delete", answer(200, b"[]")),
    "batch is a text": ("delete", answer(200, b'"x"')),
    "batch fails with a text": ("put_file", answer(200, b'{"failed": ["oops"]}')),
    "batch fails with a number": ("delete", answer(200, b'{"failed": 7}')),
    "token ends far away": ("put", answer(200, TOKEN % (b"1" + b"0" * 30))),
    "token ends at infinity": ("put", answer(200, TOKEN % b"1e999")),
    "token ended before time": ("put", answer(200, TOKEN % b"-1")),
    "token is no JSON": ("put", answer(200, b"<html>")),
    "size of too many digits": ("head", answer(200, b"x", X_Linked_Size="9" * 30)),
    "size below zero": ("head", answer(200, b"x", X_Linked_Size="-4")),
    "date after all dates": (
        "get",
        answer(503, Retry_After="Mon, 01 Jan 99999999999 00:00:00 GMT"),
    ),
    "more than there is": ("get", answer(200, b"x" * 11, X_Linked_Size="10")),
    "without end": ("get", ENDLESS),
    "the same page": ("list", answer(200, NO_PAGE, Link='<http://h/?recursive=true>; rel="next"')),
    "a page at no address": ("list", answer(200, NO_PAGE, Link='<http://[/?x=1>; rel="next"')),
    "a redirect to no address": (
        "get",
        answer(302, X_Linked_Size="4", Location="http://h/" + "x" * 70_000),
    ),
    "a listing without end": ("list", answer(200, b" " * (1 << 21))),
    "a refusal without end": ("list", answer(503, b" " * (1 << 21))),
    "a refused object without end": ("get", answer(503, b" " * (1 << 21))),
}


@pytest.mark.parametrize("what", list(ODD))
def test_what_a_hub_may_say(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(_hub_client, "BODY_LIMIT", 1 << 20)
    operation, said = ODD[what]
    with Liar(said) as liar:
        bucket = open_hub(f"hf://buckets/me/b/p?endpoint={liar.url}")
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: bucket.get("key"),
            "head": lambda: bucket.head("key"),
            "put": lambda: bucket.put("key", b"x"),
            "put_file": lambda: bucket._client.put_file("p/key", "0" * 64),
            "delete": lambda: bucket.delete("key"),
            "list": lambda: list(bucket.list()),
        }
        with pytest.raises(BucketUnavailable) as caught:
            calls[operation]()
        if "end" in what.split()[-1] and operation == "list":
            assert "without end" in str(caught.value)


def test_a_size_that_only_the_length_tells() -> None:
    with Liar(answer(200, length=7)) as liar:
        assert open_hub(f"hf://buckets/me/b?endpoint={liar.url}").head("key").size == 7


def test_more_bytes_than_there_are_end_a_read() -> None:
    """However many come: the rest is not waited for."""
    taken: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(100):
            taken.append(number)
            yield b"x" * 4

    with pytest.raises(BucketUnavailable):
        list(_whole(pieces(), 10, "key"))
    assert taken == [0, 1, 2]


def test_an_address_that_is_a_right_to_read_is_not_repeated() -> None:
    place = "http://me:hush@h/x?X-Amz-Signature=hush"
    with Liar(answer(302, Location=place)) as liar:
        bucket = open_hub(f"hf://buckets/me/b?endpoint={liar.url}")
        with pytest.raises(Misuse, match="moved to http://h/x") as caught:
            bucket.get("key")
    assert "hush" not in str(caught.value)


def test_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("nonsense", "http://me:hush@h"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(hf_api, "ENDPOINT", endpoint, raising=False)
        with pytest.raises(Misuse, match="HF_ENDPOINT") as caught:
            open_hub("hf://buckets/me/b")
        assert "hush" not in str(caught.value)


def test_a_closed_bucket(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("key", b"x")
    bucket.close()
    hub.reset()
    calls: list[Callable[[], object]] = [
        lambda: bucket.get("key"),
        lambda: bucket.head("key"),
        lambda: bucket.put("key", b"x"),
        lambda: bucket.create("key", b"x"),
        lambda: bucket.delete("key"),
        lambda: list(bucket.list()),
        lambda: bucket.watch("", lambda: None),
    ]
    for call in calls:
        with pytest.raises(Misuse, match="is closed"):
            call()
    assert hub.stats()["requests"] == {}


@pytest.mark.parametrize("fault", ["rate_limited", "unavailable"])
@pytest.mark.parametrize("kind", ["head", "resolve", "content", "tree", "batch"])
def test_the_hub_says_later(hub: HubProcess, bucket: HubBucket, fault: str, kind: str) -> None:
    bucket.put("key", b"x")
    hub.faults(**{fault: 1, "only": kind, "retry_after": 17})
    calls: dict[str, Callable[[], object]] = {
        "head": lambda: bucket.head("key"),
        "resolve": lambda: bucket.get("key"),
        "content": lambda: bucket.get("key"),
        "tree": lambda: list(bucket.list()),
        "batch": lambda: bucket.put("key", b"y"),
    }
    started = time.monotonic()
    with pytest.raises(BucketUnavailable) as unavailable:
        calls[kind]()
    assert unavailable.value.retry_after == 17
    assert time.monotonic() - started < 5  # whoever calls decides about waiting
    calls[kind]()


@pytest.mark.parametrize("kind", ["token", "xorb-put", "shard", "reconstruction", "xorb-get"])
def test_the_xet_store_is_down(hub: HubProcess, kind: str) -> None:
    bucket = opened(hub)
    opened(hub, place=f"{bucket.location.bucket_id}/runs/7").put("large", LARGE)
    hub.faults(unavailable=100, only=kind)
    reading = kind in ("reconstruction", "xorb-get")
    with pytest.raises(BucketUnavailable):
        bucket.get("large") if reading else bucket.put("key", os.urandom(100))
    hub.heal()
    assert bucket.get("large") == LARGE
    with pytest.raises(KeyNotFound):
        bucket.head("key")


def test_a_short_trouble_of_the_xet_store_is_bridged(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("large", LARGE)
    for kind in ("xorb-put", "shard", "reconstruction", "xorb-get"):
        hub.faults(unavailable=1, only=kind)
        bucket.put("key", os.urandom(100))
        assert bucket.get("large") == LARGE
        assert hub.faults()["unavailable"] == 0


def test_a_batch_that_fails_in_part(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("there", b"x")
    hub.faults(fail_batch={"runs/7/key": 1, "runs/7/there": 1})
    with pytest.raises(BucketUnavailable, match=r"runs/7/key.*please retry"):
        bucket.put("key", b"x")
    with pytest.raises(KeyNotFound):
        bucket.head("key")
    with pytest.raises(BucketUnavailable, match="please retry"):
        bucket.delete("there")
    bucket.put("key", b"x")
    bucket.delete("there")
    assert [info.key for info in bucket.list()] == ["key"]


def test_xet_tokens_that_end_early(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("large", LARGE)
    assert bucket.get("large") == LARGE
    hub.faults(expire_tokens=True)
    assert bucket.get("large") == LARGE
    hub.faults(expire_tokens=True)
    content = os.urandom(1000)
    bucket.put("key", content)
    assert bucket.get("key") == content


def test_xet_tokens_that_live_a_second(tmp_path: Path) -> None:
    with HubProcess(tmp_path, *OPTIONS, "--ttl", "1") as hub, opened(hub) as bucket:
        for _ in range(2):
            bucket.put("large", LARGE)
            assert bucket.get("large") == LARGE
            time.sleep(1.1)


def test_a_short_read_is_an_error(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("key", b"x" * 100)
    hub.faults(short_reads=1)
    with pytest.raises(BucketUnavailable, match="99 of 100"):
        bucket.get("key")
    assert bucket.get("key") == b"x" * 100


def test_damage_is_left_to_who_reads(hub: HubProcess, bucket: HubBucket) -> None:
    """hf_xet returns wrong bytes without a word, which is why payloads carry a SHA-256."""
    content = os.urandom(SMALL + 1)
    bucket.put("key", content)
    hub.faults(corrupt_xorbs=1)
    damaged = bucket.get("key")
    assert damaged != content
    assert len(damaged) == len(content)
    assert bucket.get("key") == content


# --- large and small ----------------------------------------------------------------------------


def test_large_objects_go_through_a_file_that_nobody_sees(
    hub: HubProcess, bucket: HubBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bucket.put("key", LARGE)
    hub.reset()
    pieces = bucket.stream("key", chunk=1000)
    first = next(pieces)
    assert hub.stats()["requests"].keys() >= {"resolve", "reconstruction", "xorb-get"}
    assert list(tmp_path.iterdir()) == []
    assert first + b"".join(pieces) == LARGE


def test_a_download_that_is_short_is_an_error(hub: HubProcess, bucket: HubBucket) -> None:
    content = os.urandom(70 << 20)  # of two xorbs, so of two terms
    bucket.put("key", content)
    hub.faults(short_files=100)
    with pytest.raises(BucketUnavailable):
        bucket.get("key")
    hub.heal()
    assert bucket.get("key") == content


def test_without_redirects(tmp_path: Path) -> None:
    with HubProcess(tmp_path, *OPTIONS, "--direct") as hub, opened(hub) as bucket:
        for content in (b"", b"small", LARGE):
            bucket.put("key", content)
            assert bucket.get("key") == content
            assert bucket.head("key").size == len(content)
        hub.faults(short_reads=1)
        bucket.put("key", b"x" * 100)
        with pytest.raises(BucketUnavailable):
            bucket.get("key")


def test_a_large_create_with_the_gateway_looks_first(
    hub: HubProcess, conditional: HubBucket
) -> None:
    content = bytes(GATEWAY_LIMIT + 1)
    conditional.create("key", content)
    assert "s3-put" not in hub.stats()["requests"]
    with pytest.raises(AlreadyExists):
        conditional.create("key", content)
    with pytest.raises(AlreadyExists):
        conditional.create("key", b"small")


def test_two_writers_without_the_gateway_may_both_win(hub: HubProcess, bucket: HubBucket) -> None:
    """What the capability says, seen: between the look and the write there is a gap."""
    bucket.put("other", b"")
    real, other = bucket.head, again(hub, bucket)

    def slow(key: str) -> object:
        try:
            return real(key)
        finally:
            other.put(key, b"theirs")

    bucket.head = slow  # type: ignore[method-assign, assignment]
    bucket.create("key", b"mine")
    assert other.get("key") == b"mine"


# --- listing ------------------------------------------------------------------------------------


def test_a_listing_of_many_pages_has_one_prefix_and_only_keys(
    hub: HubProcess, bucket: HubBucket
) -> None:
    around = opened(hub, place=bucket.location.bucket_id)
    for name in ("runs/7x", "runs/70/key", "run", "other/runs/7/key"):
        around.put(name, b"")
    names = [f"commits/{number:010}.json" for number in range(12)]
    together(lambda name: bucket.put(name, b"x"), names)
    assert [info.key for info in bucket.list()] == names
    assert [info.key for info in bucket.list("commits/000000001")] == names[10:]
    hub.reset()
    assert len(list(bucket.list())) == 12
    assert hub.stats()["requests"] == {"tree": 3}


def test_what_is_no_key_is_not_listed(hub: HubProcess, bucket: HubBucket) -> None:
    """Others may write to the bucket too, with names that thinwire does not use."""
    bucket.put("key", b"x")
    api = HfApi(hub.url, token=WRITER)
    names = ["runs/7/.hidden", "runs/7/a b", "runs/7/d/\N{SNOWMAN}", "runs/7/d/fine"]
    api.batch_bucket_files(bucket.location.bucket_id, add=[(b"x", name) for name in names])
    assert [info.key for info in bucket.list()] == ["d/fine", "key"]


def test_a_stale_listing_does_not_fool_reading(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("old", b"")
    bucket.put("new", b"x")
    hub.faults(stale_listings=1)
    assert [info.key for info in bucket.list()] == ["old"]
    assert bucket.get("new") == b"x"


# --- watching -----------------------------------------------------------------------------------


class Bell:
    """What ``watch`` rings."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def rang(self, within: float) -> bool:
        rang = self.event.wait(within)
        self.event.clear()
        return rang


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "thinwire-events" in thread.name]


def test_watching(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("key", b"")
    bell = Bell()
    end = bucket.watch("commits/", bell.event.set)
    assert bell.rang(10)  # connected: whatever came before was not told
    changes: list[Callable[[], None]] = [
        lambda: bucket.put("commits/1", b"x"),
        lambda: bucket.put("commits/1", b"y"),
        lambda: bucket.delete("commits/1"),
    ]
    for change in changes:
        change()
        assert bell.rang(10)
    bucket.put("deltas/1", b"x")
    bucket.put("commits", b"x")
    assert not bell.rang(0.3)
    hub.faults(duplicate_events=True)
    bucket.put("commits/2", b"x")
    assert bell.rang(10)
    end()
    end()
    assert followers() == []
    bell.event.clear()
    bucket.put("commits/3", b"x")
    assert not bell.rang(0.3)


def test_a_watch_ends_at_once_and_with_the_bucket(hub: HubProcess, bucket: HubBucket) -> None:
    bucket.put("key", b"")
    bells = [Bell() for _ in range(3)]
    for bell in bells:
        bucket.watch("", bell.event.set)
    assert all(bell.rang(10) for bell in bells)
    assert len(followers()) == 3
    started = time.monotonic()
    bucket.close()
    assert followers() == []
    assert time.monotonic() - started < 1


def test_a_watch_ends_though_the_hub_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bucket = open_hub(f"hf://buckets/me/b?endpoint=http://127.0.0.1:{silent.getsockname()[1]}")
        end = bucket.watch("", lambda: None)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(100).startswith(b"GET")
            started = time.monotonic()
            end()
            assert time.monotonic() - started < 5
    deadline = time.monotonic() + 10
    while followers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert followers() == []


def test_watching_a_bucket_yet_to_be_made(hub: HubProcess, bucket: HubBucket) -> None:
    bell = Bell()
    bucket.watch("", bell.event.set)
    assert not bell.rang(0.5)
    bucket.put("key", b"x")
    assert bell.rang(20)


def test_watching_from_inside_and_without_rights(
    hub: HubProcess, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("key", b"")
    known, ended = threading.Event(), threading.Event()
    ends: list[Callable[[], None]] = []

    def wake() -> None:
        known.wait(10)
        ends[0]()
        ended.set()

    ends.append(bucket.watch("", wake))
    known.set()
    assert ended.wait(10)
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    end = bucket.watch("", ended.set)
    deadline = time.monotonic() + 10
    while followers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert followers() == []
    end()


# --- a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", "create=s3"])
def test_a_run(hub: HubProcess, options: str) -> None:
    gateway = f"&gateway={hub.gateway}" if options else ""
    states = series(4)
    with contextlib.closing(opened(hub, options + gateway)) as bucket:
        start(bucket, *states).close()
        with contextlib.closing(again(hub, bucket)) as seen:
            assert check_history(seen, states) == [0, 1, 2, 3]
            assert pulled(seen) == states[-1].raw


def test_a_second_writer_loses_with_the_gateway(hub: HubProcess, conditional: HubBucket) -> None:
    states = series(3)
    first = start(conditional, states[0])
    options = f"create=s3&gateway={hub.gateway}"
    place = f"{conditional.location.bucket_id}/{conditional.location.prefix}"
    with contextlib.closing(opened(hub, options, place)) as same:
        second = start(same, states[0])  # takes the run over
        with pytest.raises(WriterConflict):
            first.publish(states[1].source).result()
        second.publish(states[2].source).result()
        second.close()
        assert pulled(same) == states[2].raw


# --- the client's settings ----------------------------------------------------------------------

SCRIPT = """
import sys
from thinwire.bucket import open_bucket
from thinwire.errors import Misuse
with open_bucket("hf://buckets/me/settings") as bucket:
    try:
        bucket.put("key", b"x")
        print(bucket.get("key").decode())
    except Misuse as error:
        print(error.hint)
"""


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        ({}, "x"),
        ({"HF_HUB_OFFLINE": "1"}, "unset HF_HUB_OFFLINE"),
        ({"HF_TOKEN": ""}, "run `hf auth login`"),
    ],
)
def test_settings_are_huggingface_hubs(
    hub: HubProcess, tmp_path: Path, settings: dict[str, str], printed: str
) -> None:
    """In a process of its own: the client reads most of them when it is imported."""
    (tmp_path / "token").write_text(WRITER)  # as `hf auth login` leaves it
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path),
        **settings,
    }
    if "HF_TOKEN" in settings:
        (tmp_path / "token").unlink()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith(printed), done.stderr


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_uses_the_bucket(bucket: HubBucket, conditional: HubBucket) -> None:
    for place in (bucket, conditional):
        place.put("parent", LARGE)
        place.create("parent-too", b"x")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                place.put("child", b"y")
                place.create("child-too", b"z")
                status = 0 if place.get("parent") == LARGE else 2
            finally:
                os._exit(status)
        deadline = time.monotonic() + 60
        done = (0, 0)
        while done == (0, 0) and time.monotonic() < deadline:
            done = os.waitpid(child, os.WNOHANG)
            time.sleep(0.05)
        if done == (0, 0):
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert done == (child, 0)
        assert place.get("child") == b"y"
        assert place.get("parent") == LARGE
