"""Real weights, several ranks, and a model that has to be refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from engine_vllm._runs import Run, engine


@pytest.mark.timeout(600)
def test_experts_that_the_cpu_packs_are_refused_unless_reloaded(tmp_path: Path) -> None:
    run = Run(tmp_path, "moe")
    with (
        pytest.raises(RuntimeError, match=r"experts\.0\.down_proj\.weight: what .*w2_weight holds"),
        engine(run.base, run=run, env={"THINWIRE_UNPROVEN": "refuse"}),
    ):
        pass


@pytest.mark.timeout(600)
def test_experts_may_be_left_alone_while_the_rest_is_followed(tmp_path: Path) -> None:
    run = Run(tmp_path, "moe")
    with engine(run.base, run=run, env={"THINWIRE_UNPROVEN": "freeze"}) as live:
        before = live.generate()
        experts = {name: t.clone() for name, t in run.state.items() if ".experts." in name}
        run.step(keep=experts)
        live("update")
        after = live.generate()
        assert after != before
        run.step()
        told = live.answer("update")
        assert "experts" in told["failed"]
        assert "changes" in told["failed"]
        assert live.generate() == after
    with engine(run.pulled(1)) as other:
        assert other.generate() == after


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["untied", "gpt2"])
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    run = Run(tmp_path, kind)
    spread = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    with engine(run.base, run=run, **spread) as live:
        ranks = live("status")["ranks"]
        assert sorted(rank["writes"] for rank in ranks) == [False, True]
        for version in (1, 2, 3):
            run.step()
            assert live("update")["version"] == version
            attested = live("attest")
            assert (attested["exact"], attested["not_compared"]) == (True, [])
            assert attested["tensors"] == len(run.state)
        after, sums = live.generate(), live("checksums")
    with engine(run.pulled(3), **spread) as other:
        assert other("checksums") == sums
        assert other.generate() == after


@pytest.mark.timeout(900)
def test_real_weights(tmp_path: Path) -> None:
    folder = os.environ.get("THINWIRE_SMOLLM2")
    if not folder:
        pytest.skip("THINWIRE_SMOLLM2 names no folder with SmolLM2-135M-Instruct")
    run = Run(tmp_path, "checkpoint", folder=Path(folder))
    with engine(run.base, run=run) as live:
        for version in range(1, 6):
            run.step(density=0.01)
            told = live("update")
            assert told["version"] == version
        print({k: round(v, 4) for k, v in live("status")["ranks"][0]["seconds"].items()}, told)
        assert live("attest")["exact"]
        after, sums = live.generate(), live("checksums")
    with engine(run.pulled(5)) as other:
        assert other("checksums") == sums
        assert other.generate() == after


@pytest.mark.timeout(600)
def test_vllms_own_interface(tmp_path: Path) -> None:
    run = Run(tmp_path, "tied")
    run.step()
    with engine(run.base) as live:
        assert "does not follow a run" in live("status")["ranks"][0]["message"]
        run.bucket.rename(tmp_path / "not there yet")
        threading.Timer(1.5, (tmp_path / "not there yet").rename, [run.bucket]).start()
        live("open", bucket=str(run.bucket), mirror=str(tmp_path / "mirror"))
        assert live("status")["version"] == 1
        run.step()
        live("interface", version=2)
        assert live("attest")["exact"]
        after = live.generate()
        assert "9 is not committed" in live.answer("interface", version=9)["failed"]
        assert live.generate() == after
    with engine(run.pulled(2)) as other:
        assert other.generate() == after


@pytest.mark.timeout(300)
def test_an_engine_with_made_up_weights_does_not_start(tmp_path: Path) -> None:
    run = Run(tmp_path, "tied")
    with (
        pytest.raises(RuntimeError, match="cannot be followed"),
        engine(run.base, run=run, load_format="dummy"),
    ):
        pass
