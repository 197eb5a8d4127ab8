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
from thinwire.errors import BucketUnavailable, Misuse

__all__ = ["HubClient"]

# Seconds to connect, between two pieces read, between two pieces written, for a free connection.
TIMEOUT = (10.0, 30.0, 30.0, 30.0)


class HubClient:
    """The Hub at ``endpoint`` (None: huggingface_hub's), asked about the bucket ``bucket_id``.

    Every method raises what :func:`~thinwire.bucket._hub_errors.translated` understands.
    """

    def __init__(self, bucket_id: str, endpoint: str | None) -> None:
        self.bucket_id = bucket_id
        self._api = HfApi(endpoint=endpoint, library_name="thinwire")
        self.bucket_url = f"{self._api.endpoint}/api/buckets/{bucket_id}"

    def headers(self) -> dict[str, str]:
        """What every request to the Hub carries: the token, and who is asking."""
        return dict(build_hf_headers(token=self._api.token, library_name="thinwire"))

    def file_url(self, path: str) -> str:
        """Where a file is asked for by name."""
        return f"{self._api.endpoint}/buckets/{self.bucket_id}/resolve/{quote(path, safe='')}"

    def request(self, method: str, url: str, **options: Any) -> Any:
        """One request that does not follow redirects; its response, the body read."""
        headers = {**self.headers(), **options.pop("headers", {})}
        options = {"timeout": TIMEOUT, "follow_redirects": False, **options}
        response = get_session().request(method, url, headers=headers, **options)
        _accept(response)
        return response

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
            if response.is_error:
                response.read()
            _accept(response)
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
        while True:
            response = self.request("GET", url, params=query)
            try:
                entries = [
                    (str(entry["path"]), int(entry["size"]))
                    for entry in _json(response)
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

    def _batch(self, operation: dict[str, Any]) -> str | None:
        """One operation in a batch of its own; what went wrong with it, or None.

        A batch is no transaction: an answer of 200 may carry failures, and 422 says that all
        failed (huggingface_hub ``HfApi._batch_bucket_files``).
        """
        headers = {**self.headers(), "Content-Type": "application/x-ndjson"}
        content = json.dumps(operation).encode() + b"\n"
        response = get_session().post(
            f"{self.bucket_url}/batch",
            headers=headers,
            content=content,
            timeout=TIMEOUT,
            follow_redirects=False,
        )
        if response.status_code != 422:
            _accept(response)
        answer = _json(response)
        for failure in answer.get("failed", []):
            return str(failure.get("error", "no reason given"))
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
        place = response.headers.get("location")
        raise Misuse(
            f"{response.request.url} has moved to {place}",
            hint="the bucket was renamed: use its new name",
        )


def _json(response: Any) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise BucketUnavailable(f"{response.request.url} did not answer with JSON") from error
