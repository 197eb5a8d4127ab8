"""A small Qwen3 that knows how to call the tool, and nothing yet of playing well.

It is trained from nothing on made-up games, many of whose guesses are no words at all. The rest is
for reinforcement learning.
The checkpoint is in fp32: masters that lie off the bf16 grid, as those of any training run do.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema

from wordle.made_up import games
from wordle.player import WordlePlayer
from wordle.recipe import TOP_P, Model
from wordle.run_folder import locked, replace_text
from wordle.words import some_answers

__all__ = ["warm_up"]

_CHUNK = 50
_PLAYED = 32
_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip


class NotLearned(Exception):
    """The model still fails to call the tool after the longest warm-up."""


def warm_up(
    folder: Path, recipe: Model, words: Sequence[str], say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train the model and save it, in fp32 with its tokenizer; once per recipe, by one process.

    Args:
        folder: made; if it holds the finished model already, nothing is done.
        words: five letters each, that the games are played with.
        say: told how it goes.

    Returns:
        ``steps``, ``seconds``, ``loss``, ``valid_calls`` (0 to 1), ``parameters`` and
        ``serving_bytes``, of all of them in bf16; also in the folder's ``warmup.json``.

    Raises:
        NotLearned: the model does not emit valid tool calls after ``most_steps``.
    """
    done = folder / "warmup.json"
    with locked(folder, wait=True):
        if not done.is_file():
            figures = _warmed_up(folder, recipe, words, say)
            replace_text(done, json.dumps(figures) + "\n")  # last: the model is whole now
    found: dict[str, Any] = json.loads(done.read_text())
    return found


def _warmed_up(
    folder: Path, recipe: Model, words: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    began = time.monotonic()
    torch.manual_seed(recipe.seed)
    drawn = random.Random(recipe.seed)
    tokenizer = _tokenizer(recipe, words)
    model = _model(recipe, tokenizer)
    batches = _batches(recipe, words, tokenizer, drawn)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, weight_decay=0.0)
    steps, valid, loss = 0, 0.0, float("nan")
    while steps < recipe.most_steps and not (valid == 1.0 and steps >= recipe.least_steps):
        for _ in range(_CHUNK):
            loss = _step(model, optimizer, next(batches), _rate(recipe, steps))
            steps += 1
        if steps >= recipe.least_steps:
            valid = valid_calls(model, tokenizer, words)
        say(f"warm-up: step {steps}, loss {loss:.3f}, valid tool calls {100 * valid:.0f} %")
    if valid < 1.0:
        raise NotLearned(f"{100 * valid:.0f} % of the games are valid after {steps} steps")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    served = folder / "served"  # what servers load before there is a version
    model.to(torch.bfloat16).save_pretrained(served)
    tokenizer.save_pretrained(served)
    return {
        "steps": steps,
        "seconds": time.monotonic() - began,
        "loss": loss,
        "valid_calls": valid,
        "parameters": sum(p.numel() for p in model.parameters()),
        "serving_bytes": sum(2 * p.numel() for p in model.parameters()),
    }


# --- model and tokenizer -------------------------------------------------------------------


def _schema() -> list[dict[str, Any]]:
    return [get_json_schema(WordlePlayer.guess)]


def _template(name: str) -> str:
    return (Path(trl.__file__).parent / "chat_templates" / name).read_text()


def _tokenizer(recipe: Model, words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level, so that nothing is unknown, and short where the games are alike."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    template = _template("qwen3.jinja")  # one that TRL knows how to parse
    plain = PreTrainedTokenizerFast(tokenizer_object=inner)
    drawn = random.Random(recipe.seed)
    texts = [
        plain.apply_chat_template(game, tools=_schema(), tokenize=False, chat_template=template)
        for game, _ in zip(games(words, recipe.nonsense, drawn), range(300))
    ]
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=recipe.vocabulary,
            special_tokens=_SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=1024,
    )
    tokenizer.chat_template = template
    return tokenizer


def _model(recipe: Model, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    heads = recipe.hidden // 32
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=recipe.hidden,
        intermediate_size=3 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


# --- learning ------------------------------------------------------------------------------


def _batches(
    recipe: Model, words: Sequence[str], tokenizer: PreTrainedTokenizerFast, drawn: random.Random
) -> Iterator[dict[str, torch.Tensor]]:
    """Games as token ids, and as labels only what the player says."""
    template, schema = _template("qwen3_training.jinja"), _schema()
    played = games(words, recipe.nonsense, drawn)
    while True:
        rows = [
            tokenizer.apply_chat_template(
                next(played),
                tools=schema,
                chat_template=template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            for _ in range(recipe.games)
        ]
        length = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), length), tokenizer.pad_token_id)
        labels = torch.full((len(rows), length), -100)
        for k, row in enumerate(rows):
            own = torch.tensor(row["input_ids"])
            said = torch.tensor(row["assistant_masks"], dtype=torch.bool)
            ids[k, : len(own)] = own
            labels[k, : len(own)][said] = own[said]
        yield {"input_ids": ids, "labels": labels}


def _rate(recipe: Model, step: int) -> float:
    """Up in 20 steps, then down to a thirtieth at the least number of steps."""
    rest = max(0.03, 1.0 - 0.97 * step / recipe.least_steps)
    return recipe.lr * min(1.0, (step + 1) / 20) * rest


def _step(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    rate: float,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


@torch.no_grad()
def valid_calls(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, words: Sequence[str]
) -> float:
    """Share of sampled first turns and second turns that are one tool call and nothing else."""
    drawn = random.Random(1)
    starts = []
    for game, _ in zip(games(words, 0.0, drawn), range(_PLAYED)):
        starts.append(game[:1] if drawn.random() < 0.5 or len(game) < 5 else game[:3])
    good = 0
    for start in starts:
        ids = tokenizer.apply_chat_template(
            start,
            tools=_schema(),
            chat_template=_template("qwen3_training.jinja"),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        made = model.generate(**ids, max_new_tokens=48, do_sample=True, top_p=TOP_P)
        good += _is_call(tokenizer.decode(made[0][ids["input_ids"].shape[1] :]))
    return good / len(starts)


def _is_call(text: str) -> bool:
    _, opened, rest = text.partition("<tool_call>\n")
    body, closed, end = rest.partition("\n</tool_call>")
    if not opened or not closed or end != "<|im_end|>":
        return False
    try:
        call = json.loads(body)
    except ValueError:
        return False
    said = call.get("arguments") if isinstance(call, dict) and call.get("name") == "guess" else None
    return isinstance(said, dict) and [*said] == ["word"] and isinstance(said["word"], str)


def main() -> None:
    """Warm a model up: ``python -m wordle.warmup FOLDER RECIPE``, the recipe's model as JSON."""
    folder, recipe = Path(sys.argv[1]), Model(**json.loads(sys.argv[2]))
    figures = warm_up(folder, recipe, some_answers(recipe.words))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
