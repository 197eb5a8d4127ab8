"""What the Hub, its client and hf_xet say went wrong, as thinwire's errors.

Statuses and ``X-Error-Code`` values: huggingface_hub ``utils/_http.py``. The Hub answers 401 to
whoever sends no token and asks for a private or a missing bucket, and 404 with ``RepoNotFound`` to
a token that may not see it, so neither says for certain that a bucket does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from thinwire.errors import (
    AccessDenied,
    BucketNotFound,
    BucketUnavailable,
    KeyNotFound,
    Misuse,
    ThinwireError,
)

__all__ = ["answered", "is_refusal", "offline", "retry_after", "translated"]

# Of httpx2, or of httpx below huggingface_hub 2: whichever the client uses.
HTTPError: type[BaseException] = HfHubHTTPError.__bases__[0]
InvalidURL: type[BaseException] = sys.modules[HTTPError.__module__.partition(".")[0]].InvalidURL

_NO_TOKEN = "run `hf auth login` or set HF_TOKEN; without a token a private bucket looks missing"
_BAD_TOKEN = (
    "the Hub does not accept this token: correct or unset HF_TOKEN if it is set, which wins over a "
    "login; else run `hf auth login`"
)
_WEAK_TOKEN = "this token may not do that: use one with write access to the namespace"
_NO_BUCKET = (
    "check the URL; a private bucket looks missing to a token that may not see it, "
    "and the first publish creates a bucket of one's own"
)
_FULL = "large objects pass through a temporary folder: free some space, or set TMPDIR to another"

_DENIED = re.compile(r"\b40[13] (Unauthorized|Forbidden)|permission denied|access denied", re.I)
_NO_SPACE = re.compile(
    r"no space left on device|disk quota exceeded|no usable temporary directory", re.I
)
_RATE_LIMIT = re.compile(r'"\w+"\s*;\s*r=0\s*;\s*t=(\d+)')


@contextlib.contextmanager
def translated(action: str, subject: str) -> Iterator[None]:
    """Errors of huggingface_hub, hf_xet and the network as thinwire's own."""
    try:
        yield
    except ThinwireError:
        raise
    except (HTTPError, InvalidURL, OSError, OverflowError, RuntimeError, ValueError) as error:
        raise _classified(error, f"cannot {action} {subject}") from error


def offline(what: str) -> Misuse:
    """The error for huggingface_hub's offline mode."""
    return Misuse(
        f"{what}: huggingface_hub is in offline mode",
        hint="unset HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE)",
    )


def is_refusal(error: BaseException) -> bool:
    """Whether hf_xet was refused, and not merely failed.

    It has few error types of its own; most come as ConnectionError, with the status in words.
    """
    if isinstance(error, PermissionError):
        return error.errno is None  # with a number it is about a file of ours
    return _DENIED.search(str(error)) is not None


def _classified(error: BaseException, what: str) -> ThinwireError:
    if isinstance(error, OfflineModeIsEnabled):
        return offline(what)
    if isinstance(error, HfHubHTTPError):
        return answered(error.response, what)
    if _is_full(error):
        return Misuse(f"{what}: {_first_line(error)}", hint=_FULL)
    if is_refusal(error):
        return AccessDenied(f"{what}: {_first_line(error)}", hint=_WEAK_TOKEN)
    return BucketUnavailable(f"{what}: {_first_line(error)}")


def _is_full(error: BaseException) -> bool:
    """Whether it is this host's disk that fails; hf_xet says so only in words."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return _NO_SPACE.search(str(error)) is not None


def answered(response: Any, what: str) -> ThinwireError:
    """The error for an HTTP answer that is none of the expected ones."""
    status, code = response.status_code, response.headers.get("x-error-code")
    said = response.headers.get("x-error-message") or response.reason_phrase
    message = f"{what}: {status} {said}"
    if status == 401:
        sent = "authorization" in response.request.headers
        return AccessDenied(message, hint=_BAD_TOKEN if sent else _NO_TOKEN)
    if status == 403:
        return AccessDenied(message, hint=_WEAK_TOKEN)
    if status == 404 and code == "EntryNotFound":
        return KeyNotFound(message)
    if status == 404 and code == "RepoNotFound":
        return BucketNotFound(message, hint=_NO_BUCKET)
    if status == 400:
        return Misuse(message)
    return BucketUnavailable(message, retry_after=retry_after(response.headers))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the answer asks to wait: from ``Retry-After``, or the Hub's ``RateLimit``."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    if value:
        with contextlib.suppress(OverflowError, ValueError):
            return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    match = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(match[1]) if match else None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
