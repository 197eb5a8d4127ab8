"""A loader that was only watched tells where every element goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from engines._server import DEVICES, SHAPES, Checkpoint, Server
from thinwire.engines.layout import Layout, learn_layout
from thinwire.engines.regions import Piece, Region
from thinwire.engines.scatter import fill
from thinwire.schema import Schema, TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]


def learned(server: Server) -> Layout:
    return learn_layout(server.load_weights, server, Checkpoint.random(0).schema)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_filling_through_the_layout_is_loading(rank: int, ranks: int, device: str) -> None:
    loaded, filled = Server(rank, ranks, device), Server(rank, ranks, device)
    state = Checkpoint.random(1)
    layout = learned(filled)
    assert layout.problems == {}
    loaded.load_weights(state.pairs(device))
    for spec, bits in zip(state.schema, state.tensors):
        fill(layout, spec, bits)
    assert filled.bits() == loaded.bits()


@pytest.mark.parametrize("device", DEVICES)
def test_watching_changes_nothing(device: str) -> None:
    server = Server(device=device)
    server.load_weights(Checkpoint.random(1).pairs(device))
    before, tensors = server.bits(), dict(server.named_parameters())
    learned(server)
    assert server.bits() == before
    assert all(a is b for a, b in zip(tensors.values(), server.parameters()))


def test_one_pass_over_all_names() -> None:
    server = Server()
    learned(server)
    assert server.loads == len(SHAPES)


def test_pieces_are_as_few_and_as_plain_as_can_be() -> None:
    layout = learned(Server(1, 2))
    (q,) = layout.pieces["q"]
    assert q.region == Region(6 * 8, (48,), (1,))
    assert q.home == "qkv"
    (embed,) = layout.pieces["embed"]
    assert embed.region == Region(64, (16,), (1,))  # two rows of eight are left for rank 1
    (down,) = layout.pieces["down"]
    assert (down.region, down.target.stride()) == (Region(3, (8, 3), (6, 1)), (3, 1))
    (turned,) = layout.pieces["conv1d"]
    assert (turned.region, turned.target.stride()) == (Region(3, (8, 3), (6, 1)), (1, 8))
    assert layout.pieces["empty"] == ()
    assert layout.pieces["master"][0].casts == (torch.bfloat16,)
    assert layout.pieces["router"][0].casts == (torch.float32,)


class Odd(torch.nn.Module):
    """One parameter, loaded in a way that a test chooses."""

    def __init__(self, how: Callable[[Odd, torch.Tensor], object], *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape or (4, 6)), requires_grad=False)
        self.plain = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.how = how

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "plain":
                self.plain.data.copy_(tensor)
            else:
                self.how(self, tensor)


def odd_layout(module: Odd) -> Layout:
    shapes = {"weight": ("F32", (4, 6)), "plain": ("F32", (3,))}
    return learn_layout(module.load_weights, module, Checkpoint.random(0, shapes).schema)


def replace(module: Odd, tensor: torch.Tensor) -> None:
    module.weight = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    module.weight.data.copy_(tensor)


def write_and_replace(module: Odd, tensor: torch.Tensor) -> None:
    module.weight.data.copy_(tensor)
    module.weight.data = torch.ones(4, 6)


def through_a_copy(module: Odd, tensor: torch.Tensor) -> None:
    staging = torch.empty(4, 6)
    staging.copy_(tensor)
    module.weight.data.copy_(staging)


def zeroed(module: Odd, tensor: torch.Tensor) -> None:
    tensor[0].fill_(0)
    module.weight.data.copy_(tensor)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (lambda m, t: m.weight.data.copy_(t + 1), "add"),
        (lambda m, t: m.weight.data.copy_(torch.cat([t[2:], t[:2]])), "cat"),
        (lambda m, t: m.weight.data.add_(t), "add_"),
        (lambda m, t: m.weight.data.index_put_((torch.arange(4),), t), "index_put_"),
        (lambda m, t: m.weight.data.copy_(t[torch.tensor([3, 1, 0, 2])]), "index"),
        (lambda m, t: m.weight.data.fill_(t.sum().item()), "failed"),
        (lambda m, t: m.plain.data.copy_(t), "failed"),
        (lambda m, t: setattr(m.weight, "data", t), "failed"),
        (lambda m, t: m.weight.data.copy_(t.as_strided((4, 6), (1, 2))), "overlapping"),
        (replace, "keeps none|replaces"),
        (write_and_replace, "replaces weight"),
        (through_a_copy, "copy_"),
        (zeroed, "fill_"),
    ],
)
def test_what_cannot_be_followed_is_a_problem_of_that_tensor_alone(
    how: Callable[[Odd, torch.Tensor], object], why: str
) -> None:
    module = Odd(how)
    layout = odd_layout(module)
    assert layout.pieces["weight"] == ()
    if "keeps none" not in why:
        assert why in layout.problems["weight"]
    (plain,) = layout.pieces["plain"]
    assert plain.target.data_ptr() == module.plain.data_ptr()
    assert not module.weight.any()
    assert not module.plain.any()


def test_copies_are_pieces_of_their_own() -> None:
    def twice(module: Odd, tensor: torch.Tensor) -> None:
        module.weight.data.view(2, 4, 6).copy_(tensor.unsqueeze(0).expand(2, 4, 6))

    layout = odd_layout(Odd(twice, 8, 6))
    assert [p.region for p in layout.pieces["weight"]] == [Region(0, (24,), (1,))] * 2
    assert [p.target.storage_offset() for p in layout.pieces["weight"]] == [0, 24]


def test_a_cast_on_the_way_and_one_at_the_end() -> None:
    def rounded(module: Odd, tensor: torch.Tensor) -> None:
        module.weight.data.copy_(tensor.to(torch.bfloat16)[1:].float().to(torch.bfloat16))

    layout = odd_layout(Odd(rounded, 3, 6))
    (piece,) = layout.pieces["weight"]
    assert piece.casts == (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
    assert piece.region == Region(6, (18,), (1,))


def test_memory_that_was_exchanged_later_is_noticed() -> None:
    server = Server()
    layout = learned(server)
    assert layout.moved(server) == set()
    server.norm.data = server.norm.data.clone()
    server.qkv = torch.nn.Parameter(server.qkv.data.clone(), requires_grad=False)
    assert layout.moved(server) == {"norm", "qkv"}


def test_a_rank_without_a_layer_has_no_pieces_and_no_problem() -> None:
    module = Odd(lambda m, t: None)
    layout = odd_layout(module)
    assert (layout.pieces["weight"], layout.problems) == ((), {})


def test_splitting_keeps_every_element_in_its_place() -> None:
    memory = torch.arange(4 * 5 * 6).view(4, 5, 6)
    schema = Schema((TensorSpec("t", Checkpoint.random(0).schema[0].dtype, (6, 5, 4)),))
    assert len(schema) == 1
    region = Region(7, (6, 5, 4), (40, 8, 2))
    piece = Piece(region, memory.permute(2, 1, 0), (), "t")
    for limit in (1, 3, 7, 20, 50, 1000):
        found = {}
        for part in piece.split(limit):
            assert part.region.numel <= limit
            indices = part.region.indices(torch.device("cpu")).flatten().tolist()
            found.update(zip(indices, part.target.flatten().tolist()))
        want = zip(
            region.indices(torch.device("cpu")).flatten().tolist(), piece.target.flatten().tolist()
        )
        assert found == dict(want)


def test_tensors_that_share_memory_are_not_written_to() -> None:
    server = Server()
    server.head = server.embed  # tied by the engine, apart in the checkpoint
    layout = learned(server)
    assert layout.problems == {"embed": "embed is head as well", "head": "embed is embed as well"}
    assert layout.pieces["embed"] == layout.pieces["head"] == ()


def test_rows_of_one_between_rows_of_another_are_apart() -> None:
    class Interleaved(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = torch.nn.Parameter(torch.zeros(8, 6), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                self.both.data[int(name == "weight") :: 2].copy_(tensor)

    shapes = {"weight": ("F32", (4, 6)), "plain": ("F32", (4, 6))}
    module = Interleaved()
    layout = learn_layout(module.load_weights, module, Checkpoint.random(0, shapes).schema)
    assert layout.problems == {}
    assert [p.target.stride() for p in layout.pieces["weight"]] == [(12, 1)]
