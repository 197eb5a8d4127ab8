"""What the exit status of ``thinwire`` means: one code per branch of the error tree."""

from __future__ import annotations

from thinwire.errors import Misuse, Resync, Retryable, Stop, ThinwireError

__all__ = [
    "BROKEN_PIPE",
    "INTERNAL",
    "INTERRUPTED",
    "MEANINGS",
    "RESYNC",
    "USAGE",
    "exit_code",
    "hint",
]

INTERNAL, USAGE, RETRY, RESYNC, STOP = 1, 2, 3, 4, 5
INTERRUPTED = 130
BROKEN_PIPE = 141

MEANINGS = {
    0: "done",
    INTERNAL: "internal error: a bug in thinwire",
    USAGE: "usage: the call, its input or its surroundings are wrong",
    RETRY: "retry: nothing is lost, the same call may succeed later",
    RESYNC: "resync: damaged or missing data; also a failed verify",
    STOP: "stop: going on would lose somebody's work, a person has to look",
    INTERRUPTED: "interrupted with Ctrl-C",
    BROKEN_PIPE: "the reader of the output went away",
}

_BRANCHES: tuple[tuple[type[Exception], int], ...] = (
    (Retryable, RETRY),
    (Resync, RESYNC),
    (Stop, STOP),
    (Misuse, USAGE),
    (OSError, USAGE),
)


def exit_code(error: BaseException) -> int:
    """The status that a command ends with after this error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    return next((code for branch, code in _BRANCHES if isinstance(error, branch)), INTERNAL)


def hint(error: BaseException, command: str) -> str:
    """What to do next.

    Args:
        command: what was called, such as ``thinwire pull``.
    """
    if isinstance(error, ThinwireError):
        return error.hint or f"see `{command} --help`"
    if isinstance(error, OSError):
        return "check the path, its permissions and the free space"
    return "this is a bug: run again with THINWIRE_TRACEBACK=1 and report what it prints"
