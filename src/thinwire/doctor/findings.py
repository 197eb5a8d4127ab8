"""What an examination found: one line per step, and the error of each step that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import ThinwireError

__all__ = ["Finding", "Findings"]


@dataclass(frozen=True)
class Finding:
    """What one step showed.

    Attributes:
        step: what was looked at.
        detail: what was seen; for a failed step, the error's message.
        error: what the step failed with; None if all is well.
    """

    step: str
    detail: str
    error: ThinwireError | None = None

    def document(self) -> dict[str, Any]:
        """For JSON: step, ok, detail, error (class) and hint (null where all is well)."""
        return {
            "step": self.step,
            "ok": self.error is None,
            "detail": self.detail,
            "error": None if self.error is None else type(self.error).__name__,
            "hint": None if self.error is None else self.error.hint or None,
        }


@dataclass
class Findings:
    """Findings in the order of the steps."""

    rows: list[Finding] = field(default_factory=list)
    progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def step(self, name: str, work: Callable[[], str]) -> bool:
        """Do ``work``, which says what it saw or raises; return whether all is well."""
        self.progress(name, 0, 0)
        try:
            self.rows.append(Finding(name, work()))
        except ThinwireError as error:
            self.rows.append(Finding(name, str(error), error))
            return False
        return True

    @property
    def failed(self) -> list[Finding]:
        """The steps that failed."""
        return [row for row in self.rows if row.error is not None]
