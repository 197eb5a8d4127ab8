"""``python -m thinwire``: the command line, by an interpreter of one's choice."""

from __future__ import annotations

from thinwire.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
