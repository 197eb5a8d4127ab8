"""Bytes per version on two states: thinwire's codecs, the bound, and what else there is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinwire import codec as codecs
from thinwire.checkpoint import map_file
from thinwire.cli.bench_bound import Tally, bound, tally
from thinwire.cli.bench_rivals import Delta
from thinwire.cli.bench_state import named
from thinwire.codec import wire
from thinwire.diff import diff
from thinwire.dtypes import DTYPES
from thinwire.errors import Misuse, ThinwireError
from thinwire.log import keys
from thinwire.log.commit import Commit, PayloadRef
from thinwire.patch import Bits, Patch
from thinwire.schema import Schema, TensorSpec
from thinwire.weights import Weights

__all__ = [
    "OURS",
    "delta_between",
    "find_pairs",
    "load_pair",
    "model_of",
    "shares",
    "size_row",
    "tallies",
]

OURS = ("raw", "packed", "compact")
_ID = "0" * 32
_HASH = "0" * 64


def find_pairs(folder: Path) -> list[Path]:
    """The folders with a pair of states, by model and learning rate.

    Raises:
        Misuse: there is none.
    """
    found = [path.parent for path in folder.glob("*/after.safetensors")]
    if not found:
        raise Misuse(
            f"{folder} holds no pair of states", hint="python benchmarks/make_states.py makes them"
        )
    return sorted(found, key=lambda path: (model_of(path), _lr(path)))


def model_of(pair: Path) -> str:
    """The model in a pair's name."""
    return pair.name.rpartition("-lr")[0]


def _lr(pair: Path) -> float:
    try:
        return float(pair.name.rpartition("-lr")[2])
    except ValueError:
        raise Misuse(f"{pair.name!r} is not named <model>-lr<rate>") from None


def load_pair(pair: Path) -> Delta:
    """The two states of a folder, in memory, and what changed between them."""
    before, old = _read(pair / "before.safetensors")
    after, new = _read(pair / "after.safetensors")
    before.require_same(after)
    return delta_between(before, old, new)


def _read(file: Path) -> tuple[Schema, list[Bits]]:
    header = wire.read_header(file)
    data = np.array(map_file(file, header.size))
    schema = Schema(tuple(TensorSpec(e.name, e.dtype, e.shape) for e in header.entries.values()))
    entries = [header.entries[spec.name] for spec in schema]
    # files may put a tensor at an odd place; the kernels want elements aligned
    return schema, [data[e.start : e.stop].copy().view(e.dtype.bits) for e in entries]


def delta_between(schema: Schema, old: Sequence[Bits], new: Sequence[Bits]) -> Delta:
    """Both states and their difference."""
    return Delta(schema, old, new, diff(old, Weights.of(named(schema, list(new)))))


def tallies(delta: Delta) -> list[Tally]:
    """What changed, counted by exponent, per dtype."""
    found = []
    for kind in DTYPES.values():
        base = [bits for spec, bits in zip(delta.schema, delta.old) if spec.dtype == kind]
        patches = [(delta.old[p.ordinal], p) for p in delta.patches if p.spec.dtype == kind]
        if base:
            found.append(tally(kind, base, patches))
    return found


def size_row(delta: Delta, rivals: dict[str, Callable[[Delta], int]]) -> dict[str, Any]:
    """Elements, changes, the bound, and bytes by codec; ours with the commit."""
    limit = bound(tallies(delta))
    changed = sum(map(len, delta.patches))
    sizes = {}
    for name in OURS:
        payload, commit = our_bytes(delta, name)
        sizes[name] = payload + commit
    sizes |= {name: measure(delta) for name, measure in rivals.items()}
    return {
        "elements": delta.schema.numel,
        "bytes": delta.schema.nbytes,
        "changed": changed,
        "share": changed / delta.schema.numel,
        "bound": {
            "bytes": limit.nbytes,
            "positions": round(limit.positions),
            "steps": round(limit.steps),
        },
        "commit_bytes": commit,
        "sizes": sizes,
        "per_change": {name: size / max(1, changed) for name, size in sizes.items()},
    }


def our_bytes(delta: Delta, codec: str) -> tuple[int, int]:
    """Bytes of the payload and of its commit; the payload is read back and compared.

    Raises:
        ThinwireError: it does not decode to the same changes.
    """
    metadata = {"run": _ID, "version": "1", "base": "0"}
    payload = b"".join(codecs.encode(delta.patches, codec=codec, metadata=metadata, base=delta.old))
    _require_same(delta.patches, codecs.decode(payload, delta.schema, delta.old))
    sha256 = hashlib.sha256(payload).hexdigest()
    reference = PayloadRef(keys.delta_key(1, sha256), len(payload), sha256)
    commit = Commit(
        run=_ID,
        version=1,
        parent=_HASH,
        writer=_ID,
        payloads=(reference,),
        digest=_HASH,
        changed=sum(map(len, delta.patches)),
        tensors=len(delta.patches),
        step=1000,
        time_ms=1_700_000_000_000,
        codec=codec,
    )
    return len(payload), len(commit.encode())


def _require_same(patches: Sequence[Patch], decoded: Sequence[Patch]) -> None:
    same = len(patches) == len(decoded) and all(
        a.ordinal == b.ordinal
        and np.array_equal(a.positions, b.positions)
        and np.array_equal(a.bits, b.bits)
        for a, b in zip(patches, decoded)
    )
    if not same:
        raise ThinwireError("a payload did not decode to what was encoded")


def pair_rows(
    pairs: Sequence[Path], rivals: dict[str, Callable[[Delta], int]]
) -> Iterator[dict[str, Any]]:
    """One row per pair, with its model and learning rate."""
    for pair in pairs:
        head = {"pair": pair.name, "model": model_of(pair), "lr": _lr(pair)}
        yield head | size_row(load_pair(pair), rivals)


def shares(pairs: Sequence[Path]) -> list[dict[str, Any]]:
    """Changed share of every step, by model and learning rate, where it was recorded."""
    return [
        {
            "model": model_of(pair),
            "lr": _lr(pair),
            "shares": json.loads((pair / "shares.json").read_text()),
        }
        for pair in pairs
        if (pair / "shares.json").exists()
    ]
