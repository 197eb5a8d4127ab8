"""Xet's storage API: xorbs and shards in, reconstructions and bytes of xorbs out.

Source: hub-docs ``docs/xet/api.md`` and xet-core ``openapi/cas.openapi.yaml``. What it lacks, the
client does without: global deduplication (``/v1/chunks``) and grants for uploading straight to
storage (``/v1/xorb-grants``) answer 404.
"""

from __future__ import annotations

import json

from servers.hub.hub import Hub
from servers.hub.web import HttpError, Request, Response, Routes, json_response

__all__ = ["routes"]

routes = Routes()

HASH = "([0-9a-f]{64})"


@routes.add("xorb-put", "POST", f"/v1/xorbs/default/{HASH}")
def put_xorb(hub: Hub, request: Request, name: str) -> Response:
    hub.access.check_xet_token(request, "write")
    try:
        inserted = hub.cas.add_xorb(name, request.body)
    except ValueError as error:
        raise HttpError(400, str(error)) from error
    return json_response({"was_inserted": inserted})


@routes.add("shard", "POST", "/v([12])/shards")
def put_shard(hub: Hub, request: Request, version: str) -> Response:
    hub.access.check_xet_token(request, "write")
    try:
        count = hub.cas.add_shard(request.body)
    except ValueError as error:
        raise HttpError(400, str(error)) from error
    if version == "1":
        return json_response({"result": 1})
    progress = [
        {"type": "validating", "verified": count, "total": count},
        {"type": "committing", "stage": "syncing"},
        {"type": "result"},
    ]
    body = "".join(f"{json.dumps(event)}\n" for event in progress).encode()
    return Response(200, body, "application/x-ndjson")


@routes.add("reconstruction", "GET", f"/v([12])/reconstructions/{HASH}")
def reconstruct(hub: Hub, request: Request, version: str, name: str) -> Response:
    hub.access.check_xet_token(request, "read")
    size = hub.cas.size(name)
    if size is None:
        raise HttpError(404, "no such file")
    start, end = request.byte_range(size) or (0, size)
    answer = hub.cas.reconstruction(name, start, end, version=int(version), base=request.base)
    if hub.faults.take("short_files"):
        answer["terms"].pop()
    return json_response(answer)


@routes.add("xorb-get", "GET", f"/xorbs/{HASH}")
def get_xorb(hub: Hub, request: Request, name: str) -> Response:
    """Bytes of a xorb. The URL, which a reconstruction gave out, is the right to read."""
    xorb = hub.cas.xorbs.get(name)
    if xorb is None:
        raise HttpError(404, "no such xorb")
    span = request.byte_range(len(xorb.data))
    if span is None:
        raise HttpError(400, "a range is needed")
    data: bytes | memoryview = memoryview(xorb.data)[span[0] : span[1]]
    if hub.faults.take("corrupt_xorbs"):
        data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
    headers = {"Content-Range": f"bytes {span[0]}-{span[1] - 1}/{len(xorb.data)}"}
    return Response(206, data, headers=headers)


@routes.add("chunks", "GET", f"/v1/chunks/[^/]+/{HASH}")
def find_chunk(hub: Hub, request: Request, name: str) -> Response:
    hub.access.check_xet_token(request, "read")
    raise HttpError(404, "this chunk is not tracked")


@routes.add("grants", "GET", f"/v1/xorb-grants/[^/]+/{HASH}")
@routes.add("grants", "POST", f"/v1/xorb-grants/[^/]+/{HASH}")
def grant_upload(hub: Hub, request: Request, name: str) -> Response:
    hub.access.check_xet_token(request, "write")
    raise HttpError(404, "xorbs are uploaded here")


@routes.add("telemetry", "POST", "/v1/telemetry.*")
def telemetry(hub: Hub, request: Request) -> Response:
    return json_response({})
