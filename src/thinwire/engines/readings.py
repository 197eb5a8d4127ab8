"""What ranks read in their memory, on its way to whoever adds it up: plain values, and back.

A rank's report is ``{"version", "readings": {name: rows}, "expected": {name: [numel, lo, hi]}}``; a
row is ``[offset, shape, stride, lo, hi]`` with digests in hex. Copies of one part that differ have
no digest: the row of such a contradiction matches nothing. Beside these, ``cast`` says of tensors
that are cast whether the rank has found them exact, ``reloaded`` names tensors that only a reload
changes, and ``changed`` the rank's own tensors that have changed since the last reload.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from thinwire.digest import TensorDigest
from thinwire.engines.attest import Reading, read_layout, sum_readings
from thinwire.engines.layout import Layout
from thinwire.engines.regions import Region
from thinwire.schema import Schema

__all__ = ["add_up", "report"]

Report = dict[str, Any]
_CONTRADICTION = "contradiction"


def report(
    layout: Layout, schema: Schema, digests: Sequence[TensorDigest], refused: Collection[str]
) -> Report:
    """Read every placed tensor of one rank; say what the version's digests are.

    Args:
        digests: in schema order. Tensors that are cast or refused are read, and not expected.
    """
    readings = {}
    for spec in schema:
        found, contradiction = read_layout(layout, spec)
        readings[spec.name] = [
            [r.region.offset, list(r.region.shape), list(r.region.stride), *_hex(r.digest)]
            for r in found
        ]
        if contradiction:
            readings[spec.name].append([0, [], [], _CONTRADICTION, contradiction])
    expected = {
        spec.name: [spec.numel, *_hex(digest)]
        for spec, digest in zip(schema, digests)
        if spec.name not in refused
        and not any(piece.casts for piece in layout.pieces.get(spec.name, ()))
    }
    return {"readings": readings, "expected": expected}


def add_up(reports: Sequence[Report]) -> dict[str, Any]:
    """All ranks' reports together.

    Returns:
        Number of ``tensors`` compared, names of those that ``differs``, and ``not_compared``.
        Tensors of the ranks' own that have changed since they were reloaded differ, too.
    """
    expected: dict[str, list[Any]] = {}
    for one in reports:
        expected.update(one["expected"])
    compared: set[str] = set()
    differs = []
    for name, elements, digest in sum_readings([_readings(one) for one in reports]):
        if name in expected:
            compared.add(name)
            numel, lo, hi = expected[name]
            if (elements, digest) != (numel, _digest(lo, hi)):
                differs.append(name)
    for one in reports:
        compared.update(one["cast"])
        differs += [name for name, exact in one["cast"].items() if not exact]
    names = {name for one in reports for name in one["readings"]}
    changed = [f"rank {n}: {name}" for n, one in enumerate(reports) for name in one["changed"]]
    reloaded = {name for one in reports for name in one["reloaded"]}
    return {
        "tensors": len(compared),
        "differs": sorted(set(differs)) + changed,
        "not_compared": sorted(names - compared),
        "reloaded": len(reloaded),
    }


def _readings(one: Report) -> Mapping[str, Sequence[Reading]]:
    return {name: [_reading(*row) for row in rows] for name, rows in one["readings"].items()}


def _reading(offset: int, shape: list[int], stride: list[int], lo: str, hi: str) -> Reading:
    region = Region(offset, tuple(shape), tuple(stride))
    return Reading(region, TensorDigest(-1, -1) if lo == _CONTRADICTION else _digest(lo, hi))


def _hex(digest: TensorDigest) -> tuple[str, str]:
    return f"{digest.lo:016x}", f"{digest.hi:016x}"


def _digest(lo: str, hi: str) -> TensorDigest:
    return TensorDigest(int(lo, 16), int(hi, 16))
