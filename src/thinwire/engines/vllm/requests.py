"""What a worker is asked, and its answers: plain values, which cross processes."""

from __future__ import annotations

from typing import Any

from thinwire.engines.session import Session
from thinwire.errors import Misuse, ThinwireError

__all__ = ["answer"]


def answer(session: Session | None, request: dict[str, Any]) -> dict[str, Any]:
    """Do what ``request["do"]`` says: stage, status, apply, read or heal.

    Returns:
        The session's status and what else was asked for. An error is a value, too:
        ``{"failed": its type, "message": …, "hint": …}``.
    """
    try:
        if session is None:
            raise Misuse(
                "the engine does not follow a run", hint="set THINWIRE_BUCKET and THINWIRE_MIRROR"
            )
        return _answer(session, request)
    except Exception as error:  # noqa: BLE001 - for the other process, which decides
        hint = error.hint if isinstance(error, ThinwireError) else ""
        return {"failed": type(error).__name__, "message": str(error), "hint": hint}


def _answer(session: Session, request: dict[str, Any]) -> dict[str, Any]:
    do = request.get("do")
    if do == "stage":
        session.stage_in_background(request.get("version"))
    elif do == "apply":
        session.apply(int(request["version"]))
    elif do == "heal":
        session.heal()
    elif do == "read":
        return session.read()
    elif do != "status":
        raise Misuse(f"no worker can {do!r}")
    return session.status()
