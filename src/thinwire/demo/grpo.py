"""Group relative policy optimisation (GRPO, arXiv:2402.03300) on plain torch.

The policy that sampled is the bf16 model on the rollout servers; the one that learns is a set of
fp32 masters. Samples may also be a few versions old. Both gaps go through the importance ratio
against the logprobs that came with the samples, clipped as in PPO. There is no reference model and
no KL term.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class GrpoConfig:
    """Optimiser and loss settings; ``lr`` is in weight units per step, as AdamW takes it."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    temperature: float = 1.0
    groups_per_pass: int = 4
    autocast: bool = False


@dataclass(frozen=True)
class Group:
    """The n samples of one prompt.

    ``behaviour_logprobs`` has one natural-log probability per completion token, under the policy
    (and temperature) that drew it; ``rewards`` has one number per completion.
    """

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]
    behaviour_logprobs: Sequence[Sequence[float]]
    rewards: Sequence[float]


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did.

    ``reward_mean`` is over all groups; ``ratio_mean``, ``clipped_share`` (ratios outside the clip
    range) and ``tokens`` are over the completion tokens of the ``groups_used``.
    """

    loss: float
    reward_mean: float
    grad_norm: float
    ratio_mean: float
    clipped_share: float
    groups_used: int
    tokens: int


def group_advantages(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """Normalise rewards (groups, n) per group: less its mean, over its population deviation.

    A group whose rewards are all equal gets zeros: it says nothing about which sample was better.
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + eps)


def policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, one entry per token; all inputs are 1-D and equally long.

    Returns ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprobs -
    behaviour_logprobs)``, and ``r`` detached.
    """
    ratio = torch.exp(logprobs - behaviour_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages), ratio.detach()


def completion_logprobs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    temperature: float = 1.0,
) -> Tensor:
    """Teacher-forced logprobs of all completion tokens, in order: 1-D, fp32, differentiable.

    Each row of the batch holds one prompt followed by all its completions, kept apart by the
    attention mask and by positions that restart after the prompt. So a prompt is computed once for
    its whole group, and the vocabulary projection runs at completion positions only.
    """
    rows = [_pack(prompt, group) for prompt, group in zip(prompts, completions, strict=True)]
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    # Padding attends to itself, since a softmax over nothing is NaN; nothing attends to padding.
    mask = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
    for index, row in enumerate(rows):
        length = len(row.ids)
        ids[index, :length] = row.ids
        positions[index, :length] = row.positions
        mask[index, :length, :length] = row.mask
    # Additive, since not every attention implementation takes a boolean mask of this shape.
    bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[:, None]
    hidden = model.base_model(
        input_ids=ids, attention_mask=bias, position_ids=positions, use_cache=False
    ).last_hidden_state
    sources = torch.cat([row.sources + index * width for index, row in enumerate(rows)])
    targets = torch.cat([row.targets for row in rows])
    logits = model.get_output_embeddings()(hidden.flatten(0, 1)[sources]).float() / temperature
    logprobs: Tensor = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    return logprobs


@dataclass(frozen=True)
class _Row:
    ids: Tensor
    positions: Tensor
    mask: Tensor  # (length, length), true where the row's query may look at the column's key
    sources: Tensor  # where the hidden state that predicts each completion token lies
    targets: Tensor


def _pack(prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> _Row:
    if not prompt or not all(completions):
        raise ValueError("prompts and completions need at least one token each")
    start = len(prompt)
    segments = [torch.zeros(start, dtype=torch.int64)]
    positions = [torch.arange(start)]
    sources = []
    end = start
    for number, completion in enumerate(completions, 1):
        size = len(completion)
        segments.append(torch.full((size,), number))
        positions.append(torch.arange(start, start + size))
        source = torch.arange(end - 1, end - 1 + size)
        source[0] = start - 1
        sources.append(source)
        end += size
    targets = torch.tensor([token for completion in completions for token in completion])
    segment = torch.cat(segments)
    same = segment[:, None] == segment[None, :]
    mask = torch.ones(end, end, dtype=torch.bool).tril() & (same | (segment == 0)[None, :])
    return _Row(
        torch.cat([torch.tensor(prompt), targets]),
        torch.cat(positions),
        mask,
        torch.cat(sources),
        targets,
    )


def spread_masters(model: nn.Module, seed: int = 0) -> None:
    """Move fp32 weights off the bf16 grid, in place, each to a random spot in its rounding cell.

    A checkpoint published in bf16 puts every master exactly on the grid, half a cell away from
    changing. A run that has been going for a while has masters all over the cell, which is what
    decides how many bf16 weights change per step. Every weight still rounds to the bf16 value it
    had.

    Raises:
        TypeError: if a parameter is not fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise TypeError(f"{name} is {parameter.dtype}; load the masters as float32")
            base = parameter.bfloat16()
            # Half the distance to the neighbour in the randomly chosen direction, times a uniform
            # draw.
            draw = torch.rand(parameter.shape, generator=generator) * 2 - 1
            away = torch.where(draw > 0, torch.inf, -torch.inf).bfloat16()
            half_step = (torch.nextafter(base, away).float() - base.float()) / 2
            moved = base.float() + half_step * draw.abs()
            # By bits, since a zero that changed its sign would still compare equal.
            same = moved.bfloat16().view(torch.int16) == base.view(torch.int16)
            parameter.copy_(torch.where(same, moved, parameter))


def bf16_is_faster(rounds: int = 20) -> bool:
    """Whether this machine multiplies bf16 matrices faster than fp32 ones: timed, in milliseconds.

    CPUs with bf16 instructions are several times faster; on others bf16 is emulated and slower.
    """

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        a @ b
        start = time.perf_counter()
        for _ in range(rounds):
            a @ b
        return time.perf_counter() - start

    return seconds(torch.bfloat16) < seconds(torch.float32)


class GrpoTrainer:
    """fp32 masters, AdamW and one call per optimizer step.

    The model is updated in place; cast it to the serving dtype after :meth:`step` to publish it.
    """

    def __init__(self, model: Any, config: GrpoConfig) -> None:
        self.model = model
        self.config = config
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, groups: Sequence[Group]) -> StepStats:
        """Take one optimizer step on the groups, which all hold the same number of completions.

        Groups whose rewards are all equal carry no gradient and are left out of the passes. If
        none is left, the weights and the optimizer state stay as they are.

        Raises:
            ValueError: for an empty list, groups of unequal size, or lists in a group that do not
                line up.
        """
        _check(groups)
        rewards = torch.tensor([list(group.rewards) for group in groups], dtype=torch.float32)
        advantages = group_advantages(rewards)
        used = [
            (group, row)
            for group, row in zip(groups, advantages, strict=True)
            if bool((row != 0).any())
        ]
        total = sum(len(c) for group, _ in used for c in group.completions)
        loss = ratio_sum = clipped = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        size = self.config.groups_per_pass
        for start in range(0, len(used), size):
            losses, ratios = self._losses(used[start : start + size])
            part = losses.sum() / total
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            ratio_sum += float(ratios.sum())
            outside = (ratios < 1 - self.config.clip_low) | (ratios > 1 + self.config.clip_high)
            clipped += float(outside.sum())
        grad_norm = 0.0
        if used:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
            grad_norm = float(norm)
            self._optimizer.step()
        return StepStats(
            loss=loss,
            reward_mean=float(rewards.mean()),
            grad_norm=grad_norm,
            ratio_mean=ratio_sum / total if total else 1.0,
            clipped_share=clipped / total if total else 0.0,
            groups_used=len(used),
            tokens=total,
        )

    def _losses(self, part: Sequence[tuple[Group, Tensor]]) -> tuple[Tensor, Tensor]:
        config = self.config
        with torch.autocast("cpu", torch.bfloat16, enabled=config.autocast):
            logprobs = completion_logprobs(
                self.model,
                [group.prompt_ids for group, _ in part],
                [group.completions for group, _ in part],
                config.temperature,
            )
        behaviour = torch.tensor([x for g, _ in part for c in g.behaviour_logprobs for x in c])
        lengths = torch.tensor([len(c) for group, _ in part for c in group.completions])
        advantages = torch.cat([row for _, row in part]).repeat_interleave(lengths)
        return policy_loss(logprobs, behaviour, advantages, config.clip_low, config.clip_high)


def _check(groups: Sequence[Group]) -> None:
    if not groups:
        raise ValueError("a step needs at least one group")
    n = len(groups[0].completions)
    for index, group in enumerate(groups):
        if not len(group.completions) == len(group.rewards) == len(group.behaviour_logprobs) == n:
            raise ValueError(
                f"group {index} does not hold {n} completions, logprob lists and rewards"
            )
        for tokens, logprobs in zip(group.completions, group.behaviour_logprobs, strict=True):
            if len(tokens) != len(logprobs):
                raise ValueError(
                    f"group {index}: {len(tokens)} tokens but {len(logprobs)} logprobs"
                )
