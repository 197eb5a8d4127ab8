"""What a run's proof compared, as rows for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wordle.facts import UNKNOWN

__all__ = ["exact", "identical", "proven"]


def identical(run: Mapping[str, Any]) -> bool | None:
    """Whether everything was; None if the run ended before it was compared."""
    proof = run.get("proof")
    return bool(proof["bit_identical"]) if proof else None


def exact(answer: Mapping[str, Any], version: int, tensors: int | None) -> bool:
    """Whether an engine read every tensor back at this version, and each is what the commit says.

    Args:
        answer: its attestation.
        tensors: how many the trainer has; None: not told, as by runs of earlier releases.
    """
    compared = answer.get("tensors") or 0
    return bool(
        answer.get("version") == version
        and answer.get("exact")
        and (compared > 0 if tensors is None else compared == tensors)
        and not answer.get("differs")
        and not answer.get("not_compared")
    )


def proven(proof: Mapping[str, Any] | None) -> list[tuple[str, str, str, bool | None]]:
    """What, what was found there, the verdict, and whether it is good; None: held against."""
    if not proof:
        return []
    sha256, version = proof["sha256"], proof["version"]
    rows: list[tuple[str, str, str, bool | None]] = [
        ("trainer's masters, cast by torch", f"SHA-256 {sha256}", "", None)
    ]
    if not version:
        rows.append(("versions after the first", "none was published", "NOT PROVED", False))
    if "commit" in proof:
        same = proof["commit"] == proof["state_digest"]
        found = f"state digest {proof['commit'] or UNKNOWN}"
        rows.append((f"commit of version {version}", found, _verdict(same), same))
    for server, held in sorted((proof.get("mirrors") or {}).items()):
        same = held == sha256
        rows.append(
            (f"{server}, mirror on disk", f"SHA-256 {held or UNKNOWN}", _verdict(same), same)
        )
    for server, engine in sorted((proof.get("engines") or {}).items()):
        same = exact(engine, version, proof.get("tensors"))
        rows.append((f"{server}, weights in vLLM", _read_back(engine), _verdict(same), same))
    return rows


def _read_back(engine: Mapping[str, Any]) -> str:
    if "error" in engine:
        return f"no answer: {engine['error']}"
    found = f"version {engine.get('version')}, {engine.get('tensors', UNKNOWN)} tensors read back"
    for key, how in (("differs", "differ"), ("not_compared", "not compared")):
        if names := engine.get(key):
            few = ", ".join(str(name) for name in names[:3])
            found += f"; {len(names)} {how}: {few}{', …' if len(names) > 3 else ''}"
    return found


def _verdict(same: bool) -> str:
    return "identical" if same else "DIFFERENT"
