"""What is killed in a run, and when: ``server-1@3`` kills it once step 3 is done.

A process that was killed is started again, as whatever watches over processes would do it, after a
few seconds. ``server-1@3+20`` starts it 20 seconds later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Kill", "parse_kill"]

_FORM = re.compile(r"([a-z0-9-]+)@(\d+)(?:\+(\d+))?")


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a process after a step.

    Attributes:
        name: of the process.
        step: optimizer step.
        rest_s: seconds until it is started again.
    """

    name: str
    step: int
    rest_s: float = 2.0

    def __str__(self) -> str:
        return f"{self.name}@{self.step}"


def parse_kill(text: str, names: tuple[str, ...], steps: int) -> Kill:
    """A kill from how it is written.

    Args:
        names: of the processes.
        steps: of the run.

    Raises:
        ValueError: not of that form, or of a process or after a step that there is not.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r}: write NAME@STEP, like {names[0]}@3")
    name, step, rest = found.groups()
    if name not in names:
        raise ValueError(f"there is no process {name!r}, only {', '.join(names)}")
    if not 1 <= int(step) <= steps:
        raise ValueError(f"{text!r}: the run has steps 1 to {steps}")
    return Kill(name, int(step), Kill.rest_s if rest is None else float(rest))
