"""What an engine holds adds up to the state it should hold, or is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engines._server import DEVICES, Checkpoint, Server
from thinwire.digest import ZERO, TensorDigest, digest_tensor, digest_tensors
from thinwire.engines import attest as module
from thinwire.engines.attest import attest, digest_at, read_layout, sum_readings
from thinwire.engines.layout import Layout, learn_layout


def loaded(state: Checkpoint, rank: int = 0, ranks: int = 1, device: str = "cpu") -> Server:
    server = Server(rank, ranks, device)
    server.load_weights(state.pairs(device))
    return server


def layout_of(server: Server, state: Checkpoint) -> Layout:
    return learn_layout(server.load_weights, server, state.schema)


def wrong(server: Server, state: Checkpoint, layout: Layout | None = None) -> dict[str, str]:
    layout = layout or layout_of(server, state)
    verdicts = attest(
        layout, state.schema, digest_tensors(state.tensors), state.tensors.__getitem__
    )
    return {name: verdict.reason for name, verdict in verdicts.items() if not verdict.exact}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["u1", "<u2", "<u4", "<u8"])
def test_the_digest_in_torch_is_the_digest(kind: str, device: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, np.iinfo(kind).max, 1000, dtype=kind, endpoint=True)
    bits[:3] = 0, np.iinfo(kind).max, 1 << (8 * bits.itemsize - 1)
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1"))
    for start in (0, 7, (1 << 40) + 1):
        index = torch.arange(start, start + 1000, device=device)
        assert digest_at(index, signed.to(device)) == digest_tensor(bits, start=start)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    assert digest_at(nothing, nothing) == ZERO


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_what_was_loaded_is_exact(rank: int, ranks: int, device: str) -> None:
    state = Checkpoint.random(1)
    assert wrong(loaded(state, rank, ranks, device), state) == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_wrong_bit_anywhere_is_found(ranks: int) -> None:
    state = Checkpoint.random(1)
    for spec, bits in zip(state.schema, state.tensors):
        for place in range(0, spec.numel, max(1, spec.numel // 3)):
            spoiled = Checkpoint(state.schema, [b.copy() for b in state.tensors])
            # the sign or, for booleans, the only bit: a cast keeps it
            top = 0 if spec.dtype.name == "BOOL" else bits.itemsize * 8 - 1
            target = spoiled.tensors[state.schema.ordinal(spec.name)]
            target[place] ^= target.dtype.type(1 << top)
            found: set[str] = set()
            for rank in range(ranks):
                found |= wrong(loaded(spoiled, rank, ranks), state).keys()
            assert found == {spec.name}


def swap_rows(server: Server) -> None:
    server.qkv.data[:2] = server.qkv.data[:2].flip(0)


def turn(server: Server) -> None:
    server.w2.data[0] = server.w2.data[0].clone().reshape(6, 8).t()


def quantise(server: Server) -> None:
    server.down.data.copy_(server.down.data.nan_to_num(0).clamp(-1, 1).round())


@pytest.mark.parametrize(
    ("spoil", "name"), [(swap_rows, "q"), (turn, "experts.0.down"), (quantise, "down")]
)
def test_packing_behind_the_loaders_back_is_found(
    spoil: Callable[[Server], None], name: str
) -> None:
    state = Checkpoint.random(1)
    server = loaded(state)
    spoil(server)
    assert wrong(server, state).keys() == {name}


def test_problems_and_missing_tensors_are_no_exact_ones() -> None:
    state = Checkpoint.random(1)
    server = loaded(state)
    layout = layout_of(server, state)
    layout = Layout({**layout.pieces, "norm": (), "bias": ()}, {"norm": "it goes through cat"})
    assert wrong(server, state, layout) == {
        "norm": "it goes through cat",
        "bias": "the loader keeps none of it",
    }


def test_copies_that_differ_contradict_each_other() -> None:
    state = Checkpoint.random(1)
    server = loaded(state)
    layout = layout_of(server, state)
    (embed,), (head,) = layout.pieces["embed"], layout.pieces["head"]
    layout = Layout({**layout.pieces, "embed": (embed, head)}, {})
    assert "differ" in wrong(server, state, layout)["embed"]
    server.head.data.copy_(server.embed.data)
    assert "embed" not in wrong(server, state, layout)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_add_up_to_the_whole(ranks: int) -> None:
    state = Checkpoint.random(1)
    readings = []
    for rank in range(ranks):
        layout = layout_of(loaded(state, rank, ranks), state)
        readings.append({spec.name: read_layout(layout, spec)[0] for spec in state.schema})
    want = dict(zip((s.name for s in state.schema), digest_tensors(state.tensors)))
    cast = {"master", "router"}
    for name, elements, digest in sum_readings(readings):
        spec = state.schema[state.schema.ordinal(name)]
        if name not in cast and spec.numel:
            assert (elements, digest) == (spec.numel, want[name])


def test_ranks_that_disagree_match_nothing() -> None:
    state, other = Checkpoint.random(1), Checkpoint.random(2)
    spec = state.schema[state.schema.ordinal("norm")]
    readings = [
        {"norm": read_layout(layout_of(loaded(s, rank, 2), s), spec)[0]}
        for rank, s in enumerate((state, other))
    ]
    ((_, elements, digest),) = sum_readings(readings)
    assert elements == spec.numel
    assert digest not in (
        digest_tensor(s.tensors[s.schema.ordinal("norm")]) for s in (state, other)
    )


@pytest.mark.parametrize("limit", [5, 64, 1 << 18])
def test_chunks_do_not_matter(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Checkpoint.random(1)
    monkeypatch.setattr(module, "_CPU_CHUNK", limit)
    monkeypatch.setattr(module, "_LONG_RUN", 1 << 40)
    assert wrong(loaded(state, 1, 2), state) == {}


def test_short_and_long_runs_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Checkpoint.random(1)
    server = loaded(state, 1, 2)
    layout = layout_of(server, state)
    spec = state.schema[state.schema.ordinal("down")]
    found: set[TensorDigest] = set()
    for long in (1, 1 << 40):
        monkeypatch.setattr(module, "_LONG_RUN", long)
        found |= {reading.digest for reading in read_layout(layout, spec)[0]}
    assert len(found) == 1
