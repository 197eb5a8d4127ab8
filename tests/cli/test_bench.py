"""``thinwire bench diff --quick``: the report's shape, not its figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.cli.bench_state import QUICK, QWEN3_06B, changes, make_weights
from thinwire.ulp import ulp_steps


def test_json(cli) -> None:
    document = cli.json("bench", "diff", "--quick", "--repeat", 1)
    assert 19e6 < document["parameters"] < 21e6
    assert document["bytes"] == 2 * document["parameters"]
    assert document["changed"] == pytest.approx(0.01 * document["parameters"], rel=0.02)
    assert (document["threads"], document["repeat"], document["density"]) == (2, 1, 0.01)
    steps = ("copy", "diff", "digest", "apply", "encode")
    for step in steps:
        assert document[step].keys() == {"seconds", "gb_per_s", "ratio", "target"}
        assert document[step]["seconds"] > 0
    assert document["copy"]["ratio"] == 1
    assert [document[step]["target"] for step in steps] == [None, 2.0, 4.0, None, None]
    assert isinstance(document["targets_met"], bool)
    memory = document["memory"]
    if not Path("/proc/self/clear_refs").exists():
        assert memory is None
        return
    assert memory.keys() == {
        *("baseline_bytes", "delta_bytes", "payload_bytes", "peak_extra_bytes", "ratio", "target"),
    }
    assert memory["baseline_bytes"] == document["bytes"]
    assert memory["delta_bytes"] == 6 * document["changed"]
    assert 0 < memory["payload_bytes"] < memory["delta_bytes"]  # published coded, not raw
    # not a timing: what a publish holds depends on the code alone, give or take the allocator
    assert 0.95 < memory["ratio"] < 1.25


def test_text(cli) -> None:
    out = cli("bench", "diff", "--quick", "--repeat", 1, "--density", 0.001).stdout
    for what in ("copy of the checkpoint", "diff and copy-out", "≤ 2.0", "≤ 4.0", "peak extra"):
        assert what in out


def test_the_shapes_are_those_of_qwen3_06b() -> None:
    schema = QWEN3_06B.schema()
    assert schema.numel == 596_049_920
    assert len(schema) == 310
    shapes = {spec.name: spec.shape for spec in schema}
    assert shapes["model.embed_tokens.weight"] == (151_936, 1024)
    assert shapes["model.layers.27.self_attn.q_proj.weight"] == (2048, 1024)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (128,)


def test_changes_are_sparse_small_steps_at_random_positions() -> None:
    schema = QUICK.schema()
    tensors = make_weights(schema)
    patches = changes(schema, tensors, 0.01)
    for patch in patches:
        assert patch.check() is patch
        old = tensors[patch.ordinal][patch.positions]
        steps = np.abs(ulp_steps(old, patch.bits, patch.spec.dtype))
        assert steps.min() >= 1
        assert steps.max() <= 3
    assert sum(map(len, patches)) == pytest.approx(0.01 * schema.numel, rel=0.02)
    assert changes(schema, tensors, 0.0) == []
