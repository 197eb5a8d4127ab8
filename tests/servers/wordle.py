"""The Wordle environment's server of the example, on 127.0.0.1.

The environment variable ``THINWIRE_WORDLE_PYTHON`` names a Python that has the packages of
requirements/wordle.txt and requirements/wordle-bare.txt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from servers.ports import ServerProcess, answers, free_port

__all__ = ["EXAMPLES", "WordleServer", "wordle_python"]

HOST = "127.0.0.1"
EXAMPLES = Path(__file__).parents[2] / "examples"


def wordle_python() -> str | None:
    """The Python that the server runs with, or None if none is named."""
    named = os.environ.get("THINWIRE_WORDLE_PYTHON")
    return str(Path(named).absolute()) if named else None


class WordleServer(ServerProcess):
    """Between ``start`` and ``stop``, which kills it, or inside ``with``; it keeps its port.

    Args:
        folder: for its log.
        options: further arguments.
        script: Python code to run in place of the server's own file; it finds the module
            ``wordle.environment``.
        environment: variables of the environment to set.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        script: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        python = wordle_python()
        if python is None:
            raise RuntimeError("THINWIRE_WORDLE_PYTHON is not set")
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        # by its path, the server finds its modules itself
        own = [str(EXAMPLES / "wordle" / "environment.py")] if script is None else ["-c", script]
        found = {} if script is None else {"PYTHONPATH": str(EXAMPLES)}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        super().__init__(
            [python, *own, "--port", str(self.port), *options],
            ready=lambda: answers(f"{self.url}/health"),
            log=folder / "wordle.log",
            environment={**inherited, **found, **(environment or {})},
            folder=folder,
            patience=120,
        )
