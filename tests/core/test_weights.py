from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.dtypes import DTYPES
from thinwire.errors import Misuse, SchemaMismatch, UnsupportedDtype
from thinwire.schema import TensorSpec
from thinwire.weights import FlatTensor, Tensor, Weights, named_tensors

F32, BF16 = DTYPES["F32"], DTYPES["BF16"]


class Net(nn.Module):
    """Two layers whose second shares the first's weight if ``tied``, and buffers of both kinds."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def described(weights: Weights) -> list[str]:
    return [str(spec) for spec in weights.schema]


NET = ["first.weight: F32 [3, 3]", "scale: I64 [2]", "second.weight: F32 [3, 3]"]


def forms(model: nn.Module) -> dict[str, Any]:
    def generated() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.state_dict().items()

    return {
        "module": model,
        "state dict": model.state_dict(),
        "pairs": list(model.state_dict().items()),
        "generator": generated(),
        "lists": [list(pair) for pair in model.state_dict().items()],
        "tensors": named_tensors_as_pairs(model),
    }


def named_tensors_as_pairs(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, tensor.value) for name, tensor in named_tensors(model).items()]


@pytest.mark.parametrize("form", ["module", "state dict", "pairs", "generator", "lists", "tensors"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_kind_of_source(form: str, tied: bool) -> None:
    weights = Weights.of(forms(Net(tied=tied))[form])
    assert described(weights) == (NET[:2] if tied else NET)
    assert weights.schema.aliases == ({"second.weight": "first.weight"} if tied else {})
    assert Weights.matching(forms(Net(tied=tied))[form], weights.schema).schema == weights.schema


def test_weights_are_seen_in_place() -> None:
    model = Net()
    flat = Weights.of(model).tensors[0].flat()
    with torch.no_grad():
        model.first.weight[0, 1] = 5.0
    assert flat.view(np.float32)[1] == 5.0


class DistributedDataParallel(nn.Module):
    """Wraps as torch's own does, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def prefixed(prefix: str) -> Callable[[nn.Module], Any]:
    return lambda model: {prefix + name: value for name, value in model.state_dict().items()}


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled ddp": lambda m: torch.compile(DistributedDataParallel(m)),
    "ddp of compiled": lambda m: DistributedDataParallel(torch.compile(m)),  # type: ignore[arg-type]
    "ddp state": prefixed("module."),
    "compiled state": prefixed("_orig_mod."),
    "compiled ddp state": prefixed("_orig_mod.module."),
    "ddp of compiled state": prefixed("module._orig_mod."),
    "fsdp state": prefixed("_fsdp_wrapped_module."),
}


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_wrappers_leave_no_trace_in_names(wrapper: str) -> None:
    weights = Weights.of(WRAPPERS[wrapper](Net(tied=True)))
    assert described(weights) == NET[:2]
    assert weights.schema.aliases == {"second.weight": "first.weight"}


def test_wrappers_inside_the_model() -> None:
    model = Net()
    model.first = torch.compile(model.first)  # type: ignore[assignment]
    assert described(Weights.of(model)) == NET
    names = ["a._fsdp_wrapped_module._checkpoint_wrapped_module.b._orig_mod.w"]
    assert list(named_tensors({name: torch.ones(1) for name in names})) == ["a.b.w"]


def test_names_that_only_look_like_wrappers_are_kept() -> None:
    names = ["my_orig_mod.w", "module.w", "modules.w", "a.module.w", "x._orig_mod"]
    assert list(named_tensors({name: torch.ones(1) for name in names})) == names


def test_ties_are_storage_not_values() -> None:
    base = torch.arange(9.0).reshape(3, 3)
    source = {
        "a": base,
        "b": base.clone(),  # equal, not one
        "c": base.t(),  # one storage, another tensor
        "d": base.view(3, 3),  # the same tensor again
        "e": base[:2],
        "f": base.view(9),
        "g": base.view(torch.int32),
        "h": torch.empty(0),
        "i": torch.empty(0),
    }
    source["j"] = source["h"]
    weights = Weights.of(source)
    assert weights.schema.aliases == {"d": "a"}
    assert len(weights.schema) == 9


def test_ties_of_arrays_and_flat_tensors() -> None:
    array = np.arange(6, dtype=np.uint16)
    flat = FlatTensor(array, BF16, (2, 3))
    assert Weights.of({"a": array, "b": array[:], "c": array[::-1]}).schema.aliases == {"b": "a"}
    assert Weights.of({"a": flat, "b": FlatTensor(array, BF16, (2, 3))}).schema.aliases == {
        "b": "a"
    }


def test_the_run_decides_which_name_of_a_tie_is_stored() -> None:
    tensor = torch.ones(3)
    schema = Weights.of([("z", tensor), ("a", tensor)]).schema
    assert schema.aliases == {"a": "z"}
    assert Weights.matching([("a", tensor), ("z", tensor)], schema).schema.aliases == {"a": "z"}


def test_serving_dtype_for_all_wide_floats() -> None:
    source = {
        "wide": torch.ones(2),
        "half": torch.ones(2, dtype=torch.float16),
        "same": torch.ones(2, dtype=torch.bfloat16),
        "count": torch.ones(2, dtype=torch.int64),
    }
    kept = ["count: I64 [2]", "half: F16 [2]", "same: BF16 [2]"]
    spellings: list[Any] = ["bfloat16", "BF16", torch.bfloat16, BF16]
    for spelling in spellings:
        assert described(Weights.of(source, dtype=spelling)) == [*kept, "wide: BF16 [2]"]
    half: Any = np.float16
    assert described(Weights.of(source, dtype=half)) == [*kept, "wide: F16 [2]"]
    assert described(Weights.of(source)) == [*kept, "wide: F32 [2]"]


def test_serving_dtype_per_tensor() -> None:
    source = {"norm": torch.ones(2), "up": torch.ones(2, 2)}
    expected = ["norm: F32 [2]", "up: BF16 [2, 2]"]

    def choose(spec: TensorSpec) -> object:
        return torch.bfloat16 if len(spec.shape) == 2 else None

    assert described(Weights.of(source, dtype=choose)) == expected
    assert described(Weights.of(source, dtype={"up": "bf16"})) == expected
    assert described(Weights.of(source, dtype={"up": torch.bfloat16, "norm": "F32"})) == expected


@pytest.mark.parametrize(
    "wanted", ["bf17", {"up": "bf17"}, {"up": "I32"}, lambda spec: "F64", {"up": "F8_E4M3"}]
)
def test_serving_dtypes_that_no_cast_leads_to(wanted: Any) -> None:
    with pytest.raises(UnsupportedDtype):
        Weights.of({"up": torch.ones(2, 2)}, dtype=wanted)


class Elsewhere(torch.Tensor):
    """Holds its elements in another tensor, as DTensor and quantised tensors do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "cannot take weights out of a NoneType"),
        (7, "cannot take weights out of a int"),
        ("model/", "cannot take weights out of a str"),
        (b"model", "cannot take weights out of a bytes"),
        ([torch.ones(1)], "not a .name, tensor. pair"),
        ([("a", torch.ones(1), 0)], "not a .name, tensor. pair"),
        ([(1, torch.ones(1))], "not a .name, tensor. pair"),
        ({"a": 1.0}, "'a' is a float, not a tensor"),
        ({"a": None}, "'a' is a NoneType, not a tensor"),
        ({"a": np.float32(1)}, "'a' is a float32, not a tensor"),
        ({"a": [1.0, 2.0]}, "'a' is a list, not a tensor"),
        ({"a": torch.ones(2, device="meta")}, "'a' is on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, "'a' is a sparse tensor"),
        ({"a": Elsewhere(torch.ones(2))}, "'a' is a Elsewhere, which holds its elements in other"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "two tensors are named 'a'"),
        ({"a.w": torch.ones(1), "a._orig_mod.w": torch.ones(1)}, "two tensors are named 'a.w'"),
        ({"": torch.ones(1)}, "non-empty string"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "unknown dtype torch.complex64"),
        ({"a": np.array(["x"])}, "unknown dtype str32"),
        ({"a": np.array([None])}, "unknown dtype object"),
    ],
)
def test_what_is_not_weights(source: Any, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        Weights.of(source)


def test_extra_state_is_not_a_tensor_and_left_out() -> None:
    source = {"a": torch.ones(1), "b._extra_state": {"any": "thing"}, "c._extra_state": b""}
    assert described(Weights.of(source)) == ["a: F32 [1]"]


def test_no_weights_at_all() -> None:
    assert len(Weights.of({}).schema) == 0


BASE = torch.ones(2, 3)
RUN = Weights.of({"a": BASE, "b": torch.ones(3), "c": BASE}, dtype="BF16").schema


def test_matching_casts_to_the_run() -> None:
    for masters in (torch.float32, torch.bfloat16):
        a = torch.ones(2, 3, dtype=masters)
        weights = Weights.matching({"a": a, "b": torch.ones(3), "c": a}, RUN)
        assert weights.schema is RUN
        assert weights.tensors[0].value is a


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"a": BASE, "c": BASE}, "names changed: missing b"),
        ({"a": BASE, "b": torch.ones(3), "c": BASE, "d": BASE[0]}, "names changed: unexpected d"),
        ({"a": BASE, "b": torch.ones(4), "c": BASE}, r"b: BF16 \[3\]  became  BF16 \[4\]"),
        ({"a": BASE.view(3, 2), "b": torch.ones(3), "c": BASE.view(3, 2)}, r"BF16 \[3, 2\]"),
        ({"a": BASE, "b": torch.ones(3).half(), "c": BASE}, r"b: BF16 \[3\]  became  F16"),
        ({"a": BASE, "b": torch.ones(3), "c": BASE.clone()}, "tied weights changed: c"),
        ({"a": BASE, "b": torch.ones(3)}, "tied weights changed: c"),
        ({"a": BASE, "b": BASE, "c": BASE}, "tied weights changed: b"),
        ({"a": BASE, "b": torch.ones(3), "c": BASE, "d": BASE}, "tied weights changed: d"),
    ],
)
def test_matching_refuses_what_changed(source: Any, message: str) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        Weights.matching(source, RUN)


def test_pieces_cover_a_tensor_in_order() -> None:
    base = torch.arange(120, dtype=torch.int32).reshape(2, 3, 20)
    for value in (base, base.permute(2, 0, 1), base[:, :, ::2], base.expand(2, 3, 20)):
        tensor, expected = Tensor(value), value.flatten().tolist()
        for limit in (1, 7, 19, 60, 1000):
            pieces = list(tensor.pieces(limit))
            starts = [start for start, _ in pieces]
            ends = [start + piece.size for start, piece in pieces]
            assert [0, *ends] == [*starts, len(expected)]
            assert max(piece.size for _, piece in pieces) <= limit
            assert np.concatenate([piece for _, piece in pieces]).tolist() == expected
    assert list(Tensor(torch.empty(3, 0).t()).pieces()) == []


def test_a_serving_dtype_for_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(Misuse, match=r"layer\.wieght"):
        Weights.of({"layer.weight": torch.zeros(2)}, dtype={"layer.wieght": "bf16"})


def test_memory_that_was_released_is_no_weights() -> None:
    """As sharding frameworks do between uses: such tensors would all be tied at address 0."""
    first, second = torch.ones(10), torch.ones(10)
    for tensor in (first, second):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(Misuse, match="released"):
        Weights.of({"first": first, "second": second})
    assert len(Weights.of({"first": torch.ones(0)}).schema) == 1


def test_a_lazily_negated_view_is_another_tensor() -> None:
    x = torch.arange(1.0, 5.0)
    weights = Weights.of({"x": x, "y": torch._neg_view(x)})
    assert not weights.schema.aliases
    assert weights.tensors[1].flat().view("f4").tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_a_serving_dtype_that_no_tensor_can_have_is_refused() -> None:
    with pytest.raises(UnsupportedDtype, match="F16"):
        Weights.of({"w": torch.zeros(2, dtype=torch.bfloat16)}, dtype="fp16")
    kept = Weights.of(
        {"w": torch.zeros(2), "steps": torch.zeros(2, dtype=torch.int64)}, dtype="bf16"
    )
    assert [spec.dtype.name for spec in kept.schema] == ["I64", "BF16"]
