"""What an object store's refusal means: obstore's exceptions as thinwire's.

obstore says little by type: a listing's 403, a 503 and a refused connection are all one
``GenericError``. The rest is in its text, which has a fixed frame around the store's answer
(``client/retry.rs`` in apache/arrow-rs-object-store): method, URL, status, body.
:func:`read_answer` takes the text apart, :func:`judge` decides. Both are pure. The answer's headers
are not in the text, so no store's ``Retry-After`` is known here: ``retry_after`` stays None.

The text may quote a request's URL, which with Azure's SAS tokens holds a secret, so messages quote
only the store's own words, and the original exception is not chained.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from thinwire.bucket._objects_url import Location
from thinwire.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    BucketUnavailable,
    KeyNotFound,
    Misuse,
    ThinwireError,
)

__all__ = ["Action", "Answer", "judge", "missing", "read_answer"]

Action = Literal["read", "head", "write", "create", "delete", "list"]

_REQUEST = re.compile(r"Error performing (?:list request: Error performing )?[A-Z]+ (\S+) in ")
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})[^:]*: ?(.*)", re.DOTALL)
_ERROR_BODY = re.compile(r"Server returned error response: (.*)", re.DOTALL)
# Azure deletes in batches, whose parts have a status and a phrase each.
_BATCH = re.compile(r"Bulk delete request failed .*?: ([^:]{1,200}) \(code: (\d{3})\)", re.DOTALL)
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9._-]{1,80})\s*</Code>")
_MESSAGE = re.compile(r"<(?:Message|Details)>([^<]{1,300})")
_KIND = re.compile(r"kind: (Connect|Timeout|Interrupted|Request|Decode)\b")
_CAUSE = re.compile(r'(?:error|message): "([^"\n]{1,200})"')

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_NO_KEY = {"NoSuchKey", "BlobNotFound", "NoSuchVersion"}
# Refusals of the moment among the statuses that otherwise mean that a request is wrong.
_PASSING = {
    "BadDigest",
    "ConditionalRequestConflict",
    "ContainerBeingCreated",
    "ContainerBeingDeleted",
    "IncompleteBody",
    "InternalError",
    "Md5Mismatch",
    "NoSuchUpload",
    "OperationAborted",
    "OperationTimedOut",
    "RequestTimeout",
    "ServerBusy",
    "SlowDown",
    "XAmzContentSHA256Mismatch",
}
_BAD_CREDENTIALS = {
    "AuthenticationFailed",
    "ExpiredToken",
    "InvalidAuthenticationInfo",
    "InvalidToken",
    "TokenRefreshRequired",
}
_WRONG_REGION = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
}
_METADATA = ("169.254.", "metadata.google", "[fd00:ec2::254]")

_CREDENTIALS = {
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or another AZURE_STORAGE_* credential, "
    "or add ?anonymous=true for a public container",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or add ?anonymous=true for a public bucket",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with boto3 installed, "
    "or add ?anonymous=true for a public bucket",
}
_DENIED = {
    "read": "check the credentials and what they may read; without permission to list, "
    "some stores say this of a missing key as well",
    "write": "check the credentials and what they may write, and that the bucket exists: "
    "some stores say this of one that does not",
    "list": "check the credentials: listing is a permission of its own",
}
_NEVER_READ_AS_EMPTY = "check the URL; a bucket is made with its provider's own tools"


@dataclass(frozen=True)
class Answer:
    """What a store, or the way to it, said.

    Attributes:
        status: the HTTP status, or None when there was no answer.
        code: the store's own word for the error, such as ``NoSuchKey``; may be empty.
        reason: one line for people.
        url: of the request, for decisions only: it may hold a secret. May be empty.
    """

    status: int | None
    code: str
    reason: str
    url: str = ""


def read_answer(error: Exception) -> Answer:
    """What an exception of obstore's says."""
    text, _, debug = str(error).partition("\n\nDebug source:")
    request = _REQUEST.search(text)
    url = request[1] if request else ""
    found = _STATUS.search(text)
    if found:
        status, body = int(found[1]), found[2]
    elif found := _ERROR_BODY.search(text):
        # A 200 whose body is an error, as from completing an upload: the store failed later.
        status, body = 500, found[1]
    elif found := _BATCH.search(text):
        return Answer(int(found[2]), "", f"{found[2]} {found[1]}", url)
    elif "Received redirect without LOCATION" in text:
        return Answer(301, "PermanentRedirect", "the bucket is in another region", url)
    else:
        return Answer(None, "", _transport(text, debug), url)
    code, message = _CODE.search(body), _MESSAGE.search(body)
    words = [str(status), code[1] if code else "", message[1].strip() if message else ""]
    return Answer(status, code[1] if code else "", " ".join(filter(None, words)), url)


def judge(answer: Answer, action: Action, subject: str, location: Location) -> ThinwireError:
    """The error that ``answer`` means when ``action`` was tried on ``subject``.

    A missing key is :class:`KeyNotFound` only where the answer says that the bucket exists; use
    :func:`missing` to find out whether it says so.
    """
    status, code = answer.status, answer.code
    what = f"cannot {'read' if action == 'head' else action} {subject}: {answer.reason}"
    if _concerns_credentials(answer, location):
        return AccessDenied(
            f"cannot {action} {subject}: no usable credentials ({answer.reason})",
            hint=_CREDENTIALS[location.scheme],
        )
    if status is None and "invalid path" in answer.reason:
        return Misuse(
            f"{what}; thinwire writes no such key",
            hint="remove that object, or give the run a prefix of its own",
        )
    if status is None or status >= 500 or status in (408, 425, 429) or code in _PASSING:
        if status == 501:
            return Misuse(what, hint="this store lacks what thinwire needs of it")
        return BucketUnavailable(what)
    if code in _NO_BUCKET or (status == 404 and action == "list"):
        return BucketNotFound(f"no bucket at {location.url}", hint=_NEVER_READ_AS_EMPTY)
    if status == 404 and code in _NO_KEY:
        return KeyNotFound(f"no object {subject}")
    if status in (401, 403) or code in _BAD_CREDENTIALS:
        kind = "list" if action == "list" else "read" if action in ("read", "head") else "write"
        return AccessDenied(what, hint=_DENIED[kind])
    if status in (304, 409, 412):
        if action == "create":
            return AlreadyExists(f"{subject} already exists")
        if action == "read":
            return BucketUnavailable(
                f"{subject} was replaced while it was read", hint="read it again"
            )
        return BucketUnavailable(what)
    if code in _WRONG_REGION or status in (301, 307):
        return Misuse(what, hint="give the bucket's own region: ?region=… or AWS_REGION")
    if status == 404:
        return BucketUnavailable(f"{what}; neither the object nor the bucket is named as missing")
    return Misuse(what, hint="check the URL, its endpoint and its options")


def missing(answer: Answer) -> Literal["bucket", "key", "either"] | None:
    """What the store says is not there; None when it says nothing of the kind."""
    if answer.status != 404:
        return None
    if answer.code in _NO_BUCKET:
        return "bucket"
    return "key" if answer.code in _NO_KEY else "either"


def _concerns_credentials(answer: Answer, location: Location) -> bool:
    """The request that failed was for credentials, not for the bucket."""
    if answer.reason.startswith("Missing"):
        return True
    if any(host in answer.url for host in _METADATA):
        return True
    for_bucket = re.search(rf"/{re.escape(location.name)}(?:[/.?]|\Z)", answer.url)
    if not answer.url or for_bucket:
        return False
    return answer.status is not None and 400 <= answer.status < 500 and answer.status != 429


def _transport(text: str, debug: str) -> str:
    """Why there was no answer, in one line."""
    first = text.strip().splitlines()[0] if text.strip() else "no answer"
    # What precedes the last " - " or the store's name is the frame, and may quote the URL.
    reason = re.sub(r"^(?:Generic \w+ error: )?(?:Error performing .* - )?", "", first)[:200]
    reason = re.sub(r"https?://\S+", "its URL", reason)
    kind, causes = _KIND.search(debug), _CAUSE.findall(debug)
    if kind and kind[1] == "Timeout":
        return "it took too long to answer"
    if kind and kind[1] == "Interrupted":
        return "the connection broke off before the end of the answer"
    return f"{reason} ({causes[-1]})" if causes else reason
