"""Everything that can go wrong, in one tree grouped by what a caller would do about it.

``Retryable``
    Nothing is decided or nothing is wrong yet: call again later.
``Resync``
    The data at hand cannot be used: fetch it again, from an anchor if need be.
``Stop``
    Going on would lose or corrupt somebody's work: a person has to look.
``Misuse``
    The call or its surroundings are wrong: fix them and call again.

Every error carries a ``hint``: one sentence that says what to do next.
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "BucketNotFound",
    "BucketUnavailable",
    "CommitUnresolved",
    "CorruptPayload",
    "DigestMismatch",
    "EnginePoisoned",
    "HistoryRewritten",
    "InvalidCheckpoint",
    "InvalidKey",
    "KeyNotFound",
    "MirrorBusy",
    "MirrorCorrupt",
    "MirrorInUse",
    "Misuse",
    "PublishFailed",
    "Resync",
    "Retryable",
    "RollbackRefused",
    "RunChanged",
    "RunExists",
    "RunNotFound",
    "SchemaMismatch",
    "Stop",
    "ThinwireError",
    "UnsupportedDtype",
    "UnsupportedFormat",
    "VersionGone",
    "WriterConflict",
]


class ThinwireError(Exception):
    """Base of every error that thinwire raises on purpose.

    ``str(error)`` says what happened; ``error.hint`` says what to do next and may be empty.
    """

    default_hint = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.default_hint if hint is None else hint


# --- try again -----------------------------------------------------------------------------


class Retryable(ThinwireError):
    """Nothing is lost and nothing is decided: the same call may succeed later."""

    default_hint = "try again later"


class BucketUnavailable(Retryable):
    """The store did not answer, or answered that it cannot right now.

    ``retry_after`` is the number of seconds that the store asked to be left alone, or None.
    """

    default_hint = "check the network and the store's status; nothing was lost, try again"

    def __init__(
        self, message: str, *, hint: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class CommitUnresolved(Retryable):
    """Neither the commit's outcome nor its presence could be learned.

    It is settled before the next publish; it never counts as success or failure by assumption.
    """

    default_hint = "publish again: the pending commit is settled first"


class MirrorBusy(Retryable):
    """Another process holds the mirror."""

    default_hint = "one process per host writes a mirror: stop the other, or use another folder"


# --- fetch again ---------------------------------------------------------------------------


class Resync(ThinwireError):
    """What is at hand cannot be used; fresh bytes from the bucket can."""

    default_hint = "fetch the version again, from an anchor if need be"


class CorruptPayload(Resync):
    """Bytes from the bucket are not what their commit, or their format, promises."""

    default_hint = "run `thinwire verify BUCKET` to see whether the stored object is damaged"


class DigestMismatch(Resync):
    """Applying a payload would not give the state that the commit promises."""

    default_hint = (
        "the base differs from the publisher's: run `thinwire verify DIR`, "
        "then pull into a fresh folder"
    )


class VersionGone(Resync):
    """A payload on the way to the wanted version no longer exists."""

    default_hint = "pull a newer version, or start from an anchor in a fresh folder"


class MirrorCorrupt(Resync):
    """The mirror's files are not those of the version it claims to hold."""

    default_hint = "pull into a fresh folder; keep the damaged one if you want to find the cause"


class EnginePoisoned(Resync):
    """An update was applied in part; the engine must not serve until it is reloaded."""

    default_hint = "reload the engine from the mirror"


# --- a person has to look ------------------------------------------------------------------


class Stop(ThinwireError):
    """Going on would lose or corrupt somebody's work."""

    default_hint = "find out who else writes to this run before going on"


class WriterConflict(Stop):
    """Another writer committed the version this one was about to commit."""

    default_hint = (
        "another trainer publishes to this run: stop one of them, "
        "or give this one a prefix of its own"
    )


class HistoryRewritten(Stop):
    """A commit that was seen before is gone or different."""

    default_hint = "the run was deleted or overwritten: find out why, then start a fresh mirror"


class RollbackRefused(Stop):
    """The bucket offers, or the caller asks for, a version older than the one already held."""

    default_hint = "pull the older version into a fresh folder"


class RunChanged(Stop):
    """The bucket prefix now holds another run."""

    default_hint = "pass adopt=True (or --adopt) to follow the new run from its own version 0"


# --- fix the call --------------------------------------------------------------------------


class Misuse(ThinwireError, ValueError):
    """The call, or what it was given, is wrong."""


class AccessDenied(Misuse):
    """The store refuses the credentials, or there are none."""

    default_hint = "check the credentials and what they may read and write"


class BucketNotFound(Misuse):
    """The bucket itself does not exist. Never read as 'an empty bucket'."""

    default_hint = "check the URL; a local bucket is created by the first publish"


class KeyNotFound(Misuse, LookupError):
    """There is no object under this key."""


class AlreadyExists(Misuse):
    """A create-only write found an object under its key."""


class InvalidKey(Misuse):
    """A key or file name that could escape its prefix, or that not every store can hold."""


class InvalidCheckpoint(Misuse):
    """A folder or file that is not a readable safetensors checkpoint."""

    default_hint = "pass a folder with model.safetensors or model.safetensors.index.json"


class MirrorInUse(Misuse):
    """Another process has the mirror's files mapped; patching them would change it mid-forward."""

    default_hint = "pull with --swap (new files, renamed into place) or stop the other process"


class PublishFailed(Misuse):
    """The publisher is closed, or a failed publish was not looked at."""


class RunExists(Misuse):
    """resume="new" was asked for, and the prefix already holds a run."""

    default_hint = 'use resume="auto" to continue the run, or another prefix'


class RunNotFound(Misuse):
    """The prefix holds no run."""

    default_hint = "check the URL and prefix; the first publish creates the run"


class SchemaMismatch(Misuse):
    """Names, shapes, dtypes or ties differ from the run's."""

    default_hint = "a run has one schema: publish a changed model under a new prefix"


class UnsupportedDtype(Misuse):
    """A dtype, or a cast between two dtypes, that thinwire does not handle."""


class UnsupportedFormat(Misuse):
    """Written by a newer major version of the format."""

    default_hint = "upgrade thinwire on this side"
