"""Seeded requests that vLLM computes in several steps: after an update, or a long prompt."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine_vllm._http import Server, serving
from engine_vllm._runs import Run

PROMPT = "the quick brown fox jumps over the lazy dog. "
STEP = 64  # tokens that the server computes in a step at most


def seeded(server: Server, prompt: str, seed: int, tokens: int = 12) -> list[int]:
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    (choice,) = server.get("/v1/completions", body)["choices"]
    found: list[int] = choice["token_ids"]
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("seeds"), "tied")


@pytest.mark.timeout(600)
def test_seeded_requests_survive_updates_and_draw_what_they_would_in_one_step(
    run: Run, tmp_path: Path
) -> None:
    few = ("--max-num-batched-tokens", str(STEP))
    with serving(run.base, run, *few, mirror=tmp_path / "mirror") as server:
        begun = seeded(server, PROMPT, seed=3)  # its 45 tokens fit into a step
        assert begun == seeded(server, PROMPT, seed=3)
        assert begun != seeded(server, PROMPT, seed=4)
        cut = {seed: seeded(server, PROMPT * 4, seed) for seed in range(3)}  # three steps
        done: list[list[int]] = []

        def in_flight(seed: int) -> None:
            done.append(seeded(server, PROMPT, seed, tokens=150))

        threads = [threading.Thread(target=in_flight, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            server.get("/thinwire/update", {"version": run.step()})
        for thread in threads:
            thread.join()
        assert [len(tokens) for tokens in done] == [150] * 4
        assert server.version() == run.version
    whole = ("--max-num-batched-tokens", "1024", "--no-enable-prefix-caching")
    with serving(run.base, None, *whole) as server:
        assert cut == {seed: seeded(server, PROMPT * 4, seed) for seed in range(3)}
