"""Contents in and out of the Xet store, with hf_xet, in bounded memory.

Measured with hf_xet 1.8.0 and 600 MB of random bytes: uploading one ``bytes`` object took 1336 MB
more, a file 259 MB, a stream of pieces 216 MB; downloading to a file took 508 MB, and 96 MB with
the buffers set below. So everything goes up as a stream, whether it is a file or in memory, and
comes down into a temporary file.

hf_xet does not verify what it downloads and writes in place (its file is truncated first). The
temporary file is seen by nobody, its size is checked, and who reads compares SHA-256.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeVar

from huggingface_hub import is_offline_mode

from thinwire.bucket._hub_client import HubClient, json_of
from thinwire.bucket._hub_errors import is_refusal, offline
from thinwire.bucket.base import Data, iter_data
from thinwire.errors import BucketUnavailable, Misuse

__all__ = ["XetStore"]

Scope = Literal["read", "write"]
T = TypeVar("T")

# Names as in hf_xet.XetConfig; one that a version does not have is left out.
_SETTINGS = {
    "client.connect_timeout": "10s",
    "client.read_timeout": "60s",
    "client.retry_max_attempts": 2,
    "client.retry_base_delay": "500ms",
    "reconstruction.download_buffer_limit": "128mb",
    "reconstruction.download_buffer_perfile_size": "32mb",
    "reconstruction.download_buffer_size": "64mb",
    "reconstruction.min_prefetch_buffer": "32mb",
    "reconstruction.min_reconstruction_fetch_size": "32mb",
}

_EARLY = 60.0  # seconds before its end at which a token is replaced


class _Session:
    """The process's hf_xet session: threads and connections that every bucket shares."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Any = None
        self._process = 0

    def get(self) -> Any:
        """The session; a new one in a forked child, where the parent's threads do not exist.

        Raises:
            Misuse: hf_xet is missing or too old.
        """
        with self._lock:
            if self._session is None or self._process != os.getpid():
                self._session, self._process = _new_session(), os.getpid()
            return self._session

    def after_fork(self) -> None:
        """In the child: a thread that held the lock at the fork does not exist there."""
        self._lock = threading.Lock()


_SESSION = _Session()
os.register_at_fork(after_in_child=_SESSION.after_fork)


def _new_session() -> Any:
    hf_xet = _hf_xet()
    config = hf_xet.XetConfig()
    known = set(config.keys())
    return hf_xet.XetSession(config.with_config({k: v for k, v in _SETTINGS.items() if k in known}))


def _hf_xet() -> Any:
    """The module. Raises: Misuse if it is missing or too old."""
    try:
        import hf_xet  # type: ignore[import-untyped]

        _ = hf_xet.XetSession
    except (AttributeError, ImportError) as error:
        raise Misuse(
            f"Hub buckets need hf_xet 1.8 or later: {error}",
            hint="pip install --upgrade huggingface_hub hf_xet",
        ) from error
    return hf_xet


@dataclass(frozen=True)
class _Access:
    """A token of the Xet store, and for whom it was given."""

    authorization: str | None
    endpoint: str
    token: str
    expires: int

    def serves(self, authorization: str | None) -> bool:
        return self.authorization == authorization and self.expires > time.time() + _EARLY

    def connection(self) -> dict[str, Any]:
        """As hf_xet takes it."""
        return {
            "endpoint": self.endpoint,
            "token": self.token,
            "token_expiry_unix_secs": self.expires,
        }


class XetStore:
    """The contents of one bucket's files."""

    def __init__(self, client: HubClient) -> None:
        self._client = client
        self._access: dict[Scope, _Access] = {}
        self._lock = threading.Lock()

    def upload(self, data: Data) -> str:
        """Store a content; its Xet hash.

        Raises:
            BucketUnavailable: hf_xet stored another number of bytes than it was given.
        """
        hf_xet = _hf_xet()

        def transfer(connection: dict[str, Any]) -> str:
            written = 0
            with _SESSION.get().new_upload_commit(**connection) as commit:
                stream = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
                for block in iter_data(data):
                    stream.write(bytes(block))
                    written += block.nbytes
                stored = stream.finish().xet_info
            if stored.file_size != written:
                raise BucketUnavailable(f"hf_xet stored {stored.file_size} of {written} bytes")
            return str(stored.hash)

        return self._with_access("write", transfer)

    def download(self, xet_hash: str, size: int, *, chunk: int) -> Iterator[bytes]:
        """A content in pieces of at most ``chunk`` bytes, once all of it is in a temporary file.

        Raises:
            BucketUnavailable: what came is not ``size`` bytes.
        """
        with self._downloaded(xet_hash, size) as file:
            came = os.fstat(file.fileno()).st_size
            if came != size:
                raise BucketUnavailable(f"{came} of {size} bytes came from the Xet store")
            while block := file.read(chunk):
                yield block

    def _downloaded(self, xet_hash: str, size: int) -> FileIO:
        """A file with a content and without a name: a reader that is killed leaves nothing."""
        wanted = _hf_xet().XetFileInfo(xet_hash, size)

        def transfer(connection: dict[str, Any]) -> FileIO:
            with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
                place = Path(folder) / "content"
                with _SESSION.get().new_file_download_group(**connection) as group:
                    group.start_download_file(wanted, str(place))
                return place.open("rb", buffering=0)

        return self._with_access("read", transfer)

    def _with_access(self, scope: Scope, transfer: Callable[[dict[str, Any]], T]) -> T:
        """``transfer``, and once more with a new token if one kept from before is refused.

        hf_xet renews a token that is about to expire, but not one that ended early.
        """
        if is_offline_mode():
            raise offline("cannot reach the Xet store")
        headers = self._client.headers()
        url = f"{self._client.bucket_url}/xet-{scope}-token"
        authorization = headers.get("authorization")
        connection = {
            "token_refresh_url": url,
            "token_refresh_headers": headers,
            "custom_headers": {k: v for k, v in headers.items() if k != "authorization"},
        }
        with self._lock:
            access = self._access.get(scope)
        if access is not None and access.serves(authorization):
            try:
                return transfer({**connection, **access.connection()})
            except (OSError, RuntimeError) as error:
                if not is_refusal(error):
                    raise
        access = self._new_access(scope, url, authorization)
        return transfer({**connection, **access.connection()})

    def _new_access(self, scope: Scope, url: str, authorization: str | None) -> _Access:
        """A new token, kept for later: that is one request less for every object.

        The Hub is asked by us and not by hf_xet, whose errors do not tell a missing bucket from
        a connection that failed.
        """
        answer = json_of(self._client.request("GET", url))
        try:
            access = _Access(
                authorization, str(answer["casUrl"]), str(answer["accessToken"]), int(answer["exp"])
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise BucketUnavailable(f"{url} did not give a token") from error
        if not 0 <= access.expires < 1 << 63:
            raise BucketUnavailable(f"{url} gave a token that ends at no time")
        with self._lock:
            self._access[scope] = access
        return access
