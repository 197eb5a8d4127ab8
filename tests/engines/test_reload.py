"""What cannot be written in place is reloaded, after a trial; what fails the trial is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines._baking import Baking, Reloads
from engines._run import Run
from engines._server import Checkpoint, Server
from engines.test_session import Ring, on_all
from thinwire.digest import digest_tensors
from thinwire.engines.attest import attest
from thinwire.engines.layout import learn_layout
from thinwire.engines.memory import fingerprint, kept_beside
from thinwire.engines.plan import by_pattern
from thinwire.engines.readings import add_up
from thinwire.engines.reload import spoilt, weights
from thinwire.engines.session import Session
from thinwire.engines.vllm.settings import one_of
from thinwire.errors import DigestMismatch, EnginePoisoned, Misuse, SchemaMismatch

UNPROVEN = {"down", "experts.0.down", "experts.1.down"}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.publisher.close()


def baked(state: Checkpoint, rank: int = 0, ranks: int = 1, **how: bool) -> Baking:
    """What a fresh engine holds."""
    server = Baking(rank, ranks)
    server.load_weights(state.pairs())
    server.bake(**how)
    return server


def opened(run: Run, wrong: str = "", **options: Any) -> tuple[Session, Baking, Reloads]:
    server = baked(run.states[0], see=wrong != "hides")
    reloads = Reloads(server, wrong)
    session = Session(server, server.load_weights, run.host(), reloader=reloads, **options)
    return session, server, reloads


def same(server: Baking, state: Checkpoint, rank: int = 0, ranks: int = 1) -> bool:
    return fingerprint(server) == fingerprint(baked(state, rank, ranks))


def test_versions_are_reloaded_where_they_have_to_be(run: Run) -> None:
    run.step()
    session, server, reloads = opened(run)
    session.start(run.base)
    assert reloads.loads == 3  # two of them tried the loader
    assert same(server, run.states[1])
    assert session.weights.plan.refused == {}
    # the norm is doubled beside it, and whose weights went into that cannot be known: all follow
    assert session.weights.plan.reloaded.keys() == {spec.name for spec in run.state.schema}
    for version in (2, 3):
        run.step()
        session.stage(version)
        assert same(server, run.states[version - 1])
        session.apply(version)
        assert same(server, run.states[version])
        found = add_up([session.read()])
        assert (found["differs"], found["not_compared"]) == ([], sorted(UNPROVEN))
        assert found["reloaded"] == len(session.weights.plan.reloaded)
    session.close()


def test_what_a_reload_does_not_concern_is_written_in_place(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Baking, "bake", without_product(Baking.bake))
    session, server, reloads = opened(run)
    session.start(run.base)
    # "bias" is a neighbour of the quantised matrix, and may be part of what is made of it
    assert session.weights.plan.reloaded.keys() == {*UNPROVEN, "bias"}
    assert session.status()["reloaded"] == {"down": 1, "experts.*.down": 2, "bias": 1}
    before = reloads.loads
    patches = run.state.patches(Checkpoint.random(7), 0.2, seed=7)
    keep = session.weights.plan.reloaded
    run.states.append(run.state.patched([p for p in patches if p.name not in keep]))
    run.publisher.publish(run.source, step=1).result()
    session.stage(1)
    session.apply(1)
    assert reloads.loads == before
    assert same(server, run.states[1])
    run.step()
    session.stage(2)
    session.apply(2)
    assert reloads.loads == before + 1
    assert same(server, run.states[2])
    session.close()


def without_product(bake: Any) -> Any:
    def without(server: Baking, **how: bool) -> None:
        bake(server, **how)
        server.attention.doubled = None

    return without


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("forgets", r"again does not make experts\.w2 what it was"),
        ("stale", r"norm: attention\.doubled, kept .* is not renewed by reloading"),
        ("keeps", "is not seen in memory"),
        ("exchanges", "exchanges the memory of"),
        ("hides", r"loaded into mlp\.weight is not seen in memory"),
        ("fails", "loader failed: RuntimeError: device lost"),
    ],
)
def test_a_loader_that_does_not_pass_the_trial_is_not_used(
    run: Run, wrong: str, reason: str
) -> None:
    session, _, reloads = opened(run, wrong)
    with pytest.raises(SchemaMismatch, match=reason) as caught:
        session.start(run.base)
    assert ("reloading was tried" in str(caught.value)) == (wrong != "stale")
    assert reloads.loads <= 2
    assert session.version is None
    session.close()


def test_without_a_reloader_what_is_made_beside_a_weight_is_refused(run: Run) -> None:
    server = Baking()
    server.load_weights(run.state.pairs())
    server.attention.doubled = server.norm.data.float() * 2
    session = Session(server, server.load_weights, run.host())
    with pytest.raises(SchemaMismatch, match=r"norm: attention\.doubled, kept beside the weights"):
        session.start(run.base)
    session.close()


def test_constants_views_and_space_to_work_in_are_no_doubt(run: Run) -> None:
    server = Server()
    server.load_weights(run.state.pairs())
    server.space = torch.zeros(8, 8)
    server.parts = [server.norm.data[:4], torch.ones(())]
    server.kv_cache = torch.randn(4)
    session = Session(server, server.load_weights, run.host())
    session.start(run.base)
    assert (session.weights.plan.reloaded, session.weights.plan.refused) == ({}, {})
    session.close()
    server.parts.append(torch.arange(8.0))
    assert {n for names in kept_beside(server).values() for n in names} == {"parts.2"}


def test_a_reload_that_breaks_off_poisons_until_healed(run: Run) -> None:
    session, server, reloads = opened(run)
    session.start(run.base)
    run.step()
    session.stage(1)
    reloads.wrong = "keeps"
    with pytest.raises(EnginePoisoned, match="in part: the engine does not hold version 1"):
        session.apply(1)
    reloads.wrong = "fails"
    with pytest.raises(RuntimeError, match="device lost"):
        session.heal()
    assert session.poisoned
    reloads.wrong = ""
    assert session.heal() == 1
    assert not session.poisoned
    assert same(server, run.states[1])
    session.close()


def test_memory_that_changes_after_a_reload_is_told(run: Run) -> None:
    session, server, _ = opened(run)
    session.start(run.base)
    assert add_up([session.read()])["differs"] == []
    server.mlp.weight.data[0, 0] += 1
    server.router.data[0, 0] += 1
    assert add_up([session.read()])["differs"] == ["router", "rank 0: mlp.weight"]
    session.heal()
    assert add_up([session.read()])["differs"] == []
    session.close()


def test_a_mirror_that_has_rotted_is_not_reloaded(run: Run) -> None:
    session, server, _ = opened(run)
    session.start(run.base)
    run.step()
    session.host.advance(1)
    (path,) = (run.root / "mirror").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    for attempt in (lambda: session.stage(1), session.heal):
        with pytest.raises(DigestMismatch, match="is not that of version 1"):
            attempt()
        assert same(server, run.states[0])
    session.close()


def test_ranks_reload_together(run: Run) -> None:
    ring = Ring(2)
    servers = [baked(run.state, rank, 2) for rank in range(2)]
    sessions = [
        Session(
            server,
            server.load_weights,
            run.host(),
            gather=ring.of(rank),
            reloader=Reloads(server),
        )
        for rank, server in enumerate(servers)
    ]
    on_all([lambda s=s: s.start(run.base) for s in sessions])
    run.step()
    on_all([lambda s=s: s.stage(1) for s in sessions])
    for session in sessions:
        session.apply(1)
    assert all(same(server, run.states[1], rank, 2) for rank, server in enumerate(servers))
    found = add_up([session.read() for session in sessions])
    assert (found["differs"], found["not_compared"]) == ([], sorted(UNPROVEN))
    for session in sessions:
        session.close()


def test_a_trial_that_fails_on_one_rank_fails_on_all(run: Run) -> None:
    ring = Ring(2)
    servers = [baked(run.state, rank, 2) for rank in range(2)]
    sessions = [
        Session(
            server,
            server.load_weights,
            run.host(),
            gather=ring.of(rank),
            reloader=Reloads(server, "forgets" if rank else ""),
        )
        for rank, server in enumerate(servers)
    ]
    failed = []

    def start(session: Session) -> None:
        with pytest.raises(SchemaMismatch, match="reloading was tried"):
            session.start(run.base)
        failed.append(session)

    on_all([lambda s=s: start(s) for s in sessions])
    assert len(failed) == 2
    for session in sessions:
        session.close()


def test_the_loader_is_given_copies_and_the_trial_something_else() -> None:
    state = Checkpoint.random(3)
    for (name, tensor), bits in zip(weights(state.schema, state.tensors), state.tensors):
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        assert raw.tobytes() == bits.tobytes(), name
        assert not bits.nbytes or raw.ctypes.data != bits.ctypes.data
    for (name, was), (_, other) in zip(
        weights(state.schema, state.tensors), spoilt(state.schema, state.tensors)
    ):
        assert (other.shape, other.dtype) == (was.shape, was.dtype)
        if was.numel():
            raw = [t.contiguous().view(-1).view(torch.uint8) for t in (was, other)]
            assert not torch.equal(*raw), name


def test_equal_elements_prove_nothing_in_strange_company(run: Run) -> None:
    """An expert of zeros is what it should be wherever its elements are."""
    state = run.state
    for name in ("experts.1.down", "eight"):
        state.tensors[state.schema.ordinal(name)][:] = 0
    with_zeros = Run(run.root / "zeros", state=state)
    session, server, _ = opened(with_zeros)
    session.start(with_zeros.base)
    assert session.weights.plan.reloaded["experts.1.down"] == (
        "experts.0.down in experts.w2 is not proven either"
    )
    with_zeros.step()
    session.stage(1)
    session.apply(1)
    assert same(server, with_zeros.states[1])
    session.close()
    with_zeros.publisher.close()


def test_zeros_that_are_quantised_are_not_taken_for_a_cast(run: Run) -> None:
    server = Server()
    server.load_weights(run.state.pairs())
    zeros = Checkpoint(run.state.schema, [bits.copy() for bits in run.state.tensors])
    zeros.tensors[zeros.schema.ordinal("norm")][:] = 0
    server.norm = torch.nn.Parameter(torch.zeros(8).to(torch.float8_e4m3fn), requires_grad=False)
    layout = learn_layout(server.load_weights, server, zeros.schema)
    verdicts = attest(
        layout, zeros.schema, digest_tensors(zeros.tensors), zeros.tensors.__getitem__
    )
    assert verdicts["norm"].reason == "norm holds it quantised"


@pytest.mark.parametrize(("text", "found"), [("", "reload"), (" freeze ", "freeze"), ("yes", None)])
def test_a_setting_is_one_of_its_words(
    text: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_UNPROVEN", text)
    words = ["reload", "refuse", "freeze"]
    if found is None:
        with pytest.raises(Misuse, match="none of reload, refuse, freeze"):
            one_of("THINWIRE_UNPROVEN", words)
    else:
        assert one_of("THINWIRE_UNPROVEN", words) == found


def test_patterns_count() -> None:
    names = ["layers.0.q", "layers.11.q", "layers.0.experts.3.up", "norm"]
    assert by_pattern(names) == {"layers.*.q": 2, "layers.*.experts.*.up": 1, "norm": 1}
