from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and lose a lot on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from thinwire.demo.models import tiny_checkpoint

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THINWIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return tiny_checkpoint()


@pytest.fixture(scope="session")
def tokenizer(tiny_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_dir)


@pytest.fixture
def serving(tiny_dir: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.bfloat16)
    return model.eval()


@pytest.fixture
def masters(tiny_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
