"""open_bucket: which URL is which bucket."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

import thinwire.bucket
from thinwire.bucket import LocalBucket, MemoryBucket, open_bucket
from thinwire.errors import Misuse


def root(location: str | os.PathLike[str]) -> Path:
    bucket = open_bucket(location)
    assert isinstance(bucket, LocalBucket)
    return bucket.root


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert root("runs/1") == tmp_path / "runs" / "1"
    assert root("./a:b/../c") == tmp_path / "c"
    assert root(tmp_path / "d") == tmp_path / "d"
    assert root("~/e") == tmp_path / "home" / "e"
    assert list(tmp_path.iterdir()) == []


def test_file_urls() -> None:
    assert root("file:///data/run%201") == Path("/data/run 1")
    assert root("file://localhost/data/run") == Path("/data/run")
    assert root("FILE:///data/") == Path("/data")


def test_a_local_url_opens_the_same_place(tmp_path: Path) -> None:
    bucket = LocalBucket(tmp_path / "a b%20#?")
    assert root(bucket.url) == bucket.root


@pytest.mark.parametrize("url", ["file://host/data", "file://", "file:///a?b", "file:///a#b"])
def test_malformed_file_urls(url: str) -> None:
    with pytest.raises(Misuse, match="not a local bucket"):
        open_bucket(url)


def test_a_named_memory_bucket_is_shared_and_an_unnamed_one_is_not() -> None:
    name = f"memory://{uuid.uuid4()}"
    open_bucket(name).put("key", b"x")
    assert open_bucket(name + "/").get("key") == b"x"
    assert open_bucket(name).url == name
    assert list(open_bucket(f"{name}-other").list()) == []
    open_bucket("memory://").put("key", b"x")
    assert list(open_bucket("memory://").list()) == []


def test_a_bucket_passes_through() -> None:
    bucket = MemoryBucket()
    assert open_bucket(bucket) is bucket


@pytest.mark.parametrize("url", ["gopher://x/y", "Gopher://x"])
def test_an_unknown_scheme_names_the_known_ones(url: str) -> None:
    with pytest.raises(Misuse, match=r"unknown bucket scheme '[Gg]opher'") as caught:
        open_bucket(url)
    assert "file://" in caught.value.hint
    assert "memory://" in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hush@h/x",
        "https://h/x?token=hush",
        "https://h/x#hush",
        "s3:/me:hush@h/x",
        Path("s3://me:hush@h/x"),
        "file://me:hush@h/x",
        "file:///x?token=hush",
    ],
)
def test_what_may_be_a_secret_is_not_repeated(url: str | Path) -> None:
    with pytest.raises(Misuse) as caught:
        open_bucket(url)
    assert "hush" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("url", ["file://[", "hf://[", "s3://["])
def test_brackets_that_do_not_close(url: str) -> None:
    with pytest.raises(Misuse):
        open_bucket(url)


@pytest.mark.parametrize("url", [Path("memory://x"), "file:/data", "memory:/x"])
def test_a_url_that_lost_a_slash_is_not_a_folder(url: str | Path) -> None:
    with pytest.raises(Misuse, match="not a bucket URL"):
        open_bucket(url)


@pytest.mark.parametrize("url", ["", "a\0b"])
def test_not_a_location(url: str) -> None:
    with pytest.raises(Misuse, match="not a bucket URL"):
        open_bucket(url)


def test_the_public_names_are_sorted_and_there() -> None:
    names = thinwire.bucket.__all__
    assert names == sorted(names)
    assert all(hasattr(thinwire.bucket, name) for name in names)
