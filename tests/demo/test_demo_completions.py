from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from thinwire.demo.completions import ApiError, Limits, completion_body, parse_request

LIMITS = Limits(prompts=3, sequences=8, max_tokens=10, context=20, vocabulary=100)


def encode(text: str) -> list[int]:
    return [ord(char) % 100 for char in text]


def parse(**fields: Any) -> Any:
    return parse_request(json.dumps(fields).encode(), LIMITS, encode)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], [[97], [3]]),
    ],
)
def test_prompts_in_every_form(prompt: Any, tokens: list[list[int]]) -> None:
    assert parse(prompt=prompt).prompts == tokens


def test_defaults() -> None:
    request = parse_request(b'{"prompt": "a", "max_tokens": 4}', LIMITS, encode)
    assert (request.n, request.temperature, request.seed, request.logprobs) == (1, 1.0, 0, False)


@pytest.mark.parametrize("logprobs", [True, 0, 1, None])
def test_logprobs_may_be_a_flag_or_a_count(logprobs: Any) -> None:
    assert parse(prompt="a", max_tokens=4, logprobs=logprobs).logprobs is bool(logprobs)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [100]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 1.5}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": 9}, "n"),
        ({"prompt": "a", "max_tokens": 11}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": 10**400}, "temperature"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "logprobs": "yes"}, "logprobs"),
        ({"prompt": "a", "top_p": 0.5}, "top_p"),
        ({"prompt": "a", "stream": True}, "stream"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        parse(**{"max_tokens": 4, **fields})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 4},
        {"prompt": ["a"] * 3, "n": 3},
        {"prompt": "a" * 17},
    ],
)
def test_too_much_is_413(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**{"max_tokens": 4, **fields})
    assert caught.value.status == 413


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body, LIMITS, encode)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@dataclass(frozen=True)
class Sampled:
    prompt_index: int
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finished: bool


def test_the_answer_says_which_version_wrote_every_choice() -> None:
    request = parse(prompt=["a", "bc"], n=1, max_tokens=4, logprobs=True)
    body = completion_body(
        request,
        [Sampled(0, [1, 2], [-0.5, -1.0], "x", True), Sampled(1, [3], [-2.0], "y", False)],
        model="m",
        identifier="cmpl-1",
        created=5,
        started=3,
        ended=3,
    )
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length"]
    assert [c["logprobs"] for c in body["choices"]] == [
        {"token_logprobs": [-0.5, -1.0]},
        {"token_logprobs": [-2.0]},
    ]
    assert all(c["weight_version"] == {"started": 3, "ended": 3} for c in body["choices"])
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
