"""A Hugging Face bucket: ``hf://buckets/<namespace>/<name>[/<prefix>]``.

Token, endpoint, proxies and offline mode are those of huggingface_hub: who has run ``hf auth
login`` has nothing to set up. The first write creates the bucket, private, where the token may;
reading never does.

**What writing promises.** Every object goes up by itself: its content into the Xet store, then its
name in a batch of its own, whose answer is checked. So an object that was written before another is
there before it, and an object is whole or absent.

**What** ``create`` **promises** depends on the URL:

* By default it uploads the content, looks, and then gives the content its name, since the Hub's own
  API has no conditional write. One writer at a time is safe. Of two writers that create the same
  key within the time of that last request both may believe they did, and the later one's object
  stays; the publisher's chain check then finds out, but only afterwards.
  ``capabilities.create_only`` is false.
* With ``?create=s3`` an object of up to 16 MiB, which every commit is, is created through the
  Hub's S3 gateway on the condition that there is none: exactly one of any number of writers wins.
  ``capabilities.create_only`` is true. It needs S3 keys beside the Hub token (``AWS_ACCESS_KEY_ID``
  and ``AWS_SECRET_ACCESS_KEY``). Larger objects, which are payloads named by their content, still
  look first and then write: whoever writes such a name writes the same bytes.

**Options**, after a ``?`` in the URL:

============  ==================================================================================
``create``    ``hub`` (the default) or ``s3``, as above
``gateway``   the S3 gateway's address without namespace; ``https://s3.hf.co`` by default for
              the public Hub
``endpoint``  the Hub's address; by default huggingface_hub's, which reads ``HF_ENDPOINT``
============  ==================================================================================
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thinwire.bucket._hub_client import HubClient
from thinwire.bucket._hub_errors import translated
from thinwire.bucket._hub_events import Follower
from thinwire.bucket._hub_gateway import GATEWAY_LIMIT, Gateway, gateway_of
from thinwire.bucket._hub_url import HubLocation, parse_hub_url
from thinwire.bucket._hub_xet import XetStore
from thinwire.bucket.base import (
    CHUNK,
    Bucket,
    Capabilities,
    Data,
    ObjectInfo,
    check_key,
    check_prefix,
    data_size,
)
from thinwire.errors import (
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    InvalidKey,
    KeyNotFound,
    Misuse,
)

__all__ = ["HubBucket", "open_hub"]

SMALL = 8 << 20
"""Bytes up to which an object is read with plain HTTP; hf_xet takes more requests, but several at
a time."""

_SEGMENT = r"[A-Za-z0-9_@=+-][A-Za-z0-9._@=+-]*"
_SIZE = re.compile(r"[0-9]{1,18}")
_KEY_START = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?")


def open_hub(url: str) -> HubBucket:
    """The bucket at ``url``. Nothing is connected to yet.

    Raises:
        Misuse: the URL is malformed, or has an option that does not exist.
    """
    return HubBucket(parse_hub_url(url))


class HubBucket(Bucket):
    """The bucket, or the part of it under a prefix, that ``location`` names."""

    def __init__(self, location: HubLocation) -> None:
        self.location = location
        self.url = location.url
        self._client = HubClient(location.bucket_id, location.endpoint)
        self._xet = XetStore(self._client)
        self._gateway = None
        if location.create == "s3":
            self._gateway = Gateway(location, gateway_of(location, self._client.endpoint))
        self._followers: set[Follower] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            create_only=self._gateway is not None, atomic_replace=True, notifications=True
        )

    # --- reading ---------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        return b"".join(self.stream(key, chunk=SMALL))

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        path, subject = self._path(key), f"{key!r} in {self.url}"
        with translated("read", subject):
            with self._client.stream(self._client.file_url(path)) as answer:
                size, xet_hash, elsewhere = _resolved(answer)
                if elsewhere is None and (size <= SMALL or xet_hash is None):
                    yield from _whole(answer.iter_bytes(chunk), size, subject)
                    return
            if size > SMALL and xet_hash is not None:
                yield from self._xet.download(xet_hash, size, chunk=chunk)
            elif size and elsewhere is not None:
                # That URL is the right to read; the token stays with the Hub.
                with self._client.stream(elsewhere, headers={}, follow=True) as answer:
                    yield from _whole(answer.iter_bytes(chunk), size, subject)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with translated("look at", f"{key!r} in {self.url}"):
            headers = {"Accept-Encoding": "identity"}
            answer = self._client.request("HEAD", self._client.file_url(path), headers=headers)
            return ObjectInfo(key, _resolved(answer)[0])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._require_open()
        wanted = self.location.prefix + check_prefix(prefix)
        with translated("list", self.url):
            if _KEY_START.fullmatch(prefix):
                found = sorted(self._client.files(wanted))
            else:  # no key starts like this, but a missing bucket is an error all the same
                self._client.request("GET", self._client.bucket_url)
                found = []
        for path, size in found:
            key = path[len(self.location.prefix) :]
            if path.startswith(wanted) and _is_key(key):
                yield ObjectInfo(key, size)

    # --- writing ---------------------------------------------------------------------------

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)
        data_size(data)  # a file that cannot be read is told before a bucket is made for it
        self._in_bucket(f"{key!r} in {self.url}", lambda: self._write(path, data))

    def create(self, key: str, data: Data) -> None:
        self._path(key)
        if self._gateway is not None and data_size(data) <= GATEWAY_LIMIT:
            gateway = self._gateway
            self._in_bucket(f"{key!r} in {self.url}", lambda: gateway.create(key, data))
            return
        if data_size(data) > SMALL:  # what is there already need not be uploaded
            self._require_free(key)
        self._in_bucket(f"{key!r} in {self.url}", lambda: self._create(key, data))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with translated("delete", f"{key!r} in {self.url}"):
            error = self._client.delete_file(path)
        if error is None:
            return
        with contextlib.suppress(KeyNotFound):
            self.head(key)
            raise BucketUnavailable(f"the Hub did not delete {key!r} in {self.url}: {error}")

    # --- the surroundings ------------------------------------------------------------------

    def watch(self, prefix: str, wake: Callable[[], None]) -> Callable[[], None]:
        self._require_open()
        follower = Follower(self._client, self.location.prefix + check_prefix(prefix), wake)
        with self._lock:
            self._followers.add(follower)

        def end() -> None:
            with self._lock:
                self._followers.discard(follower)
            follower.end()

        return end

    def close(self) -> None:
        self._closed = True
        with self._lock:
            followers, self._followers = self._followers, set()
        for follower in followers:
            follower.end()
        if self._gateway is not None:
            self._gateway.close()

    # --- inside ----------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise Misuse(f"the bucket {self.url} is closed", hint="open it again")

    def _path(self, key: str) -> str:
        self._require_open()
        return self.location.prefix + check_key(key)

    def _write(self, path: str, data: Data) -> None:
        self._client.put_file(path, self._xet.upload(data))

    def _create(self, key: str, data: Data) -> None:
        """Look as late as possible: only the naming is left to do, which is one request."""
        xet_hash = self._xet.upload(data)
        self._require_free(key)
        self._client.put_file(self._path(key), xet_hash)

    def _require_free(self, key: str) -> None:
        with contextlib.suppress(KeyNotFound, BucketNotFound):
            self.head(key)
            raise AlreadyExists(f"{key!r} already exists in {self.url}")

    def _in_bucket(self, subject: str, write: Callable[[], None]) -> None:
        """Write; if there is no bucket yet, make it and write once more."""
        with contextlib.suppress(BucketNotFound):
            with translated("write", subject):
                write()
            return
        with translated("create the bucket for", subject):
            self._client.create_bucket()
        with translated("write", subject):
            write()


def _resolved(answer: Any) -> tuple[int, str | None, str | None]:
    """Size, Xet hash and, if the content is elsewhere, its URL, from an answer to ``resolve``.

    Headers: huggingface_hub ``HfApi.get_bucket_file_metadata``, hub-docs ``docs/xet/file-id.md``.
    """
    headers = answer.headers
    elsewhere = headers.get("location") if answer.is_redirect else None
    size = headers.get("x-linked-size") or (None if elsewhere else headers.get("content-length"))
    if size is None or not _SIZE.fullmatch(size):
        raise BucketUnavailable(f"{answer.request.url} did not say how large the object is")
    return int(size), headers.get("x-xet-hash"), elsewhere


def _whole(pieces: Iterable[bytes], size: int, subject: str) -> Iterator[bytes]:
    """The pieces of ``subject``, which must be ``size`` bytes altogether.

    Raises:
        BucketUnavailable: they are not.
    """
    came = 0
    for piece in pieces:
        came += len(piece)
        if came > size:
            break
        if piece:
            yield piece
    if came != size:
        raise BucketUnavailable(f"{came} of {size} bytes of {subject} came")


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except InvalidKey:
        return False
    return True
