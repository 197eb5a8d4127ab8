"""Object stores through obstore: ``s3://``, ``gs://`` and ``az://``.

What is promised, by the store itself (obstore 0.12.1, object_store 0.14.2):

* ``create`` of up to :data:`SINGLE` bytes is one conditional request (S3 ``If-None-Match: *``,
  Google ``x-goog-if-generation-match: 0``, Azure ``If-None-Match: *``): atomic against every other
  writer. A larger one is sent in parts, which has no condition in obstore: it looks first whether
  the key is free, and of two that race the last to finish stays. So whatever is larger has to be
  named by its content, as payloads are; commits are small.
* ``put`` replaces atomically. Up to :data:`SINGLE` bytes go in one request, more in parts of
  :data:`PART` bytes, :data:`CONCURRENCY` at a time, straight from the caller's buffers. A failed
  upload is aborted; one whose process dies leaves its parts in the store, unseen but billed, so a
  bucket wants a lifecycle rule that removes incomplete uploads.
* Reading asks for :data:`WINDOW` bytes first, which for most objects is all. The rest follows in
  ranges, several at once, on condition that the object is still the one first seen. Each answer's
  length is checked. Only an empty object takes two requests.
* A listing is in key order. Where the store promises that order it is read page by page, otherwise
  it is read whole and sorted.
* A bucket may be used on both sides of a fork: each process makes a store of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from thinwire.bucket._objects_errors import Action, Answer, judge, missing, read_answer
from thinwire.bucket._objects_listing import Listing, by_key, listing_of
from thinwire.bucket._objects_native import Native, native
from thinwire.bucket._objects_stores import Settings, make_store, settings
from thinwire.bucket._objects_url import Location, parse_location
from thinwire.bucket.base import (
    CHUNK,
    Bucket,
    Capabilities,
    Data,
    ObjectInfo,
    check_key,
    check_prefix,
    data_size,
    iter_data,
)
from thinwire.bucket.ranges import read_ahead, spans
from thinwire.errors import (
    AlreadyExists,
    BucketUnavailable,
    KeyNotFound,
    Misuse,
    ThinwireError,
)

__all__ = ["ObjectBucket", "open_objects"]

SINGLE = 16 << 20
PART = 8 << 20
WINDOW = 8 << 20
CONCURRENCY = 4
_LITTLE = 64 << 10


def open_objects(url: str) -> ObjectBucket:
    """The bucket at an ``s3://``, ``gs://`` or ``az://`` URL; nothing is connected to yet.

    Raises:
        Misuse: a malformed URL, an unknown option, or a setting that is missing.
    """
    return ObjectBucket(parse_location(url))


@dataclass(frozen=True)
class _Connection:
    """What one process uses to reach a store."""

    pid: int
    native: Native
    store: Any
    asking: Any  # the same store with a shorter time limit, for what is answered shortly
    settings: Settings
    workers: ThreadPoolExecutor


class ObjectBucket(Bucket):
    """A bucket, or a prefix in one, of an object store. Safe to use from several threads."""

    capabilities = Capabilities(create_only=True, atomic_replace=True)

    def __init__(self, location: Location) -> None:
        settings(location, os.environ)  # what is wrong with it is best said at once
        self.location = location
        self.url = location.url
        self._exists = False
        self._closed = False
        self._connections: list[_Connection] = []

    # --- reading ---------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        first, rest = self._read(key)
        blocks = list(rest)
        return b"".join([first, *blocks]) if blocks else bytes(first)

    def stream(self, key: str, *, chunk: int = CHUNK) -> Iterator[bytes]:
        first, rest = self._read(key)
        yield from _pieces(first, chunk)
        for block in rest:
            yield from _pieces(block, chunk)

    def head(self, key: str) -> ObjectInfo:
        with self._calls("head", key) as (connection, path):
            found = connection.native.calls.head(connection.asking, path)
        return ObjectInfo(key, found["size"])

    # --- writing ---------------------------------------------------------------------------

    def put(self, key: str, data: Data) -> None:
        self._write("write", key, data)

    def create(self, key: str, data: Data) -> None:
        if data_size(data) > SINGLE:
            with contextlib.suppress(KeyNotFound):
                self.head(key)
                raise AlreadyExists(f"{key!r} already exists in {self.url}")
            self._write("write", key, data)
        else:
            self._write("create", key, data)

    def delete(self, key: str) -> None:
        with contextlib.suppress(KeyNotFound), self._calls("delete", key) as (connection, path):
            connection.native.calls.delete(connection.asking, path)

    # --- listing ---------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        connection = self._connection()
        in_order = connection.settings.sorted_by_key
        inside = self.location.path("")
        wanted = listing_of(inside, check_prefix(prefix), in_order=in_order)
        if wanted is not None:
            pages = self._pages(connection, wanted)
            yield from by_key(pages, inside, prefix, in_order=in_order)
            return
        # No key starts like this, but a missing bucket is an error all the same.
        with self._translated("list", self.url):
            doubt = self._doubt(self.location.prefix)
        if doubt is not None:
            raise doubt

    def _pages(self, connection: _Connection, wanted: Listing) -> Iterator[tuple[str, int]]:
        folder = wanted.folder or None
        with self._translated("list", self.url):
            pages = connection.native.calls.list(
                connection.store, folder, offset=wanted.offset, chunk_size=1000
            )
            for page in pages:
                self._exists = True
                for found in page:
                    yield found["path"], found["size"]
            self._exists = True

    def close(self) -> None:
        self._closed = True
        pid = os.getpid()
        for connection in self._connections:
            if connection.pid == pid:
                connection.workers.shutdown(wait=False, cancel_futures=True)
        # A store of the parent's is kept: taking it apart here would meddle with its connections.
        self._connections = [one for one in self._connections if one.pid != pid]

    # --- inside ----------------------------------------------------------------------------

    def _read(self, key: str) -> tuple[Any, Iterator[Any]]:
        """The first block of an object, and the others, which are on their way by then."""
        with self._calls("read", key) as (connection, path):
            answer, in_ranges = self._first_answer(connection, path)
            size, tag = answer.meta["size"], answer.meta["e_tag"]
            if not in_ranges:
                return memoryview(b""), self._in_one_go(answer, key)
            block = _whole(answer, 0, min(size, WINDOW), size, key)
        if len(block) == size:
            return block, iter(())

        def read(start: int, stop: int) -> Any:
            with self._calls("read", key) as (connection, path):
                options = {"range": (start, stop), "if_match": tag}
                answer = connection.native.calls.get(connection.store, path, options=options)
                return _whole(answer, start, stop, size, key)

        ranges = spans(len(block), size, WINDOW)
        with self._until_closed():
            rest = read_ahead(read, ranges, connection.workers, CONCURRENCY)
        return block, self._in_turn(rest)

    def _in_turn(self, blocks: Iterator[Any]) -> Iterator[Any]:
        with self._until_closed():
            yield from blocks

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """What the workers say when they were sent away, as an error of whoever did that."""
        try:
            yield
        except (CancelledError, RuntimeError):
            if self._closed:
                raise self._is_closed() from None
            raise

    def _is_closed(self) -> Misuse:
        return Misuse(f"the bucket {self.url} is closed", hint="open it again")

    def _in_one_go(self, answer: Any, key: str) -> Iterator[memoryview]:
        """An object from one answer, of which no more is held than a piece."""
        size, came = answer.meta["size"], 0
        with self._calls("read", key):
            for piece in answer.stream(min_chunk_size=_LITTLE):
                came += len(piece)
                if came > size:
                    break
                yield memoryview(piece)
        if came != size:
            raise BucketUnavailable(f"{key!r}: {came} of {size} bytes came", hint="try again")

    def _first_answer(self, connection: _Connection, path: str) -> tuple[Any, bool]:
        """An answer to read from, and whether it is of the object's first range only."""
        get = connection.native.calls.get
        try:
            answer = get(connection.store, path, options={"range": (0, WINDOW)})
        except connection.native.errors as error:
            # No range of an empty object can be given, and some servers give no ranges at all.
            said = read_answer(error)
            if said.status != 416 and "non-partial" not in said.reason:
                raise
            return get(connection.store, path), False
        if not answer.meta["e_tag"] and answer.meta["size"] > WINDOW:
            # Without a tag two ranges could be of two objects, so it is read in one go.
            return get(connection.store, path), False
        return answer, True

    def _write(self, action: Action, key: str, data: Data) -> None:
        size = data_size(data)
        with self._calls(action, key) as (connection, path):
            put = connection.native.calls.put
            parts = iter_data(data, chunk=PART)
            if size > SINGLE:
                put(
                    connection.store,
                    path,
                    parts,
                    use_multipart=True,
                    chunk_size=PART,
                    max_concurrency=CONCURRENCY,
                )
            else:
                mode = "create" if action == "create" else "overwrite"
                store = connection.asking if size <= _LITTLE else connection.store
                put(store, path, parts, mode=mode, use_multipart=False)

    @contextlib.contextmanager
    def _calls(self, action: Action, key: str) -> Iterator[tuple[_Connection, str]]:
        """This process's connection and ``key``'s place, with errors translated."""
        path = self.location.path(check_key(key))
        connection = self._connection()
        with self._translated(action, f"{key!r} in {self.url}", path):
            yield connection, path
        self._exists = True

    @contextlib.contextmanager
    def _translated(self, action: Action, subject: str, path: str = "") -> Iterator[None]:
        try:
            yield
        except ThinwireError:
            raise
        except native().errors as error:
            raise self._meaning(error, action, subject, path) from None
        except BaseException as error:
            # pyo3's, for a panic in the Rust code; it is no Exception and cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            what = f"cannot {'read' if action == 'head' else action} {subject}: obstore panicked"
            raise Misuse(what, hint="check the store's settings and credentials") from None

    def _meaning(self, error: Exception, action: Action, subject: str, path: str) -> ThinwireError:
        answer = read_answer(error)
        if action == "head" and not answer.code and answer.status in (400, 404):
            answer = self._with_words(answer, path)
        gone = missing(answer)
        if gone == "key":
            self._exists = True
        if gone == "either" and action in ("read", "head", "delete"):
            return self._doubt(path) or KeyNotFound(f"no object {subject}")
        return judge(answer, action, subject, self.location)

    def _with_words(self, answer: Answer, path: str) -> Answer:
        """What a GET says where a HEAD, whose answer has no body, said only a number."""
        if answer.status == 404 and self._exists:
            return answer
        connection = self._connection()
        try:
            connection.native.calls.get(connection.asking, path, options={"range": (0, 1)})
        except connection.native.errors as error:
            said = read_answer(error)
            if said.status != 416:
                return said
        self._exists = True
        return answer

    def _doubt(self, path: str) -> ThinwireError | None:
        """Why it is not certain that the bucket exists; None if it is."""
        if self._exists:
            return None
        connection = self._connection()
        try:
            next(iter(connection.native.calls.list(connection.asking, path, chunk_size=1)), None)
        except connection.native.errors as error:
            return judge(read_answer(error), "list", f"the bucket {self.url}", self.location)
        self._exists = True
        return None

    def _connection(self) -> _Connection:
        if self._closed:
            raise self._is_closed()
        pid = os.getpid()
        connections = self._connections
        if connections and connections[-1].pid == pid:
            return connections[-1]
        # No lock: one held at a fork would stay held, and two threads may well connect at once.
        connections.append(connection := self._connect(pid))
        return connection

    def _connect(self, pid: int) -> _Connection:
        here = native()
        with self._translated("read", self.url):
            store, chosen = make_store(here, self.location)
            asking, _ = make_store(here, self.location, "ask")
        workers = ThreadPoolExecutor(2 * CONCURRENCY, thread_name_prefix="thinwire-read")
        return _Connection(pid, here, store, asking, chosen, workers)


def _whole(answer: Any, start: int, stop: int, size: int, key: str) -> memoryview:
    """The bytes of an answer, if they are the range that was asked for."""
    # No more is taken than was asked for, whatever comes: the first piece holds it all.
    pieces = iter(answer.stream(min_chunk_size=max(stop - start, 1)))
    block = memoryview(next(pieces, b""))
    if len(block) != stop - start or tuple(answer.range) != (start, stop):
        raise BucketUnavailable(
            f"{key!r}: asked for bytes {start} to {stop}, got {len(block)} bytes", hint="try again"
        )
    if answer.meta["size"] != size:
        raise BucketUnavailable(f"{key!r} was replaced while it was read", hint="read it again")
    return block


def _pieces(block: memoryview, chunk: int) -> Iterator[bytes]:
    for start in range(0, len(block), chunk):
        yield bytes(block[start : start + chunk])
