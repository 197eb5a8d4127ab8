"""Batched sampling with a KV cache: prompts in, token ids, texts and behaviour logprobs out.

The decode loop is written out rather than left to ``generate()`` because three things pay on a few
CPU cores: each distinct prompt is prefilled once and its cache shared by all its samples, finished
rows leave the batch at once, and the logprobs of the sampled tokens fall out of the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

Guard = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    ``token_ids`` ends with the end-of-sequence token if and only if ``finished`` is true.
    ``logprobs`` holds one natural-log probability per token, under the distribution it was drawn
    from (logits / temperature; plain logits when decoding greedily). ``text`` is decoded without
    special tokens.
    """

    prompt_index: int
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finished: bool


@torch.inference_mode()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    n: int = 1,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    guard: Guard = nullcontext,
) -> list[Completion]:
    """Draw ``n`` completions per prompt; return all ``len(prompts) * n``, prompt by prompt.

    Args:
        model: a transformers causal language model in eval mode; its dtype is used as it is.
        tokenizer: its tokenizer, with ``eos_token_id`` set. String prompts are tokenized as they
            stand (no special tokens added, no chat template applied).
        prompts: strings or token id lists, non-empty.
        n: completions per prompt.
        max_tokens: most tokens per completion, the end-of-sequence token included.
        temperature: 0 decodes greedily, anything above samples from softmax(logits / temperature).
        seed: the same seed, prompts and weights give the same draws. The caller's global generator
            is not touched.
        guard: called once; the context it returns is held from the first forward to the last, so
            that a lock shared with whatever updates the weights keeps a batch on one version.

    Raises:
        ValueError: for an empty prompt, or ``n``, ``max_tokens`` or ``temperature`` out of range.
    """
    if n < 1 or max_tokens < 1 or temperature < 0:
        raise ValueError(
            "need n >= 1, max_tokens >= 1 and temperature >= 0; "
            f"got {n}, {max_tokens} and {temperature}"
        )
    encoded = [_encode(tokenizer, prompt) for prompt in prompts]
    if not encoded:
        return []
    if not all(encoded):
        raise ValueError(
            f"prompt {encoded.index([])} has no tokens; give every prompt at least one"
        )
    with guard():
        tokens, logprobs, lengths = _decode(
            model, encoded, n, max_tokens, temperature, seed, int(tokenizer.eos_token_id)
        )
    eos = int(tokenizer.eos_token_id)
    completions = []
    for row, length in enumerate(lengths.tolist()):
        ids = tokens[row, :length].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
        completions.append(
            Completion(row // n, ids, logprobs[row, :length].tolist(), text, ids[-1] == eos)
        )
    return completions


def _encode(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return list(prompt)


def _left_pad(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Right-align the prompts: int64 ids and an int64 0/1 mask, both (prompts, longest)."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    n: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    eos: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and logprobs, (prompts * n, max_tokens), and each row's length in tokens."""
    ids, mask = _left_pad(prompts, eos)
    rows = len(prompts) * n
    # Drawn up front, a row's randomness does not depend on when its neighbours finish.
    uniforms = torch.rand(rows, max_tokens, generator=torch.Generator().manual_seed(seed))
    tokens = torch.full((rows, max_tokens), eos)
    logprobs = torch.zeros(rows, max_tokens)
    lengths = torch.full((rows,), max_tokens)

    # transformers 5 renamed the argument on the way; the older name still works but warns.
    argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
        use_cache=True,
        logits_to_keep=1,
        **{argument: cache},
    )
    cache.batch_repeat_interleave(n)
    logits = out.logits[:, -1].repeat_interleave(n, 0)
    mask = mask.repeat_interleave(n, 0)
    alive = torch.arange(rows)
    for step in range(max_tokens):
        chosen, chosen_logprobs = _choose(logits, uniforms[alive, step], temperature)
        tokens[alive, step] = chosen
        logprobs[alive, step] = chosen_logprobs
        ended = chosen == eos
        lengths[alive[ended]] = step + 1
        if step + 1 == max_tokens or bool(ended.all()):
            break
        if bool(ended.any()):
            keep = (~ended).nonzero()[:, 0]
            cache.batch_select_indices(keep)
            alive, mask, chosen = alive[keep], mask[keep], chosen[keep]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out = model(
            input_ids=chosen[:, None],
            attention_mask=mask,
            position_ids=mask.sum(-1, keepdim=True) - 1,
            use_cache=True,
            **{argument: cache},
        )
        logits = out.logits[:, -1]
    return tokens, logprobs, lengths


def _choose(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Pick one token per row, by inverse transform sampling; greedy at temperature 0."""
    logits = logits.float()
    if temperature == 0:
        logprobs = torch.log_softmax(logits, -1)
        chosen = logits.argmax(-1)
    else:
        logprobs = torch.log_softmax(logits / temperature, -1)
        cdf = logprobs.exp().cumsum(-1)
        # Scaling by the last entry absorbs rounding in the sum; right=True skips tokens of
        # probability zero.
        chosen = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)[:, 0]
        chosen = chosen.clamp_max(logits.shape[-1] - 1)
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]
