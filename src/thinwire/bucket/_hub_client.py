"""Requests to the Hub about one bucket, through huggingface_hub's own session.

Token, proxies, certificates, offline mode and the default endpoint are huggingface_hub's, found as
its users expect. What differs: a request is sent once, with time limits. The client would retry for
half a minute by itself, and whoever calls a bucket decides about that.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from huggingface_hub import HfApi, get_session
from huggingface_hub.utils import (  # type: ignore[attr-defined, unused-ignore]
    build_hf_headers,
    hf_raise_for_status,
)

from thinwire.bucket._hub_errors import answered
from thinwire.bucket._objects_url import check_endpoint, redacted
from thinwire.errors import BucketUnavailable, Misuse

__all__ = ["HubClient", "json_of"]

# Seconds to connect, between two pieces read, between two pieces written, for a free connection.
TIMEOUT = (10.0, 30.0, 30.0, 30.0)

BODY_LIMIT = 64 << 20
"""Bytes of an answer that is not an object; a page of a listing is far smaller."""

_OF_BODY = ("content-encoding", "content-length", "transfer-encoding")


class HubClient:
    """The Hub at ``endpoint`` (None: huggingface_hub's), asked about the bucket ``bucket_id``.

    Every method raises what :func:`~thinwire.bucket._hub_errors.translated` understands.
    """

    def __init__(self, bucket_id: str, endpoint: str | None) -> None:
        self.bucket_id = bucket_id
        self._api = HfApi(endpoint=endpoint, library_name="thinwire")
        check_endpoint(self._api.endpoint, "HF_ENDPOINT")
        self.endpoint: str = self._api.endpoint
        self.bucket_url = f"{self._api.endpoint}/api/buckets/{bucket_id}"

    def headers(self) -> dict[str, str]:
        """What every request to the Hub carries: the token, and who is asking."""
        return dict(build_hf_headers(token=self._api.token, library_name="thinwire"))

    def file_url(self, path: str) -> str:
        """Where a file is asked for by name."""
        return f"{self._api.endpoint}/buckets/{self.bucket_id}/resolve/{quote(path, safe='')}"

    def request(self, method: str, url: str, **options: Any) -> Any:
        """One request that does not follow redirects; its response, the body read."""
        response = self._answer(method, url, **options)
        _accept(response)
        return response

    def _answer(self, method: str, url: str, **options: Any) -> Any:
        headers = {**self.headers(), **options.pop("headers", {})}
        options = {"timeout": TIMEOUT, "follow_redirects": False, **options}
        with get_session().stream(method, url, headers=headers, **options) as response:
            # An answer to HEAD has no body, and its headers are of one that it does not send.
            return response if method == "HEAD" else _held(response)

    @contextlib.contextmanager
    def stream(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        follow: bool = False,
        timeout: tuple[float, float, float, float] = TIMEOUT,
    ) -> Iterator[Any]:
        """A GET whose body is yet to be read. With ``headers``, none of ours: no token."""
        sent = self.headers() if headers is None else dict(headers)
        sent["Accept-Encoding"] = "identity"  # sizes are compared
        with get_session().stream(
            "GET", url, headers=sent, follow_redirects=follow, timeout=timeout
        ) as response:
            _accept(_held(response) if response.is_error else response)
            yield response

    def create_bucket(self) -> None:
        """Make the bucket, private, unless it is there."""
        self._api.create_bucket(self.bucket_id, private=True, exist_ok=True)

    def put_file(self, path: str, xet_hash: str) -> None:
        """Give a content that is in the Xet store a name.

        Raises:
            BucketUnavailable: the Hub says that this did not work.
        """
        now = int(time.time() * 1000)
        operation = {"type": "addFile", "path": path, "xetHash": xet_hash, "mtime": now}
        error = self._batch(operation)
        if error is not None:
            raise BucketUnavailable(f"the Hub did not write {path!r} in {self.bucket_id}: {error}")

    def delete_file(self, path: str) -> str | None:
        """Remove a name; what the Hub says went wrong, or None."""
        return self._batch({"type": "deleteFile", "path": path})

    def files(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Paths that start with ``prefix`` and their sizes, page by page, in the Hub's order."""
        url = f"{self.bucket_url}/tree" + (f"/{quote(prefix, safe='')}" if prefix else "")
        query = {"recursive": "true"}
        asked = [query]
        while True:
            response = self.request("GET", url, params=query)
            try:
                entries = [
                    (str(entry["path"]), int(entry["size"]))
                    for entry in json_of(response)
                    if entry["type"] == "file"
                ]
            except (KeyError, TypeError, ValueError) as error:
                raise BucketUnavailable(f"{url} answered with something else: {error!r}") from error
            yield from entries
            following = response.links.get("next", {}).get("url")
            if following is None:
                return
            # Of the next page's address only the query is used: the token goes nowhere else.
            query = dict(parse_qsl(urlsplit(following).query, keep_blank_values=True))
            if query in asked:
                raise BucketUnavailable(f"{url} goes round in circles: a page came before")
            asked.append(query)

    def _batch(self, operation: dict[str, Any]) -> str | None:
        """One operation in a batch of its own; what went wrong with it, or None.

        A batch is no transaction: an answer of 200 may carry failures, and 422 says that all
        failed (huggingface_hub ``HfApi._batch_bucket_files``).
        """
        headers = {"Content-Type": "application/x-ndjson"}
        content = json.dumps(operation).encode() + b"\n"
        url = f"{self.bucket_url}/batch"
        response = self._answer("POST", url, headers=headers, content=content)
        if response.status_code != 422:
            _accept(response)
        answer = json_of(response)
        failed = answer.get("failed") or [] if isinstance(answer, dict) else None
        if not isinstance(failed, list):
            raise BucketUnavailable(f"{url} answered with something else")
        for failure in failed:
            reason = failure.get("error") if isinstance(failure, dict) else failure
            return str(reason or "no reason given")
        if response.status_code != 200 or not answer.get("success", True):
            raise answered(response, f"cannot change {operation['path']!r} in {self.bucket_id}")
        return None


def _accept(response: Any) -> None:
    """Raise unless the answer is an expected one.

    A file's redirect says how large the file is (``X-Linked-Size``). Any other is what the Hub
    sends for a bucket that was renamed; following it would hide that from whoever configured it.
    """
    hf_raise_for_status(response)
    if response.is_redirect and "x-linked-size" not in response.headers:
        place = redacted(response.headers.get("location", "nowhere"))
        raise Misuse(
            f"{redacted(str(response.request.url))} has moved to {place}",
            hint="the bucket was renamed: use its new name",
        )


def _held(response: Any) -> Any:
    """The answer with its body in memory, which may not be of any size: the server chose it."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > BODY_LIMIT:
            raise BucketUnavailable(f"{redacted(str(response.request.url))} answers without end")
    headers = [
        (name, value) for name, value in response.headers.multi_items() if name not in _OF_BODY
    ]
    return type(response)(
        response.status_code, headers=headers, content=bytes(body), request=response.request
    )


def json_of(response: Any) -> Any:
    """What an answer says. Raises: BucketUnavailable if that is no JSON."""
    try:
        return response.json()
    except ValueError as error:
        raise BucketUnavailable(f"{response.request.url} did not answer with JSON") from error
