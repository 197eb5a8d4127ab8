"""The Hub's bucket API, as huggingface_hub 2.4 calls it, and the reading of files by URL."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import quote

from servers.hub.access import Scope
from servers.hub.hub import Hub
from servers.hub.store import File, StoredBucket, iso_time
from servers.hub.web import HttpError, Request, Response, Routes, json_response

__all__ = ["routes"]

routes = Routes()

BUCKET = r"([^/]+/[^/]+)"
PING = 15.0


@routes.add("create", "POST", f"/api/buckets/{BUCKET}")
def create(hub: Hub, request: Request, bucket_id: str) -> Response:
    hub.check_writer(request, bucket_id)
    wanted = json.loads(request.body or b"{}")
    # huggingface_hub says "private" before 2.0 and "visibility" since.
    private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
    answer = {"url": f"{request.base}/buckets/{bucket_id}", "name": bucket_id}
    if not hub.buckets.create(bucket_id, private=private):
        # The client reads the URL from this answer too.
        return json_response({**answer, "error": "You already created this bucket"}, status=409)
    return json_response(answer)


@routes.add("info", "GET", f"/api/buckets/{BUCKET}")
def info(hub: Hub, request: Request, bucket_id: str) -> Response:
    return json_response(hub.readable(request, bucket_id).as_json())


@routes.add("remove", "DELETE", f"/api/buckets/{BUCKET}")
def remove(hub: Hub, request: Request, bucket_id: str) -> Response:
    hub.writable(request, bucket_id)
    hub.buckets.delete(bucket_id)
    return json_response({})


@routes.add("tree", "GET", rf"/api/buckets/{BUCKET}/tree(?:/([^/]+))?")
def tree(hub: Hub, request: Request, bucket_id: str, prefix: str) -> Response:
    bucket = hub.readable(request, bucket_id)
    files = bucket.previous if hub.faults.take("stale_listings") else bucket.files
    recursive = request.query.get("recursive", "").lower() == "true"
    entries = _entries(files, prefix, recursive=recursive)
    start = int(request.query.get("cursor", "0"))
    headers = {}
    if start + hub.page < len(entries):
        place = f"{request.base}{request.path}"
        more = f"recursive={str(recursive).lower()}&cursor={start + hub.page}"
        headers["Link"] = f'<{place}?{more}>; rel="next"'
    return json_response(entries[start : start + hub.page], headers=headers)


def _entries(files: dict[str, File], prefix: str, *, recursive: bool) -> list[dict[str, Any]]:
    """What a listing shows: folder by folder, so that nobody counts on the order of paths."""
    shown: list[dict[str, Any]] = []
    folders: dict[str, dict[str, Any]] = {}
    for path, file in sorted(files.items(), key=lambda item: item[0].split("/")):
        if not path.startswith(prefix):
            continue
        slash = path.find("/", len(prefix) + path.startswith("/", len(prefix)))
        if recursive or slash < 0:
            shown.append(file.as_json())
        else:
            uploaded = iso_time(file.uploaded)
            entry = {"type": "directory", "path": path[:slash], "uploadedAt": uploaded}
            folders.setdefault(path[:slash], entry)
    return [*folders.values(), *shown]


@routes.add("paths-info", "POST", f"/api/buckets/{BUCKET}/paths-info")
def paths_info(hub: Hub, request: Request, bucket_id: str) -> Response:
    files = hub.readable(request, bucket_id).files
    wanted = json.loads(request.body)["paths"]
    return json_response([files[path].as_json() for path in wanted if path in files])


@routes.add("batch", "POST", f"/api/buckets/{BUCKET}/batch")
def batch(hub: Hub, request: Request, bucket_id: str) -> Response:
    """Operations, one JSON object a line. Each succeeds or fails by itself."""
    bucket = hub.writable(request, bucket_id)
    failed: list[dict[str, str]] = []
    operations = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    for operation in operations:
        error = _apply(hub, bucket, operation)
        if error is not None:
            failed.append({"path": operation["path"], "error": error})
    succeeded = len(operations) - len(failed)
    answer = {
        "success": not failed,
        "processed": len(operations),
        "succeeded": succeeded,
        "failed": failed,
    }
    return json_response(answer, status=422 if failed and not succeeded else 200)


def _apply(hub: Hub, bucket: StoredBucket, operation: dict[str, Any]) -> str | None:
    """Do one operation; what went wrong, or None."""
    path = operation["path"]
    if hub.faults.take_batch(path):
        return "internal error, please retry"
    if operation["type"] == "deleteFile":
        found = path in bucket.files
        bucket.apply(deletes=[path])
        return None if found else "file not found"
    if operation["type"] != "addFile":
        return f"unknown operation {operation['type']!r}"
    size = hub.cas.size(operation["xetHash"])
    if size is None:
        return "xet hash not found"
    modified = operation.get("mtime", time.time() * 1000) / 1000
    bucket.apply([File(path, size, operation["xetHash"], modified, time.time())])
    return None


@routes.add("token", "GET", f"/api/buckets/{BUCKET}/xet-(read|write)-token")
def xet_token(hub: Hub, request: Request, bucket_id: str, kind: str) -> Response:
    scope = cast(Scope, kind)
    (hub.writable if scope == "write" else hub.readable)(request, bucket_id)
    token, expires = hub.access.give_xet_token(bucket_id, scope)
    headers = {
        "X-Xet-Cas-Url": request.base,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(expires),
    }
    answer = {"casUrl": request.base, "accessToken": token, "exp": expires}
    return json_response(answer, headers=headers)


@routes.add("head", "HEAD", f"/buckets/{BUCKET}/resolve/(.+)")
@routes.add("resolve", "GET", f"/buckets/{BUCKET}/resolve/(.+)")
def resolve(hub: Hub, request: Request, bucket_id: str, path: str) -> Response:
    """A file by URL: its Xet hash and size in headers, and its content, mostly elsewhere."""
    bucket = hub.readable(request, bucket_id)
    file = bucket.files.get(path)
    if file is None:
        raise HttpError(404, "Entry not found", code="EntryNotFound")
    api = f"{request.base}/api/buckets/{bucket_id}"
    headers = {
        "X-Xet-Hash": file.xet_hash,
        "X-Linked-Size": str(file.size),
        "X-Linked-Etag": f'"{file.xet_hash}"',
        "Link": f'<{api}/xet-read-token>; rel="xet-auth"',
    }
    if not hub.redirect:
        return _content(hub, request, file.xet_hash, headers)
    # Another host name, so that clients must not send their token there.
    host = request.base.replace("127.0.0.1", "localhost")
    headers["Location"] = f"{host}/content/{file.xet_hash}?filename={quote(path, safe='')}"
    return Response(302, headers=headers)


@routes.add("content", "GET", "/content/([0-9a-f]{64})")
def content(hub: Hub, request: Request, xet_hash: str) -> Response:
    """Where ``resolve`` and the S3 gateway send readers. The URL is the right to read."""
    if "authorization" in request.headers:
        raise HttpError(400, "Only one auth mechanism allowed")
    return _content(hub, request, xet_hash, {})


def _content(hub: Hub, request: Request, xet_hash: str, headers: dict[str, str]) -> Response:
    size = hub.cas.size(xet_hash)
    if size is None:
        raise HttpError(404, "no such content")
    headers = {**headers, "ETag": f'"{xet_hash}"', "Accept-Ranges": "bytes"}
    span = request.byte_range(size)
    if request.method == "HEAD":
        return Response(200, headers={**headers, "Content-Length": str(size)})
    data = hub.cas.read(xet_hash)
    status = 200
    if span is not None:
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size}"
        data, status = data[span[0] : span[1]], 206
    if hub.faults.take("short_reads"):
        data = data[:-1]
    return Response(status, data, headers=headers)


@routes.add("events", "GET", f"/api/buckets/{BUCKET}/events")
def events(hub: Hub, request: Request, bucket_id: str) -> Response:
    """Changes as they happen: server-sent events (huggingface_hub ``_bucket_live_follow.py``)."""
    bucket = hub.readable(request, bucket_id)
    query = request.query
    if "cursor" in query:
        cursor = int(query["cursor"])
    elif "since" in query:
        cursor = sum(iso_time(event.time) <= query["since"] for event in bucket.events)
    else:
        cursor = len(bucket.events)
    headers = {"Cache-Control": "no-cache"}
    return Response(200, _events(hub, bucket, cursor), "text/event-stream", headers)


def _events(hub: Hub, bucket: StoredBucket, cursor: int) -> Iterator[bytes]:
    ready = False
    while hub.buckets.find(bucket.id) is bucket:
        while cursor < len(bucket.events):
            told = {"cursor": str(cursor + 1), "changes": bucket.events[cursor].changes}
            for _ in range(2 if hub.faults.duplicate_events else 1):
                yield _event("changes", told)
            cursor += 1
        if not ready:
            ready = True
            yield _event("ready", {"cursor": str(cursor)})
        with bucket.changed:
            told_all = cursor == len(bucket.events)
            if told_all and not bucket.changed.wait(PING):
                yield b": ping\n\n"
    yield _event("reconnect", {})


def _event(name: str, payload: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(payload)}\n\n".encode()
