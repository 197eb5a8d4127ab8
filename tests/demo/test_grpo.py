from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from thinwire.demo.grpo import (
    Group,
    GrpoConfig,
    GrpoTrainer,
    bf16_is_faster,
    completion_logprobs,
    group_advantages,
    policy_loss,
    spread_masters,
)
from thinwire.demo.sampling import sample
from thinwire.demo.tasks import LetterReversal

PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]]
COMPLETIONS = [[[1, 2, 3], [4]], [[5, 6], [7, 8]], [[9], [1, 2, 3, 4, 5]]]


def test_advantages_by_hand() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.2, 0.2, 0.2, 0.2]]), eps=0)
    assert advantages[0].tolist() == [1, -1, -1, 1]
    zeros = group_advantages(torch.tensor([[0.2, 0.2, 0.2]]))
    assert zeros.abs().max() < 1e-3


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.2),
        (1.5, -1.0, 1.5),
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.9),
    ],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, expected: float) -> None:
    losses, ratios = policy_loss(
        torch.tensor([math.log(ratio) - 3.0]),
        torch.tensor([-3.0]),
        torch.tensor([advantage]),
        clip_low=0.1,
        clip_high=0.2,
    )
    assert losses.item() == pytest.approx(expected)
    assert ratios.item() == pytest.approx(ratio)


def plain_logprobs(model: Any, temperature: float) -> Any:
    parts = []
    for prompt, group in zip(PROMPTS, COMPLETIONS, strict=True):
        for tokens in group:
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0] / temperature
            logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
            parts.append(logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_equal_plain_ones(masters: Any, temperature: float, attention: str) -> None:
    masters.set_attn_implementation(attention)
    with torch.no_grad():
        packed = completion_logprobs(masters, PROMPTS, COMPLETIONS, temperature)
        torch.testing.assert_close(packed, plain_logprobs(masters, temperature))


@pytest.mark.parametrize(("prompt", "completion"), [([], [1]), ([1], [])])
def test_empty_sequences_are_refused(
    masters: Any, prompt: list[int], completion: list[int]
) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        completion_logprobs(masters, [prompt], [[completion]])


def groups() -> list[Group]:
    behaviour = [[[-0.5 * token for token in c] for c in group] for group in COMPLETIONS]
    rewards = [[1.0, 0.0], [0.5, 0.5], [0.0, 0.25]]
    return [Group(*parts) for parts in zip(PROMPTS, COMPLETIONS, behaviour, rewards, strict=True)]


def test_a_step_is_adamw_on_the_plain_loss(masters: Any) -> None:
    config = GrpoConfig(lr=1e-3, max_grad_norm=1e9, groups_per_pass=1)
    logprobs = plain_logprobs(masters, 1.0)
    behaviour = torch.tensor([x for g in groups() for c in g.behaviour_logprobs for x in c])
    # The second group's rewards are equal, so its four tokens count for nothing.
    advantages = torch.tensor([1.0] * 3 + [-1.0] + [0.0] * 4 + [-1.0] + [1.0] * 5)
    advantages *= 0.5 / (0.5 + 1e-4)
    advantages[8:] *= 0.125 / (0.125 + 1e-4) / (0.5 / (0.5 + 1e-4))
    losses, _ = policy_loss(logprobs, behaviour, advantages, 0.2, 0.2)
    loss = losses.sum() / 10
    grads = torch.autograd.grad(loss, list(masters.parameters()))
    before = [p.detach().clone() for p in masters.parameters()]

    stats = GrpoTrainer(masters, config).step(groups())

    assert stats.loss == pytest.approx(loss.item(), abs=1e-5)
    assert (stats.groups_used, stats.tokens) == (2, 10)
    assert stats.reward_mean == pytest.approx(2.25 / 6)
    norm = torch.cat([g.flatten() for g in grads]).norm().item()
    assert stats.grad_norm == pytest.approx(norm, rel=1e-3)
    # AdamW's first step moves a weight by lr * g / (|g| + 1e-8).
    for old, new, grad in zip(before, masters.parameters(), grads, strict=True):
        clear = grad.abs() > 1e-4 * norm
        expected = old - 1e-3 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(new.detach()[clear], expected[clear], atol=2e-6, rtol=1e-5)


def test_passes_of_any_size_give_the_same_step(masters: Any) -> None:
    start = {k: v.clone() for k, v in masters.state_dict().items()}
    results = []
    for size in (1, 4):
        masters.load_state_dict(start)
        results.append(GrpoTrainer(masters, GrpoConfig(groups_per_pass=size)).step(groups()))
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-4)


def test_equal_rewards_leave_everything_as_it_was(masters: Any) -> None:
    trainer = GrpoTrainer(masters, GrpoConfig(lr=1.0))
    before = [p.detach().clone() for p in masters.parameters()]
    stats = trainer.step([replace(group, rewards=[0.1, 0.1]) for group in groups()])
    assert (stats.groups_used, stats.grad_norm, stats.tokens) == (0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, masters.parameters(), strict=True))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "at least one group"),
        ([replace(groups()[0], rewards=[1.0])], "group 0 does not hold 2"),
        ([replace(groups()[0], behaviour_logprobs=[[-1.0], [-1.0]])], "3 tokens but 1 logprobs"),
    ],
)
def test_broken_groups_are_refused(masters: Any, broken: list[Group], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrpoTrainer(masters, GrpoConfig()).step(broken)


def test_spreading_keeps_every_bf16_bit_and_fills_the_cells(masters: Any) -> None:
    with torch.no_grad():
        next(masters.parameters())[0, :4] = torch.tensor([0.0, -0.0, 1.0, -2.0])
    base = [p.detach().bfloat16() for p in masters.parameters()]
    spread_masters(masters, seed=1)
    for parameter, old in zip(masters.parameters(), base, strict=True):
        now = parameter.detach().bfloat16()
        assert torch.equal(now.view(torch.int16), old.view(torch.int16))
    weight = masters.model.layers[0].mlp.up_proj.weight.detach()
    cell = weight.bfloat16()
    up = torch.nextafter(cell, torch.full_like(cell, torch.inf)).float() - cell.float()
    place = ((weight - cell.float()) / up)[cell.float().abs() > 1e-3]
    assert float(place.std()) == pytest.approx(1 / math.sqrt(12), rel=0.05)
    assert abs(float(place.mean())) < 0.02


def test_spreading_wants_fp32(serving: Any) -> None:
    with pytest.raises(TypeError, match="float32"):
        spread_masters(serving)


def test_the_timing_probe_answers() -> None:
    assert bf16_is_faster(rounds=1) in (True, False)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_tiny_model_learns_with_samples_from_its_bf16_copy(
    masters: Any, serving: Any, tokenizer: Any, autocast: bool
) -> None:
    task = LetterReversal()
    spread_masters(masters)
    trainer = GrpoTrainer(masters, GrpoConfig(lr=1e-3, autocast=autocast))
    problems = task.problems(12 * 16, seed=11)
    rewards = []
    for step in range(12):
        asked = problems[16 * step : 16 * (step + 1)]
        drawn = sample(serving, tokenizer, [p.prompt for p in asked], n=8, max_tokens=6, seed=step)
        batch = []
        for index, problem in enumerate(asked):
            mine = drawn[8 * index : 8 * (index + 1)]
            batch.append(
                Group(
                    tokenizer(problem.prompt)["input_ids"],
                    [c.token_ids for c in mine],
                    [c.logprobs for c in mine],
                    [task.reward(problem, c.text) for c in mine],
                )
            )
        stats = trainer.step(batch)
        assert stats.ratio_mean == pytest.approx(1, abs=0.1)
        rewards.append(stats.reward_mean)
        with torch.no_grad():
            for serve, master in zip(serving.parameters(), masters.parameters(), strict=True):
                serve.copy_(master)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.1
