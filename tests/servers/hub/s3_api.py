"""The Hub's S3 gateway, as far as small conditional writes need it.

``http://127.0.0.1:PORT/s3/<namespace>`` is what ``https://s3.hf.co/<namespace>`` is on the Hub:
path style; ``If-None-Match`` and ``If-Match`` on PutObject; GetObject answers with a redirect
(hub-docs ``docs/hub/storage-buckets-s3.md``). Any signature is taken, and gives every right, but
there must be one. Trailing checksums are refused: the gateway does not read them.
"""

from __future__ import annotations

import datetime
import time
from email.utils import format_datetime

from servers.hub.hub import Hub
from servers.hub.store import File, StoredBucket
from servers.hub.web import Request, Response, Routes

__all__ = ["routes"]

routes = Routes()

OBJECT = "/s3/([^/]+)/([^/]+)/(.+)"
SIGNATURE = "AWS4-HMAC-SHA256 Credential="


class _S3Error(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code

    def response(self) -> Response:
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{self.code}</Code></Error>'
        return Response(self.status, body.encode(), "application/xml")


@routes.add("s3-put", "PUT", OBJECT)
def put(hub: Hub, request: Request, namespace: str, name: str, key: str) -> Response:
    try:
        bucket = _bucket(hub, request, namespace, name)
        if "aws-chunked" in request.headers.get("content-encoding", ""):
            raise _S3Error(501, "NotImplemented")
        now = time.time()
        file = File(key, len(request.body), hub.cas.write(request.body), now, now)
        _put_if_allowed(request, bucket, file)
    except _S3Error as error:
        return error.response()
    return Response(200, headers={"ETag": _etag(file)})


@routes.add("s3-get", "GET", OBJECT)
@routes.add("s3-head", "HEAD", OBJECT)
def get(hub: Hub, request: Request, namespace: str, name: str, key: str) -> Response:
    try:
        file = _bucket(hub, request, namespace, name).files.get(key)
        if file is None:
            raise _S3Error(404, "NoSuchKey")
    except _S3Error as error:
        return error.response()
    if request.method == "GET":
        host = request.base.replace("127.0.0.1", "localhost")
        return Response(302, headers={"Location": f"{host}/content/{file.xet_hash}"})
    moment = datetime.datetime.fromtimestamp(file.modified, datetime.timezone.utc)
    headers = {
        "ETag": _etag(file),
        "Content-Length": str(file.size),
        "Last-Modified": format_datetime(moment, usegmt=True),
    }
    return Response(200, headers=headers)


def _put_if_allowed(request: Request, bucket: StoredBucket, file: File) -> None:
    """Write under the request's conditions, judged and applied in one step."""
    only_new = request.headers.get("if-none-match") == "*"
    match = request.headers.get("if-match")

    def allowed(now: StoredBucket) -> bool:
        there = now.files.get(file.path)
        if only_new:
            return there is None
        return match is None or (there is not None and _etag(there) == match)

    if not bucket.apply([file], allowed=allowed):
        raise _S3Error(412, "PreconditionFailed")


def _bucket(hub: Hub, request: Request, namespace: str, name: str) -> StoredBucket:
    if not request.headers.get("authorization", "").startswith(SIGNATURE):
        raise _S3Error(403, "AccessDenied")
    bucket = hub.buckets.find(f"{namespace}/{name}")
    if bucket is None:
        raise _S3Error(404, "NoSuchBucket")
    return bucket


def _etag(file: File) -> str:
    return f'"{file.xet_hash[:32]}"'
