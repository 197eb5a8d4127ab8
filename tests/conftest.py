"""What every folder of tests may need: modules of tests that are not test files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(path: Path) -> ModuleType:
    """A module by its path: test folders are no packages."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The second implementation of payloads."""
    return load(Path(__file__).parent / "reference_decoder.py")


@pytest.fixture(scope="session")
def spec_folder() -> str:
    """Where the payload format's vectors and what makes them are."""
    return str(Path(__file__).parents[1] / "spec")


@pytest.fixture(scope="session")
def mutations(reference: ModuleType) -> ModuleType:
    """Spoiled payloads, and the two decoders compared on them."""
    return load(Path(__file__).parent / "fuzz" / "mutations.py")
