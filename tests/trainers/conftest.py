"""Tests of trainers need transformers; those marked ``trl`` need TRL too (`make test-trl`)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
