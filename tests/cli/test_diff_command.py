"""``thinwire diff``: counted in bits and in ULP."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.dtypes import dtype
from thinwire.ulp import ulp_steps


def test_json_and_table(cli, checkpoint) -> None:
    a, b = checkpoint("a"), checkpoint("b", step=3)
    document = cli.json("diff", a, b)
    assert document.keys() == {
        *("elements", "bytes", "changed", "changed_fraction", "one_ulp", "one_ulp_fraction"),
        *("tensors_changed", "tensors"),
    }
    assert (document["elements"], document["changed"], document["one_ulp"]) == (1809, 21, 21)
    assert (document["changed_fraction"], document["one_ulp_fraction"]) == (21 / 1809, 1.0)
    assert document["tensors"] == [
        {
            "name": "model.layers.0.mlp.weight",
            "dtype": "F16",
            "shape": [48, 16],
            "elements": 768,
            "changed": 21,
            "changed_fraction": 21 / 768,
            "one_ulp": 21,
            "one_ulp_fraction": 1.0,
            "largest_step": 1,
        }
    ]
    out = cli("diff", a, b).stdout
    assert "model.layers.0.mlp.weight" in out
    assert "21 of 1,809 elements changed (1.16 %), 100 % of them by ±1 ULP" in out


def test_equal_checkpoints(cli, checkpoint) -> None:
    document = cli.json("diff", checkpoint("a"), checkpoint("b"))
    assert (document["changed"], document["tensors"], document["one_ulp_fraction"]) == (0, [], 0)
    assert cli("diff", checkpoint("c"), checkpoint("d")).stdout.startswith("0 of 1,809")


def test_dtype_compares_as_served(cli, checkpoint) -> None:
    a = {"w": np.full(64, 1.0, "f4")}
    b = {"w": np.full(64, 1.0, "f4")}
    b["w"][:8] += np.float32(1e-6)  # vanishes in bf16
    b["w"][8] += np.float32(0.0079)
    a, b = checkpoint("a", tensors=a), checkpoint("b", tensors=b)
    assert cli.json("diff", a, b)["changed"] == 9
    served = cli.json("diff", a, b, "--dtype", "bf16")
    assert (served["changed"], served["one_ulp"], served["bytes"]) == (1, 1, 128)


def test_top_keeps_totals(cli, checkpoint) -> None:
    a = {"x": np.zeros(10, "f2"), "y": np.zeros(10, "f2")}
    b = {"x": a["x"].copy(), "y": a["y"].copy()}
    b["x"][:1] = 1
    b["y"][:5] = 2
    a, b = checkpoint("a", tensors=a), checkpoint("b", tensors=b)
    document = cli.json("diff", a, b, "--top", 1)
    assert [t["name"] for t in document["tensors"]] == ["y"]
    assert (document["changed"], document["tensors_changed"]) == (6, 2)


def test_other_shapes_are_refused(cli, checkpoint) -> None:
    a, b = checkpoint("a"), checkpoint("b", tensors={"w": np.ones(3, "f2")})
    assert "tensor names changed" in cli.fails("diff", a, b, status=2)


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_a_step_is_the_distance_in_the_order_of_values(name) -> None:
    kind = dtype(name)
    width, half = kind.width, 1 << (kind.width - 1)
    positive = np.arange(0, half, dtype=np.int64)
    # negative numbers in falling magnitude, then the positive ones: ascending values
    ordered = np.concatenate([positive[::-1] + half, positive]).astype(kind.bits)
    steps = ulp_steps(ordered[:-1], ordered[1:], kind)
    assert steps.dtype.itemsize * 8 == width
    assert (np.delete(steps, half - 1) == 1).all()
    assert steps[half - 1] == 1, "from -0 to +0"


@pytest.mark.parametrize("name", ["BF16", "I8", "U8", "F8_E8M0", "F32", "I64"])
def test_steps_add_up_mod_2_to_the_width(name) -> None:
    kind = dtype(name)
    random = np.random.default_rng(0)
    a, b, c = random.integers(0, 256, (3, 500 * kind.itemsize), np.uint8).view(kind.bits)
    one, two, both = ulp_steps(a, b, kind), ulp_steps(b, c, kind), ulp_steps(a, c, kind)
    assert (one + two == both).all()
    assert ((both == 0) == (a == c)).all()
    if not kind.is_float or name == "F8_E8M0":
        assert (a + one.view(kind.bits) == b).all()
