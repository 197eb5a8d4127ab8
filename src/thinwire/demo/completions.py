"""The completions API on the wire: checking requests, shaping answers. No sockets, no model.

A subset of OpenAI's ``POST /v1/completions``, with three additions that a trainer needs: prompts
may be token ids, choices carry ``token_ids`` and one logprob per token, and every answer says which
weight version it was started and ended with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class ApiError(Exception):
    """A refusal: HTTP status, a short code, and a message for the caller."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"code": self.code, "message": str(self), "status": self.status}}


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. ``context`` and ``vocabulary`` are the model's."""

    body_bytes: int = 1 << 20
    prompts: int = 64
    sequences: int = 512
    max_tokens: int = 256
    waiting: int = 8
    context: int = 2048
    vocabulary: int = 1 << 31


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request; ``prompts`` are token ids."""

    prompts: list[list[int]]
    n: int
    max_tokens: int
    temperature: float
    seed: int
    logprobs: bool


class Sampled(Protocol):
    """What answering needs of a completion."""

    @property
    def prompt_index(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def text(self) -> str: ...
    @property
    def finished(self) -> bool: ...


_FIELDS = {
    "prompt", "n", "max_tokens", "temperature", "seed", "logprobs", "model", "stream", "user",
}  # fmt: skip


def parse_request(
    body: bytes, limits: Limits, encode: Callable[[str], list[int]]
) -> CompletionRequest:
    """Check a request.

    Args:
        encode: a prompt's text to token ids.

    Raises:
        ApiError: 400, naming the field; 413 for more than the limits allow.
    """
    data = _object(body)
    if unknown := sorted(set(data) - _FIELDS):
        raise _bad(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    if data.get("stream"):
        raise _bad("stream: streaming is not supported")
    n = _integer(data, "n", 1, 1, limits.sequences)
    max_tokens = _integer(data, "max_tokens", min(16, limits.max_tokens), 1, limits.max_tokens)
    temperature = data.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise _bad("temperature: must be a number")
    if not 0 <= temperature <= 10:  # NaN is not, either
        raise _bad("temperature: must be between 0 and 10")
    seed = _integer(data, "seed", 0, 0, 2**63 - 1)
    logprobs = data.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, (bool, int)):
        raise _bad("logprobs: must be true, false, or null")
    texts = _prompts(data, limits)
    if len(texts) * n > limits.sequences:
        raise _large(f"{len(texts)} prompts x n={n} are more than {limits.sequences} sequences")
    prompts = [_tokens(index, text, limits, encode) for index, text in enumerate(texts)]
    longest = max(map(len, prompts))
    if longest + max_tokens > limits.context:
        raise _large(
            f"a prompt of {longest} tokens and max_tokens={max_tokens} exceed the context of "
            f"{limits.context} tokens"
        )
    return CompletionRequest(prompts, n, max_tokens, float(temperature), seed, bool(logprobs))


def completion_body(
    request: CompletionRequest,
    completions: Sequence[Sampled],
    *,
    model: str,
    identifier: str,
    created: int,
    started: int,
    ended: int,
) -> dict[str, Any]:
    """The JSON of an answer; choices are ordered prompt by prompt, ``n`` for each."""
    version = {"started": started, "ended": ended}
    prompt_tokens = sum(map(len, request.prompts))
    completion_tokens = sum(len(c.token_ids) for c in completions)
    return {
        "id": identifier,
        "object": "text_completion",
        "created": created,
        "model": model,
        "weight_version": version,
        "choices": [
            {
                "index": index,
                "prompt_index": c.prompt_index,
                "text": c.text,
                "token_ids": c.token_ids,
                "logprobs": {"token_logprobs": c.logprobs} if request.logprobs else None,
                "finish_reason": "stop" if c.finished else "length",
                "weight_version": version,
            }
            for index, c in enumerate(completions)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not JSON") from None
    if not isinstance(data, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return data


def _integer(data: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(f"{name}: must be an integer")
    if not low <= value <= high:
        raise _bad(f"{name}: must be between {low} and {high}")
    return value


def _prompts(data: dict[str, Any], limits: Limits) -> list[Any]:
    """The prompts, one per item: from ``"a"``, ``["a", "b"]``, ``[1, 2]`` or ``[[1], [2, 3]]``."""
    prompt = data.get("prompt")
    if isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
    ):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad("prompt: must be a string, token ids, or a non-empty list of either")
    if len(prompt) > limits.prompts:
        raise _large(f"{len(prompt)} prompts are more than {limits.prompts}")
    return prompt


def _tokens(
    index: int, prompt: Any, limits: Limits, encode: Callable[[str], list[int]]
) -> list[int]:
    if isinstance(prompt, str):
        prompt = encode(prompt)
    elif not isinstance(prompt, list):
        raise _bad(f"prompt: item {index} is neither a string nor a list of token ids")
    if not prompt:
        raise _bad(f"prompt: item {index} has no tokens")
    if any(type(token) is not int or not 0 <= token < limits.vocabulary for token in prompt):
        raise _bad(f"prompt: item {index} holds something that is no token id of this model")
    return list(prompt)


def _bad(message: str) -> ApiError:
    return ApiError(400, "invalid_request", message)


def _large(message: str) -> ApiError:
    return ApiError(413, "too_large", message)
