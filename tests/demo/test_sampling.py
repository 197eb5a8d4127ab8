from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from thinwire.demo.sampling import sample

PROMPTS = ["abcd>", "q>", "the quick brown>"]


def teacher_forced(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> Any:
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def test_greedy_equals_generate(masters: Any, tokenizer: Any) -> None:
    completions = sample(masters, tokenizer, PROMPTS, max_tokens=12, temperature=0)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = masters.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
        )
        assert completion.token_ids == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_a_teacher_forced_forward(
    masters: Any, tokenizer: Any, temperature: float
) -> None:
    completions = sample(
        masters, tokenizer, PROMPTS, n=5, max_tokens=10, temperature=temperature, seed=4
    )
    assert [c.prompt_index for c in completions] == [i for i in range(3) for _ in range(5)]
    assert len({len(c.token_ids) for c in completions}) > 1
    for c in completions:
        prompt = tokenizer(PROMPTS[c.prompt_index])["input_ids"]
        expected = teacher_forced(masters, prompt, c.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_bf16_logprobs_are_close_to_a_teacher_forced_forward(serving: Any, tokenizer: Any) -> None:
    for c in sample(serving, tokenizer, PROMPTS, n=4, max_tokens=8, seed=1):
        expected = teacher_forced(
            serving, tokenizer(PROMPTS[c.prompt_index])["input_ids"], c.token_ids, 1.0
        )
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=0.2, rtol=0)


def test_samples_follow_the_models_distribution(masters: Any, tokenizer: Any) -> None:
    draws = sample(masters, tokenizer, ["abcd>"], n=4000, max_tokens=1, seed=2)
    counts = torch.zeros(masters.config.vocab_size)
    for c in draws:
        counts[c.token_ids[0]] += 1
    ids = tokenizer("abcd>", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = torch.softmax(masters(input_ids=ids).logits[0, -1], -1)
    assert float((counts / 4000 - expected).abs().sum()) < 0.15


def test_a_seed_repeats_and_another_differs(serving: Any, tokenizer: Any) -> None:
    before = torch.random.get_rng_state()
    first = sample(serving, tokenizer, PROMPTS, n=3, max_tokens=6, seed=1)
    assert first == sample(serving, tokenizer, PROMPTS, n=3, max_tokens=6, seed=1)
    assert first != sample(serving, tokenizer, PROMPTS, n=3, max_tokens=6, seed=2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_token_ids_and_strings_are_the_same_prompt(serving: Any, tokenizer: Any) -> None:
    ids = [tokenizer(p)["input_ids"] for p in PROMPTS]
    assert sample(serving, tokenizer, ids, max_tokens=6) == sample(
        serving, tokenizer, PROMPTS, max_tokens=6
    )


def test_finished_rows_end_with_eos_and_text_does_not_show_it(serving: Any, tokenizer: Any) -> None:
    completions = sample(serving, tokenizer, ["abcd>"], n=40, max_tokens=8)
    assert any(c.finished for c in completions)
    for c in completions:
        assert c.finished == (c.token_ids[-1] == tokenizer.eos_token_id)
        assert tokenizer.eos_token_id not in c.token_ids[:-1]
        assert len(c.token_ids) == len(c.logprobs)
        assert c.finished or len(c.token_ids) == 8
        assert tokenizer.eos_token not in c.text


def test_the_guard_is_held_once_around_all_forwards(serving: Any, tokenizer: Any) -> None:
    events: list[str] = []

    @contextmanager
    def guard() -> Iterator[None]:
        events.append("in")
        yield
        events.append("out")

    serving.register_forward_pre_hook(lambda *_: events.append("forward"))
    sample(serving, tokenizer, PROMPTS, max_tokens=3, guard=guard)
    assert (events[0], events[-1]) == ("in", "out")
    assert set(events[1:-1]) == {"forward"}


def test_no_prompts_no_completions(serving: Any, tokenizer: Any) -> None:
    assert sample(serving, tokenizer, [], max_tokens=3) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["a", ""], {"max_tokens": 1}, "prompt 1 has no tokens"),
        (["a"], {"max_tokens": 0}, "max_tokens >= 1"),
        (["a"], {"max_tokens": 1, "n": 0}, "n >= 1"),
        (["a"], {"max_tokens": 1, "temperature": -1.0}, "temperature >= 0"),
    ],
)
def test_bad_calls_are_refused(
    serving: Any, tokenizer: Any, prompts: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample(serving, tokenizer, prompts, **options)
