"""Tiny checkpoints of real architectures, and training steps that change a few weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_QWEN: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


def make(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of random weights; return its tensors."""
    torch.manual_seed(0)
    if kind == "gpt2":
        model: Any = GPT2LMHeadModel(
            GPT2Config(vocab_size=258, n_positions=256, n_embd=128, n_layer=2, n_head=4)
        )
    elif kind == "moe":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **_QWEN,
                moe_intermediate_size=64,
                num_experts=4,
                num_experts_per_tok=2,
                tie_word_embeddings=False,
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_QWEN, tie_word_embeddings=kind == "tied"))
    with torch.no_grad():
        for parameter in model.parameters():
            # large enough that what is generated depends on the weights; nowhere constant
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def copy(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Copy a checkpoint; return its tensors."""
    shutil.copytree(source, folder)
    return load_file(folder / "model.safetensors")


def step(state: dict[str, torch.Tensor], seed: int, density: float = 0.05) -> None:
    """Change some elements of every tensor."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        mask = torch.rand(tensor.shape, generator=generator) < density
        noise = torch.randn(int(mask.sum()), generator=generator) * 0.1
        tensor[mask] += noise.to(tensor.dtype)


def _tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bare,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=256,
    )
