"""A short run of the fuzzer, always with the same seeds: ``make fuzz`` runs it for longer."""

from __future__ import annotations

import random
import time
from types import ModuleType

import pytest

ROUNDS = 3000


@pytest.mark.parametrize("start", [0, 1])
def test_both_decoders_agree_on_spoiled_payloads(mutations: ModuleType, start: int) -> None:
    rng = random.Random(start)
    seeds = mutations.seeds(largest=9000)
    seen = set()
    slowest = 0.0
    for _ in range(ROUNDS):
        seed = rng.choice(seeds)
        before = dict(seed.base)
        file = mutations.mutate(rng, seed)
        began = time.process_time()
        outcome = mutations.agree(file, seed)
        slowest = max(slowest, time.process_time() - began)
        assert seed.base == before
        seen.add(outcome if isinstance(outcome, str) else "changes")
    assert seen == {"corrupt", "unsupported", "changes"}
    assert slowest < 30  # compiling included
