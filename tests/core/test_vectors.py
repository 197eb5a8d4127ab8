"""The payload format's frozen vectors: the library and the reference decoder read them alike.

These tests only read. A vector that is missing, changed, or not listed fails; nothing here, and
nothing that the tests run, writes one.
"""

from __future__ import annotations

import ast
import hashlib
import json
import struct
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from thinwire import codec
from thinwire.codec import wire
from thinwire.dtypes import DTYPES
from thinwire.errors import CorruptPayload, UnsupportedFormat
from thinwire.patch import Bits, Patch
from thinwire.schema import Schema, TensorSpec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "spec" / "vectors" / "v1"
LIST = (FOLDER / "SHA256SUMS").read_text().split("\n")[:-1]
NAMES = [line.split()[1].removesuffix(".json") for line in LIST if line.endswith(".json")]
ACCEPTED = [name for name in NAMES if "-refused-" not in name]
REFUSED = [name for name in NAMES if "-refused-" in name]
ERRORS = {"corrupt": CorruptPayload, "unsupported": UnsupportedFormat}


class Vector:
    """A payload with its schema, its base, and what it says."""

    def __init__(self, name: str) -> None:
        self.file = (FOLDER / f"{name}.safetensors").read_bytes()
        self.about: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        specs = [TensorSpec(n, DTYPES[d], tuple(s)) for n, d, s in self.about["tensors"]]
        self.schema = Schema(tuple(specs))
        self.base = {spec.name: self._whole(spec) for spec in specs}

    def _whole(self, spec: TensorSpec) -> bytes:
        pattern = bytes.fromhex(self.about["base"][spec.name])
        return (pattern * -(-spec.nbytes // len(pattern)))[: spec.nbytes] if pattern else b""

    @property
    def bits(self) -> list[Bits]:
        return [np.frombuffer(self.base[t.name], t.dtype.bits) for t in self.schema]


def summary(changes: dict[str, Sequence[tuple[int, int]]]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "count": len(some),
            "sha256": hashlib.sha256(
                b"".join(struct.pack("<QQ", *change) for change in some)
            ).hexdigest(),
        }
        for name, some in changes.items()
    }


def pairs(patches: Sequence[Patch]) -> dict[str, Sequence[tuple[int, int]]]:
    return {p.name: list(zip(p.positions.tolist(), p.bits.tolist())) for p in patches}


def test_nothing_is_missing_changed_or_unlisted() -> None:
    for line in LIST:
        digest, name = line.split()
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    there = {path.name for path in FOLDER.iterdir()} - {"SHA256SUMS"}
    assert there == {line.split()[1] for line in LIST}
    assert len(ACCEPTED) >= 39
    assert len(REFUSED) >= 107


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_library_reads_it(name: str) -> None:
    vector = Vector(name)
    patches = codec.decode(vector.file, vector.schema, vector.bits)
    for patch in patches:
        patch.check()
    assert summary(pairs(patches)) == vector.about["changes"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_reference_reads_it(name: str, reference: ModuleType) -> None:
    vector = Vector(name)
    changes = reference.decode(vector.file, vector.about["tensors"], vector.base)
    assert summary(changes) == vector.about["changes"]


@pytest.mark.parametrize("name", REFUSED)
def test_the_library_refuses_it(name: str) -> None:
    vector = Vector(name)
    with pytest.raises(ERRORS[vector.about["refused"]]):
        codec.decode(vector.file, vector.schema, vector.bits)


@pytest.mark.parametrize("name", REFUSED)
def test_the_reference_refuses_it(name: str, reference: ModuleType) -> None:
    vector = Vector(name)
    with pytest.raises(reference.Refused) as refusal:
        reference.decode(vector.file, vector.about["tensors"], vector.base)
    assert refusal.value.kind == vector.about["refused"]


def test_every_refusal_of_the_reference_has_a_vector(reference: ModuleType) -> None:
    assert reference.__file__
    calls = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(Path(reference.__file__).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "require"
    ]
    reached = set()
    for name in REFUSED:
        vector = Vector(name)
        try:
            reference.decode(vector.file, vector.about["tensors"], vector.base)
        except reference.Refused as refusal:
            reached |= {line for _, line in traceback.walk_tb(refusal.__traceback__)}
    assert [call.start for call in calls if reached.isdisjoint(call)] == []


@pytest.mark.parametrize("name", [name for name in ACCEPTED if "-1-thinwire-0.1.0-" in name])
def test_the_library_still_writes_it(name: str) -> None:
    vector = Vector(name)
    metadata = wire.parse_header(vector.file, len(vector.file)).metadata
    patches = codec.decode(vector.file, vector.schema, vector.bits)
    identity = {key: metadata[key] for key in metadata.keys() - {"format", "major", "codec"}}
    for threads in (1, 2):
        written = codec.encode(
            patches,
            codec=metadata["codec"],
            base=vector.bits,
            metadata=identity,
            threads=threads,
        )
        assert b"".join(written) == vector.file
