"""``thinwire bench bucket``: how fast a bucket moves bytes, and what each version costs there."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from thinwire.cli.console import Bar, emit, json_option, plain, print_table, size
from thinwire.cli.sizes import size_option

if TYPE_CHECKING:
    from thinwire.anchor import Progress
    from thinwire.bucket import Bucket

__all__ = ["bucket"]

Work = Callable[[], object]

_ROUNDS = 3
_DENSITY = 0.01


@click.command()
@click.argument("url")
@click.option(
    "--size",
    "object_size",
    type=size_option,
    metavar="SIZE",
    default="200MB",
    show_default=True,
    help="Of the object that is written and read.",
)
@click.option(
    "--versions",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Small versions that are published and pulled.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=_ROUNDS),
    default=_ROUNDS,
    show_default=True,
    help="Writes and reads of the object; medians are shown.",
)
@json_option
def bucket(url: str, object_size: int, versions: int, repeat: int, as_json: bool) -> None:
    """Measure the bucket at URL: throughput of one object, and the overhead of a version.

    Everything is written under bench/<random>/ and removed again. For s3://, gs:// and az://
    the same bytes take turns with plain obstore (one put of one buffer, one get into one), in
    the same run. The versions are those of a small synthetic model in bf16, 1 % changed each
    time.

    \b
    JSON: bucket, bytes, repeat, put, get {seconds (median), mb_per_s,
      obstore_mb_per_s, ratio (thinwire's speed to obstore's)} (the last two null
      for other stores), versions, publish, pull {ms (median), mean_ms, requests
      {operation: calls per version}, bytes_out, bytes_in (per version)}
    """
    from thinwire.bucket import open_bucket
    from thinwire.doctor.urls import nested

    open_bucket(url)  # a URL that is none is refused before anything is measured
    place = nested(url, f"bench/{secrets.token_hex(8)}")
    with Bar("making an object") as bar:
        document: dict[str, Any] = {"bucket": url, "bytes": object_size, "repeat": repeat}
        document |= _throughput(nested(place, "object"), object_size, repeat, bar)
        document["versions"] = versions
        document |= _versions(nested(place, "run"), versions, bar)
    if as_json:
        emit(document)
    else:
        _print(document)


# --- one large object ----------------------------------------------------------------------


def _throughput(url: str, object_size: int, repeat: int, progress: Progress) -> dict[str, Any]:
    import numpy as np

    data = memoryview(np.random.default_rng().bytes(object_size))
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Work) -> None:
        started = time.perf_counter()
        work()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    with _emptied(url) as store:
        plain_put, plain_get = _plain(store)
        store.put("object", b"x")  # connected, and the prefix is there
        for round_ in range(repeat):
            progress("moving an object", round_, repeat)
            # who goes first takes turns, too
            puts: list[tuple[str, Work]] = [("put", lambda: store.put("object", [data]))]
            gets: list[tuple[str, Work]] = [("get", lambda: _read(store, "object", object_size))]
            if plain_put is not None and plain_get is not None:
                puts.append(("plain put", lambda: plain_put("plain", data)))
                gets.append(("plain get", lambda: plain_get("plain")))
            for jobs in (puts, gets):
                for name, work in jobs if round_ % 2 else reversed(jobs):
                    timed(name, work)
        if plain_put is not None:
            store.delete("plain")
    return {way: _speed(seconds, way, object_size) for way in ("put", "get")}


def _plain(
    store: Bucket,
) -> tuple[Callable[[str, memoryview], object] | None, Callable[[str], object] | None]:
    """Put and get of obstore alone, on a store made with the same settings; None for others."""
    from thinwire.bucket import innermost

    inner = innermost(store)
    if inner.url.partition("://")[0] not in ("s3", "gs", "az"):
        return None, None
    from thinwire.bucket._objects_native import native
    from thinwire.bucket._objects_stores import make_store
    from thinwire.bucket.objects import ObjectBucket

    if not isinstance(inner, ObjectBucket):
        return None, None
    calls, location = native(), inner.location
    plain_store, _ = make_store(calls, location)

    def put(key: str, data: memoryview) -> object:
        return calls.calls.put(plain_store, location.path(key), data)

    def get(key: str) -> object:
        return calls.calls.get(plain_store, location.path(key)).bytes()

    return put, get


def _read(store: Bucket, key: str, expected: int) -> None:
    from thinwire.errors import CorruptPayload

    seen = sum(map(len, store.stream(key)))
    if seen != expected:
        raise CorruptPayload(f"of {expected} bytes written, {seen} came back")


def _speed(seconds: dict[str, list[float]], way: str, moved: int) -> dict[str, Any]:
    median = statistics.median(seconds[way])
    theirs = seconds.get(f"plain {way}")
    other = None if theirs is None else statistics.median(theirs)
    return {
        "seconds": median,
        "mb_per_s": moved / median / 1e6,
        "obstore_mb_per_s": None if other is None else moved / other / 1e6,
        "ratio": None if other is None else other / median,
    }


# --- versions ------------------------------------------------------------------------------


def _versions(url: str, versions: int, progress: Progress) -> dict[str, Any]:
    from thinwire.bucket import Metrics, open_bucket
    from thinwire.cli.bench_state import changes, make_weights, named
    from thinwire.cli.bench_synthetic import Shape
    from thinwire.mirror import MemoryMirror
    from thinwire.patch import apply_patch
    from thinwire.publisher import Publisher
    from thinwire.replica import Replica

    schema = Shape(2048, 128, 2, 512, heads=2, kv_heads=1, head_dim=64).schema()
    tensors = make_weights(schema)
    published, pulled = Metrics(), Metrics()
    spent: dict[str, list[float]] = {"publish": [], "pull": []}
    with (
        _emptied(url) as store,
        Publisher(open_bucket(store, metrics=published), named(schema, tensors)) as publisher,
    ):
        replica = Replica(open_bucket(store, metrics=pulled), MemoryMirror())
        replica.sync()
        for version in range(-1, versions):  # the first one warms up
            progress("publishing versions", max(version, 0), versions)
            for patch in changes(schema, tensors, _DENSITY):
                apply_patch(tensors[patch.ordinal], patch)
            if version == 0:
                published.reset()
                pulled.reset()
            started = time.perf_counter()
            publisher.publish(named(schema, tensors)).result()
            there = time.perf_counter()
            replica.sync()
            if version >= 0:
                spent["publish"].append(there - started)
                spent["pull"].append(time.perf_counter() - there)
        replica.close()
    metrics = {"publish": published, "pull": pulled}
    return {side: _side(spent[side], metrics[side].snapshot(), versions) for side in spent}


def _side(seconds: list[float], rows: dict[str, dict[str, Any]], versions: int) -> dict[str, Any]:
    def per_version(what: str) -> float:
        return float(sum(row[what] for row in rows.values())) / versions

    return {
        "ms": 1000 * statistics.median(seconds),
        "mean_ms": 1000 * statistics.fmean(seconds),
        "requests": {name: row["calls"] / versions for name, row in rows.items()},
        "bytes_out": per_version("bytes_out"),
        "bytes_in": per_version("bytes_in"),
    }


# --- both ----------------------------------------------------------------------------------


@contextmanager
def _emptied(url: str) -> Iterator[Bucket]:
    """The bucket at a scratch URL, where nothing is left in the end."""
    from thinwire.bucket import open_bucket
    from thinwire.doctor.scratch import clear

    store = open_bucket(url)
    try:
        yield store
    finally:
        clear(store, above=2)
        store.close()


def _print(document: dict[str, Any]) -> None:
    click.echo(
        plain(
            f"{document['bucket']}: an object of {size(document['bytes'])}, "
            f"median of {document['repeat']}"
        )
    )
    compared = document["put"]["ratio"] is not None
    print_table(
        ("", "seconds", "MB/s", *(("obstore MB/s", "× obstore") if compared else ())),
        [
            (
                way,
                f"{row['seconds']:.3f}",
                f"{row['mb_per_s']:.0f}",
                *((f"{row['obstore_mb_per_s']:.0f}", f"{row['ratio']:.2f}") if compared else ()),
            )
            for way in ("put", "get")
            for row in [document[way]]
        ],
    )
    click.echo(f"\n{document['versions']} versions, each of")
    print_table(
        ("", "ms (median)", "requests", "bytes up", "bytes down", "which"),
        [
            (
                side,
                f"{row['ms']:.1f}",
                f"{sum(row['requests'].values()):.3g}",
                size(row["bytes_out"]),
                size(row["bytes_in"]),
                ", ".join(f"{number:.3g} {name}" for name, number in row["requests"].items()),
            )
            for side in ("publish", "pull")
            for row in [document[side]]
        ],
    )
