"""What a run's proof compared, as rows for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wordle.facts import UNKNOWN

__all__ = ["identical", "proven"]


def identical(run: Mapping[str, Any]) -> bool | None:
    """Whether everything was; None if the run ended before it was compared."""
    proof = run.get("proof")
    return bool(proof["bit_identical"]) if proof else None


def proven(proof: Mapping[str, Any] | None) -> list[tuple[str, str, str, bool | None]]:
    """What, what was found there, the verdict, and whether it is good; None: held against."""
    if not proof:
        return []
    sha256, version = proof["sha256"], proof["version"]
    rows: list[tuple[str, str, str, bool | None]] = [
        ("trainer's masters, cast by torch", f"SHA-256 {sha256}", "", None)
    ]
    if "commit" in proof:
        same = proof["commit"] == proof["state_digest"]
        found = f"state digest {proof['commit']}"
        rows.append((f"commit of version {version}", found, _verdict(same), same))
    for server, held in sorted((proof.get("mirrors") or {}).items()):
        same = held == sha256
        rows.append((f"{server}, mirror on disk", f"SHA-256 {held}", _verdict(same), same))
    for server, engine in sorted((proof.get("engines") or {}).items()):
        rows.append((f"{server}, weights in vLLM", *_attested(engine, version)))
    return rows


def _attested(engine: Mapping[str, Any], version: int) -> tuple[str, str, bool]:
    at, differs = engine.get("version"), engine.get("differs") or []
    left_out = engine.get("not_compared") or []
    same = bool(engine.get("exact")) and at == version and not differs and not left_out
    found = f"version {at}, {engine.get('tensors', UNKNOWN)} tensors read back"
    for names, how in ((differs, "differ"), (left_out, "not compared")):
        if names:
            few = ", ".join(str(name) for name in names[:3])
            found += f"; {len(names)} {how}: {few}{', …' if len(names) > 3 else ''}"
    return found, _verdict(same), same


def _verdict(same: bool) -> str:
    return "identical" if same else "DIFFERENT"
