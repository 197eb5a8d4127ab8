"""Object store URLs, settings and verdicts: everything that needs no server."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from thinwire.bucket import open_bucket
from thinwire.bucket._hub_gateway import gateway_of
from thinwire.bucket._hub_url import parse_hub_url
from thinwire.bucket._objects_errors import Answer, judge, missing, read_answer
from thinwire.bucket._objects_listing import Listing, by_key, listing_of
from thinwire.bucket._objects_stores import settings, wants_boto3
from thinwire.bucket._objects_url import Location, parse_location
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    InvalidKey,
    KeyNotFound,
    Misuse,
)

GOOD = {
    "s3://bucket": Location("s3", "bucket"),
    "s3://bucket/": Location("s3", "bucket"),
    "S3://bucket/runs/one/": Location("s3", "bucket", "runs/one"),
    "s3://My_Bucket.eu-1/a=b+c@d": Location("s3", "My_Bucket.eu-1", "a=b+c@d"),
    "s3://b-1/p?region=eu-west-1&endpoint=http://127.0.0.1:8333/": Location(
        "s3", "b-1", "p", {"endpoint": "http://127.0.0.1:8333", "region": "eu-west-1"}
    ),
    "s3://b-1?endpoint=https%3A%2F%2Fs3.example.com%2Fnamespace": Location(
        "s3", "b-1", "", {"endpoint": "https://s3.example.com/namespace"}
    ),
    "s3://b-1?anonymous=1&virtual_hosted=False": Location(
        "s3", "b-1", "", {"anonymous": "true", "virtual_hosted": "false"}
    ),
    "s3://b-1?profile=team%20a": Location("s3", "b-1", "", {"profile": "team a"}),
    "gs://bucket_with.dots/p?anonymous=true": Location(
        "gs", "bucket_with.dots", "p", {"anonymous": "true"}
    ),
    "az://container/p?account=store1": Location("az", "container", "p", {"account": "store1"}),
}

BAD = [
    "s3://",
    "s3:///prefix",
    "s3://ab",
    "s3://-bucket",
    "s3://bucket-",
    "s3://two..dots",
    "s3://bucket:80/p",
    "s3://buc ket",
    "s3://b\N{LATIN SMALL LETTER U WITH DIAERESIS}cket",
    "s3://[::1/p",
    "s3://bucket/a//b",
    "s3://bucket/../b",
    "s3://bucket/%2e%2e/b",
    "s3://bucket/.hidden",
    "s3://bucket/with%20space",
    "s3://bucket/" + "x" * 121,
    "s3://bucket/p#fragment",
    "s3://bucket?unknown=1",
    "s3://bucket?account=store1",
    "s3://bucket?region=eu-west-1&region=eu-west-2",
    "s3://bucket?region=",
    "s3://bucket?region=EU",
    "s3://bucket?region=eu.evil.example",
    "s3://bucket?anonymous=maybe",
    "s3://bucket?endpoint=127.0.0.1:8333",
    "s3://bucket?endpoint=ftp://host",
    "s3://bucket?endpoint=http://",
    "s3://bucket?endpoint=http://host:port",
    "s3://bucket?endpoint=http://host?x=1",
    "s3://bucket?endpoint=http://ho%20st",
    "s3://bucket?endpoint=HTTP://host",
    "s3://bucket?endpoint=http://host:99999",
    "s3://bucket?endpoint=http://host/%7Bpath%7D",
    "az://Container",
    "az://con--tainer?account=store1",
    "az://container?account=Store",
    "gs://bucket?region=eu",
]

SECRET = [
    "s3://AKIAHUSH:hushhush@bucket/p",
    "s3://bucket?secret_access_key=hushhush",
    "s3://bucket?aws_session_token=hushhush",
    "s3://bucket?endpoint=http://user:hushhush@host",
    "az://container?account=store1&sas=hushhush",
    "az://container?account_key=hushhush",
    "gs://bucket?bearer_token=hushhush",
]


@pytest.mark.parametrize("url", list(GOOD))
def test_what_a_url_says(url: str) -> None:
    assert parse_location(url) == GOOD[url]


@pytest.mark.parametrize("location", list(GOOD.values()), ids=str)
def test_it_is_written_back(location: Location) -> None:
    assert parse_location(location.url) == location


@pytest.mark.parametrize("url", list(GOOD))
def test_opening_connects_to_nothing(url: str, credentials: pytest.MonkeyPatch) -> None:
    bucket = open_bucket(url)
    assert open_bucket(bucket.url).url == bucket.url == GOOD[url].url
    assert bucket.capabilities.create_only
    bucket.close()


@pytest.mark.parametrize("url", BAD)
def test_refused_urls(url: str, credentials: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misuse):
        open_bucket(url)


@pytest.mark.parametrize("url", SECRET)
def test_secrets_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(Misuse) as caught:
        open_bucket(url)
    assert "hush" not in str(caught.value).lower() + caught.value.hint.lower()
    assert caught.value.hint


HUB_SECRETS = [
    "hf://buckets/me/x?token=hf_hush",
    "hf://buckets/me/x?sig=hush",
    "hf://me:hf_hush@buckets/me/x",
    "hf://hf_hush@buckets/me/x",
    "hf://buckets/me:hf_hush@x/y",
]


@pytest.mark.parametrize("url", HUB_SECRETS)
def test_a_hubs_secrets_neither(url: str) -> None:
    with pytest.raises(Misuse, match="may not hold credentials") as caught:
        parse_hub_url(url)
    assert "hush" not in str(caught.value)
    assert "HF_TOKEN" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "hf://buckets/me/x?password_of_mine=hush",
        "hf://buckets/me/x?mine=hush",
        "hf://buckets/me/x?create=hub&gateway=hush",
        "hf://buckets/me/x#hush",
        "hf://buckets/me/x/a b?mine=hush",
    ],
)
def test_a_malformed_hub_url_is_shown_without_its_query(url: str) -> None:
    with pytest.raises(Misuse) as caught:
        parse_hub_url(url)
    assert "hush" not in str(caught.value)


CONTROL = {
    "AWS_ACCESS_KEY_ID": "s3://bucket",
    "AWS_SECRET_ACCESS_KEY": "s3://bucket",
    "AWS_SESSION_TOKEN": "s3://bucket",
    "AWS_REGION": "s3://bucket",
    "AZURE_STORAGE_ACCOUNT_KEY": "az://container?account=store1",
    "AZURE_STORAGE_TOKEN": "az://container?account=store1",
    "GOOGLE_BEARER_TOKEN": "gs://bucket",
}


@pytest.mark.parametrize("character", ["\r", "\n", "\x7f"])
@pytest.mark.parametrize("name", list(CONTROL))
def test_a_variable_with_a_control_character(
    credentials: pytest.MonkeyPatch, name: str, character: str
) -> None:
    credentials.setenv(name, f"hush{character}")
    with pytest.raises(Misuse, match=name) as caught:
        open_bucket(CONTROL[name])
    assert "hush" not in str(caught.value) + caught.value.hint


def test_variables_that_may_have_lines(credentials: pytest.MonkeyPatch) -> None:
    credentials.setenv("AWS_SESSION_TOKEN", "x\n")
    chosen = settings(parse_location("gs://bucket"), {"GOOGLE_SERVICE_ACCOUNT_KEY": "{\n}"})
    assert chosen.store == "GCSStore"
    open_bucket("gs://bucket").close()


def test_an_unknown_option_is_answered_with_the_known() -> None:
    with pytest.raises(Misuse) as caught:
        open_bucket("s3://bucket?zone=1")
    assert "endpoint" in caught.value.hint
    assert "region" in caught.value.hint


def test_a_prefix_follows_the_rules_of_keys() -> None:
    with pytest.raises(InvalidKey):
        parse_location("s3://bucket/a/../b")


# --- settings --------------------------------------------------------------------------------


def test_a_plain_bucket_of_amazons() -> None:
    chosen = settings(Location("s3", "bucket"), {})
    assert chosen.store == "S3Store"
    assert not chosen.allow_http
    assert chosen.sorted_by_key
    assert "aws_endpoint_url_s3" not in chosen.config
    assert chosen.config["conditional_put"] == "etag"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_endpoints_from_the_environment(name: str) -> None:
    chosen = settings(Location("s3", "bucket"), {name: "http://127.0.0.1:8333/"})
    assert chosen.config["aws_endpoint_url_s3"] == "http://127.0.0.1:8333"
    assert chosen.allow_http
    assert not chosen.sorted_by_key
    with pytest.raises(Misuse, match=name) as caught:
        settings(Location("s3", "bucket"), {name: "http://me:hushhush@host"})
    assert "hushhush" not in str(caught.value)


def test_a_urls_endpoint_outranks_the_environments() -> None:
    location = parse_location("s3://bucket?endpoint=https://one.example")
    chosen = settings(location, {"AWS_ENDPOINT_URL_S3": "http://two.example"})
    assert chosen.config["aws_endpoint_url_s3"] == "https://one.example"
    assert not chosen.allow_http


def test_virtual_hosting_puts_the_bucket_into_the_host() -> None:
    location = parse_location("s3://bucket?endpoint=https://s3.example&virtual_hosted=true")
    chosen = settings(location, {})
    assert chosen.config["aws_endpoint_url_s3"] == "https://bucket.s3.example"
    assert chosen.config["virtual_hosted_style_request"] is True


def test_directory_buckets_are_not_listed_in_order() -> None:
    assert not settings(Location("s3", "name--usw2-az1--x-s3"), {}).sorted_by_key


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_anonymous(scheme: str) -> None:
    location = Location(scheme, "name", "", {"anonymous": "true", "account": "store1"})
    assert settings(location, {}).config["skip_signature"] is True


def test_azure_wants_an_account() -> None:
    location = Location("az", "container")
    with pytest.raises(Misuse, match="account"):
        settings(location, {})
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        assert settings(location, {name: "store1"}).config["account_name"] == "store1"


def test_boto3_reads_what_obstore_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bucket = Location("s3", "bucket")
    for installed in (False, True):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=installed: found or None)
        assert not wants_boto3(bucket, {}, tmp_path)
        assert not wants_boto3(bucket, {"AWS_ACCESS_KEY_ID": "x", "AWS_PROFILE": "p"}, tmp_path)
        assert not wants_boto3(Location("gs", "bucket"), {"AWS_PROFILE": "p"}, tmp_path)
        for environment, options in (({"AWS_PROFILE": "p"}, {}), ({}, {"profile": "p"})):
            if installed:
                assert wants_boto3(Location("s3", "bucket", "", options), environment, tmp_path)
            else:
                with pytest.raises(Misuse, match="boto3"):
                    wants_boto3(Location("s3", "bucket", "", options), environment, tmp_path)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").touch()
    assert wants_boto3(bucket, {}, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not wants_boto3(bucket, {}, tmp_path)


# --- listing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "in_order", "expected"),
    [
        ("", True, Listing("run", None)),
        ("", False, Listing("run", None)),
        ("commits/", True, Listing("run/commits", None)),
        ("commits/00", True, Listing("run/commits", "run/commits/0")),
        ("commits/0", True, Listing("run/commits", None)),
        ("commits/00", False, Listing("run/commits", None)),
        ("c", True, Listing("run", None)),
        ("comm", True, Listing("run", "run/com")),
        ("/", True, None),
        ("a//b", True, None),
        ("../a", True, None),
        ("a/.b", True, None),
        ("with space", True, None),
    ],
)
def test_what_to_list(prefix: str, in_order: bool, expected: Listing | None) -> None:
    assert listing_of("run/", prefix, in_order=in_order) == expected


KEYS = ["a", "a+", "a-b", "a/b", "a/c", "a0", "b"]


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a0", "b", "c", "0"])
def test_keys_come_sorted_and_filtered(prefix: str) -> None:
    expected = [key for key in KEYS if key.startswith(prefix)]
    tree = [("run/" + key, 0) for key in ["a", "a/c", "a/b", "a+", "a-b", "a0", "b", "b/.c", "b c"]]
    sorted_store = [("run/" + key, 0) for key in KEYS] + [("other", 0)]
    found = by_key(iter(tree), "run/", prefix, in_order=False)
    assert [info.key for info in found] == expected
    found = by_key(iter(sorted_store), "run/", prefix, in_order=True)
    assert [info.key for info in found] == expected


def test_a_listing_in_order_stops_behind_the_prefix() -> None:
    source = iter([("a/1", 0), ("a/2", 0), ("b", 0), ("c", 0)])
    assert [info.key for info in by_key(source, "", "a/", in_order=True)] == ["a/1", "a/2"]
    assert next(source) == ("c", 0)


def test_a_broken_promise_of_order_is_an_error() -> None:
    source = iter([("b", 0), ("a", 0)])
    with pytest.raises(BucketUnavailable):
        list(by_key(source, "", "", in_order=True))


# --- verdicts --------------------------------------------------------------------------------

BUCKET = Location("s3", "bucket", "p")
FRAME = "Generic S3 error: Error performing GET https://s3.example/bucket/p/key in 5.1ms - "


def test_an_answer_is_taken_apart() -> None:
    body = "<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
    text = FRAME + f"Server returned non-2xx status code: 503 Service Unavailable: {body}"
    answer = read_answer(Exception(text + "\n\nDebug source:\nstatus: 404 <Code>NoSuchKey</Code>"))
    assert answer == Answer(
        503, "SlowDown", "503 SlowDown Reduce your rate.", "https://s3.example/bucket/p/key"
    )


def test_a_body_cannot_pose_as_another_status() -> None:
    body = "Server returned non-2xx status code: 404 Not Found: <Code>NoSuchKey</Code>"
    answer = read_answer(Exception(FRAME + f"Server returned non-2xx status code: 403 No: {body}"))
    assert answer.status == 403
    assert type(judge(answer, "read", "key", BUCKET)) is AccessDenied


@pytest.mark.parametrize("secret", ["sig=hushhush", "X-Amz-Signature=hushhush"])
def test_a_reason_quotes_no_url(secret: str) -> None:
    url = f"https://s3.example/bucket/p/key?{secret}"
    for text in (
        f"Generic S3 error: Error performing GET {url} in 5ms - HTTP error: error sending {url}",
        f"Generic S3 error: something about {url}",
    ):
        assert "hushhush" not in read_answer(Exception(text)).reason


@pytest.mark.parametrize(
    ("status", "code", "action", "kind"),
    [
        (404, "NoSuchKey", "read", KeyNotFound),
        (404, "NoSuchBucket", "read", BucketNotFound),
        (404, "ContainerNotFound", "write", BucketNotFound),
        (404, "", "list", BucketNotFound),
        (404, "", "write", BucketUnavailable),
        (404, "NoSuchUpload", "write", BucketUnavailable),
        (403, "AccessDenied", "read", AccessDenied),
        (401, "", "list", AccessDenied),
        (400, "ExpiredToken", "read", AccessDenied),
        (412, "PreconditionFailed", "create", AlreadyExists),
        (409, "BlobAlreadyExists", "create", AlreadyExists),
        (409, "ConditionalRequestConflict", "create", BucketUnavailable),
        (409, "OperationAborted", "write", BucketUnavailable),
        (412, "PreconditionFailed", "read", BucketUnavailable),
        (429, "", "read", BucketUnavailable),
        (500, "InternalError", "create", BucketUnavailable),
        (503, "SlowDown", "list", BucketUnavailable),
        (501, "NotImplemented", "create", Misuse),
        (301, "PermanentRedirect", "read", Misuse),
        (400, "AuthorizationHeaderMalformed", "read", Misuse),
        (400, "InvalidArgument", "read", Misuse),
        (400, "BadDigest", "write", BucketUnavailable),
        (None, "", "create", BucketUnavailable),
    ],
)
def test_what_an_answer_means(status: int, code: str, action: str, kind: type[Exception]) -> None:
    answer = Answer(status, code, "words", "https://s3.example/bucket/p/key")
    error = judge(answer, action, "'key'", BUCKET)  # type: ignore[arg-type]
    assert type(error) is kind
    if kind is not KeyNotFound and kind is not AlreadyExists:
        assert error.hint


def test_a_404_from_elsewhere_is_no_missing_key() -> None:
    metadata = Answer(404, "", "404", "http://169.254.169.254/bucket/api/token")
    tokens = Answer(400, "", "400", "https://oauth2.example/token")
    down = Answer(503, "", "503", "https://oauth2.example/token")
    assert type(judge(metadata, "read", "'key'", BUCKET)) is AccessDenied
    assert type(judge(tokens, "read", "'key'", BUCKET)) is AccessDenied
    assert type(judge(down, "read", "'key'", BUCKET)) is BucketUnavailable


def test_what_is_missing() -> None:
    assert missing(Answer(404, "NoSuchKey", "")) == "key"
    assert missing(Answer(404, "NoSuchBucket", "")) == "bucket"
    assert missing(Answer(404, "", "")) == "either"
    assert missing(Answer(403, "NoSuchKey", "")) is None


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("names", [["run/a", "run/b"], ["run/a"], ["run/.a"], ["elsewhere"]])
def test_a_page_that_comes_for_ever(names: list[str], in_order: bool) -> None:
    pages = itertools.chain(itertools.repeat(names, 10_000))
    found = ((name, 1) for page in pages for name in page)
    with pytest.raises(BucketUnavailable, match=r"again|after"):
        list(by_key(found, "run/", "", in_order=in_order))
    assert next(found, None) is not None


def test_keys_do_not_go_to_the_public_gateway_of_another_hub() -> None:
    url = "hf://buckets/me/runs?create=s3&endpoint=http://127.0.0.1:1"
    with pytest.raises(Misuse, match="needs to know its S3 gateway"):
        open_bucket(url)
    open_bucket(f"{url}&gateway=http://127.0.0.1:1/s3")


def test_the_public_hubs_gateway_is_known() -> None:
    location = parse_hub_url("hf://buckets/me/run?create=s3")
    assert gateway_of(location, "https://huggingface.co") == "https://s3.hf.co"
    with pytest.raises(Misuse, match="needs to know"):
        gateway_of(location, "https://hub.example.com")
