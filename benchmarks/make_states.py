"""Consecutive states of real models under a policy-gradient loss, for the codec benchmark.

    python benchmarks/make_states.py OUT [--model smollm2|qwen3] [--lr 1e-6 …] [--steps 20]

writes ``OUT/<model>-lr<lr>/before.safetensors`` and ``after.safetensors``: bf16 casts of the fp32
masters around the last optimizer step, and ``shares.json`` with the changed share of every step.

The text is Jules and Michel Verne's "In the Year 2889" (public domain) as the package
reasoning-gym carries it. Masters start spread evenly inside their bf16 rounding cells: a model
that was just loaded sits exactly on the bf16 grid, which no trainer that has run for a while does.
Advantages are drawn from a normal distribution and normalised over the batch.
"""

from __future__ import annotations

import argparse
import copy
import importlib.resources
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from thinwire.demo.grpo import spread_masters
from thinwire.demo.models import smollm2_checkpoint, tiny_checkpoint

BATCH, LENGTH, WARM_UP = 4, 64, 300


def text() -> str:
    """The training text."""
    data = importlib.resources.files("reasoning_gym") / "data" / "in_the_year_2889.txt"
    return data.read_text()


def smollm2() -> tuple[Any, torch.Tensor]:
    """SmolLM2-135M-Instruct in fp32, and the text in its tokens."""
    folder = smollm2_checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, torch.tensor(AutoTokenizer.from_pretrained(folder)(text())["input_ids"])


def qwen3() -> tuple[Any, torch.Tensor]:
    """A Qwen3-shaped model of 12.6 M parameters, trained on the text's bytes for a moment."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(tiny_checkpoint())(text())["input_ids"])
    config = Qwen3Config(
        vocab_size=int(ids.max()) + 1,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(WARM_UP):
        batch = windows(ids)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, ids


def windows(ids: torch.Tensor) -> torch.Tensor:
    """(BATCH, LENGTH) tokens from random places of the text."""
    starts = torch.randint(0, len(ids) - LENGTH, (BATCH,))
    return torch.stack([ids[s : s + LENGTH] for s in starts])


def policy_gradient_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """One AdamW step on −advantage · log-probability of the text."""
    batch = windows(ids)
    logits = model(input_ids=batch).logits[:, :-1].float()
    logprobs = torch.log_softmax(logits, -1).gather(-1, batch[:, 1:, None])[..., 0]
    advantages = torch.randn(BATCH)
    advantages = (advantages - advantages.mean()) / advantages.std()
    loss = -(advantages[:, None] * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def served(model: Any) -> dict[str, torch.Tensor]:
    """The bf16 cast of every parameter, tied ones once."""
    return {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}


def changed_share(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Share of elements whose bits differ."""
    changed = sum(
        int((before[n].view(torch.int16) != after[n].view(torch.int16)).sum()) for n in before
    )
    return changed / sum(t.numel() for t in before.values())


def make_pairs(out: Path, name: str, rates: list[float], steps: int, seed: int) -> None:
    """One pair of states per learning rate, all from the same start and the same batches."""
    torch.manual_seed(seed)
    model, ids = {"smollm2": smollm2, "qwen3": qwen3}[name]()
    spread_masters(model, seed=seed)
    state = torch.get_rng_state()
    for lr in rates:
        torch.set_rng_state(state)
        make_pair(out / f"{name}-lr{lr:g}", copy.deepcopy(model), ids, lr, steps)


def make_pair(folder: Path, model: Any, ids: torch.Tensor, lr: float, steps: int) -> None:
    """Train and write one pair of states."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.0)
    shares, before, after = [], {}, served(model)
    for step in range(steps):
        policy_gradient_step(model, optimizer, ids)
        before, after = after, served(model)
        shares.append(changed_share(before, after))
        print(f"{folder.name} step {step}: {100 * shares[-1]:.3f} % changed", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(before, folder / "before.safetensors")
    save_file(after, folder / "after.safetensors")
    (folder / "shares.json").write_text(json.dumps(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=["smollm2", "qwen3"], action="append")
    parser.add_argument("--lr", type=float, action="append")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.model or ["smollm2", "qwen3"]:
        rates = options.lr or [1e-6, 3e-6, 1e-5, 1e-4]
        make_pairs(options.out, name, rates, options.steps, options.seed)


if __name__ == "__main__":
    main()
