"""Names must be those that ``save_pretrained`` writes, or the model must be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.core_model_loading import (  # noqa: E402
    WeightRenaming,
    revert_weight_conversion,
)

from thinwire.checkpoint import Checkpoint  # noqa: E402
from thinwire.diff import copy_out, diff  # noqa: E402
from thinwire.errors import Misuse  # noqa: E402
from thinwire.weights import Weights  # noqa: E402

TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def llama(*, tied: bool) -> Any:
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def qwen3(*, tied: bool) -> Any:
    config = transformers.Qwen3Config(**TINY, tie_word_embeddings=tied)
    return transformers.Qwen3ForCausalLM(config)


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **TINY, moe_intermediate_size=8, num_experts=3, num_experts_per_tok=1
    )
    return transformers.Qwen3MoeForCausalLM(config)


def saved(model: Any, folder: Path) -> Checkpoint:
    model.save_pretrained(folder)
    return Checkpoint.open(folder)


def require_same_tensors(weights: Weights, checkpoint: Checkpoint) -> None:
    assert weights.schema.tensors == checkpoint.schema().tensors
    mapped = checkpoint.map()
    assert diff([mapped[spec.name] for spec in weights.schema], weights) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("build", [llama, qwen3])
def test_dense_models(build: Callable[..., Any], tied: bool, tmp_path: Path) -> None:
    model = build(tied=tied)
    weights = Weights.of(model)
    require_same_tensors(weights, saved(model, tmp_path))
    assert weights.schema.aliases == (
        {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert Weights.matching(loaded, weights.schema).schema.aliases == weights.schema.aliases
    assert Weights.of(torch.compile(model)).schema == weights.schema


def test_a_tie_whose_source_comes_second(tmp_path: Path) -> None:
    """What the checkpoint keeps is said by the model, not by the order of its modules."""
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    weights = Weights.of(model)
    require_same_tensors(weights, saved(model, tmp_path))
    assert set(weights.schema.aliases.values()) == {"shared.weight"}


def test_the_expanded_ties_of_a_model_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(tied=True)
    tied = {"model.embed_tokens.weight": "lm_head.weight"}
    monkeypatch.setattr(model, "all_tied_weights_keys", tied)
    for source in (model, torch.compile(model), torch.nn.DataParallel(model)):
        assert Weights.of(source).schema.aliases == tied


def test_renamed_tensors_go_under_the_checkpoints_names(tmp_path: Path) -> None:
    model = llama(tied=True)
    model._weight_conversions = [WeightRenaming("embedding", "embed_tokens")]
    weights = Weights.of(model)
    require_same_tensors(weights, saved(model, tmp_path))
    assert weights.schema.aliases == {"lm_head.weight": "model.embedding.weight"}


def test_the_preferred_name_of_a_tie_is_renamed_too(tmp_path: Path) -> None:
    model = llama(tied=True)
    tied = {"model.embed_tokens.weight": "lm_head.weight"}
    model._tied_weights_keys = model.all_tied_weights_keys = tied
    model._weight_conversions = [WeightRenaming("unembedding", "lm_head")]
    weights = Weights.of(model)
    require_same_tensors(weights, saved(model, tmp_path))
    assert weights.schema.aliases == {"model.embed_tokens.weight": "unembedding.weight"}


def test_fused_experts_are_refused(tmp_path: Path) -> None:
    model = qwen3_moe()
    for source in (model, torch.compile(model), torch.nn.DataParallel(model)):
        with pytest.raises(Misuse, match=r"checkpoint of Qwen3MoeForCausalLM .*experts") as caught:
            Weights.of(source)
        assert "revert_weight_conversion" in caught.value.hint
    # what the hint says works, and is what the checkpoint holds
    weights = Weights.of(revert_weight_conversion(model, model.state_dict()))
    assert "model.layers.1.mlp.experts.2.gate_proj.weight" in weights.schema
    require_same_tensors(weights, saved(model, tmp_path))


def test_masters_are_served_as_transformers_would_cast_them(tmp_path: Path) -> None:
    model = llama(tied=True)
    weights = Weights.of(model, dtype="bfloat16")
    served = copy_out(weights)
    saved(model.to(torch.bfloat16), tmp_path)
    mapped = Checkpoint.open(tmp_path).map()
    for spec, bits in zip(weights.schema, served):
        assert bits.tolist() == mapped[spec.name].tolist()
