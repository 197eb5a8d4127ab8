"""A patch written through a layout is the patched checkpoint, loaded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines._server import DEVICES, Checkpoint, Server
from thinwire.dtypes import dtype
from thinwire.engines.layout import Layout, learn_layout
from thinwire.engines.regions import Piece, Region
from thinwire.engines.scatter import fill, stage
from thinwire.errors import SchemaMismatch
from thinwire.patch import Patch
from thinwire.schema import TensorSpec


def loaded(state: Checkpoint, rank: int, ranks: int, device: str) -> tuple[Server, Layout]:
    server = Server(rank, ranks, device)
    server.load_weights(state.pairs(device))
    return server, learn_layout(server.load_weights, server, state.schema)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_a_patch_scattered_is_the_patched_state_loaded(
    rank: int, ranks: int, density: float, device: str
) -> None:
    before, other = Checkpoint.random(1), Checkpoint.random(2)
    server, layout = loaded(before, rank, ranks, device)
    patches = before.patches(other, density, seed=3)
    staged = stage(layout, patches)
    expected, _ = loaded(before.patched(patches), rank, ranks, device)
    assert server.bits() == loaded(before, rank, ranks, device)[0].bits()  # nothing written yet
    staged.write()
    assert server.bits() == expected.bits()
    staged.write()  # harmless
    assert server.bits() == expected.bits()


def test_only_what_this_rank_holds_is_counted() -> None:
    state = Checkpoint.random(1)
    patches = state.patches(Checkpoint.random(2), 1.0, seed=0)
    held = [stage(loaded(state, rank, 2, "cpu")[1], patches).elements for rank in (0, 1)]
    replicated = 8 + 3 * 8 + 5 + 1 + 4 + 9 + 16  # norm, router, master, scale and the buffers
    assert sum(held) == sum(spec.numel for spec in state.schema) + replicated


def test_changes_of_one_memory_are_written_at_once() -> None:
    state = Checkpoint.random(1)
    _, layout = loaded(state, 0, 1, "cpu")
    patches = state.patches(Checkpoint.random(2), 1.0, seed=0)
    qkv = [p for p in patches if p.name in ("q", "k", "v")]
    assert len(stage(layout, qkv)._changes) == 1


def test_staging_keeps_nothing_of_the_patch() -> None:
    state = Checkpoint.random(1)
    server, layout = loaded(state, 0, 1, "cpu")
    patches = state.patches(Checkpoint.random(2), 0.5, seed=0)
    after = state.patched(patches)
    staged = stage(layout, patches)
    for patch in patches:
        patch.bits[:] = 0
        patch.positions[:] = 0
    staged.write()
    assert server.bits() == loaded(after, 0, 1, "cpu")[0].bits()


def test_a_tensor_without_a_place_is_refused_only_if_it_changes() -> None:
    state = Checkpoint.random(1)
    _, layout = loaded(state, 0, 1, "cpu")
    layout = Layout({**layout.pieces, "norm": ()}, {"norm": "it goes through cat"})
    ordinal = state.schema.ordinal("norm")
    nothing = Patch(ordinal, state.schema[ordinal], np.empty(0, "<i4"), np.empty(0, "<u2"))
    assert stage(layout, [nothing]).elements == 0
    something = Patch(ordinal, state.schema[ordinal], np.zeros(1, "<i4"), np.zeros(1, "<u2"))
    with pytest.raises(SchemaMismatch, match=r"norm changes.*cat"):
        stage(layout, [something])
    with pytest.raises(SchemaMismatch, match="cat"):
        fill(layout, state.schema[ordinal], state.tensors[ordinal])


def test_positions_beyond_two_billion() -> None:
    region_start = (1 << 31) + 5
    spec = TensorSpec("huge", dtype("U8"), (1 << 32,))
    memory = torch.zeros(8, dtype=torch.uint8)
    piece = Piece(Region(region_start, (8,), (1,)), memory, (), "memory")
    positions = np.array([3, region_start - 1, region_start + 2, region_start + 8], "<i8")
    patch = Patch(0, spec, positions, np.array([1, 2, 3, 4], "u1"))
    stage(Layout({"huge": (piece,)}, {}), [patch]).write()
    assert memory.tolist() == [0, 0, 3, 0, 0, 0, 0, 0]


def test_elements_between_those_of_a_strided_region_are_left_alone() -> None:
    spec = TensorSpec("grid", dtype("U8"), (8, 8, 8))
    memory = torch.zeros(3 * 3 * 3, dtype=torch.uint8)
    # every other element of every other row of every other plane, but for the first ones
    region = Region(73, (3, 3, 3), (128, 16, 2))
    piece = Piece(region, memory.view(3, 3, 3).permute(2, 0, 1), (), "memory")
    positions = np.arange(512, dtype="<i4")
    bits = (np.arange(512) % 251 + 1).astype("u1")
    staged = stage(Layout({"grid": (piece,)}, {}), [Patch(0, spec, positions, bits)])
    assert staged.elements == 27
    staged.write()
    assert torch.equal(piece.target, torch.from_numpy(bits)[region.indices(torch.device("cpu"))])
