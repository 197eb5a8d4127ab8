"""What vLLM has quantised or packed is reloaded by its own loader, after a trial; or refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine_vllm._faults import install
from engine_vllm._http import serving
from engine_vllm._runs import PROMPTS, Run, engine

FP8 = {"quantization": "fp8_per_channel"}  # the online kind that vLLM's CPU build has operators for


def same_as_fresh(run: Run, version: int, found: tuple[Any, Any], **options: Any) -> None:
    """Tokens, logprobs and vLLM's own checksums are those of an engine started at the version."""
    with engine(run.pulled(version), **options) as other:
        assert (other.generate(), other("checksums")) == found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tied", "untied", "gpt2"])
def test_fp8_made_at_loading_is_reloaded_with_its_scales(kind: str, tmp_path: Path) -> None:
    run = Run(tmp_path, kind)
    run.step()
    with engine(run.base, run=run, **FP8) as live:
        (rank,) = live("status")["ranks"]
        assert rank["version"] == 1
        q = "model.layers.*.self_attn.q_proj" if kind != "gpt2" else "transformer.h.*.attn.c_attn"
        assert rank["reloaded"][f"{q}.weight"] == 2
        assert rank["refused"] == {}
        same_as_fresh(run, 1, (live.generate(), live("checksums")), **FP8)
        for version in (2, 3, 4):
            run.step()
            before = live.generate()
            assert live("update")["version"] == version
            assert live.generate() != before
            attested = live("attest")
            assert (attested["exact"], attested["differs"]) == (True, [])
            assert attested["reloaded"] > 0
        same_as_fresh(run, 4, (live.generate(), live("checksums")), **FP8)


@pytest.mark.timeout(900)
def test_an_fp8_server_is_reloaded_under_requests(tmp_path: Path) -> None:
    run = Run(tmp_path, "untied")
    how = ("--quantization", "fp8_per_channel")
    with serving(run.base, run, *how) as server:
        before = server.generate(PROMPTS[0])
        finished = []
        thread = threading.Thread(
            target=lambda: finished.append(server.generate("0 1 2 3", tokens=200))
        )
        thread.start()
        for version in (1, 2, 3):
            run.step()
            told = server.get("/thinwire/update", {})
            assert (told["version"], told["moved"]) == (version, True)
            assert 0 < told["apply_s"] <= told["paused_s"]
        thread.join(120)
        assert [len(tokens) for tokens, *_ in finished] == [200]
        out = server.thinwire("attest").communicate(timeout=60)[0]
        assert "14 not compared, " in out
        assert out.endswith(" unchanged since they were reloaded: all exact\n")
        found = [server.generate(prompt) for prompt in PROMPTS], server.checksums()
        assert found[0][0] != before
    with serving(run.pulled(3), None, *how) as other:
        assert ([other.generate(prompt) for prompt in PROMPTS], other.checksums()) == found


@pytest.mark.timeout(900)
def test_experts_that_the_cpu_packs_are_reloaded(tmp_path: Path) -> None:
    run = Run(tmp_path, "moe")
    with engine(run.base, run=run) as live:
        (rank,) = live("status")["ranks"]
        assert set(rank["reloaded"]) == {
            f"model.layers.*.mlp.experts.*.{kind}_proj.weight" for kind in ("down", "gate", "up")
        }
        for version in (1, 2, 3):
            run.step()
            before = live.generate()
            live("update")
            assert live("attest")["exact"]
            assert live.generate() != before
            same_as_fresh(run, version, (live.generate(), live("checksums")))
        experts = {name: t.clone() for name, t in run.state.items() if ".experts." in name}
        seconds = live("status")["ranks"][0]["seconds"]
        run.step(keep=experts)
        live("update")
        assert live("status")["ranks"][0]["seconds"]["stage_s"] != seconds["stage_s"]
        assert live("attest")["exact"]
        same_as_fresh(run, 4, (live.generate(), live("checksums")))


@pytest.mark.timeout(900)
def test_two_ranks_reload_fp8(tmp_path: Path) -> None:
    run = Run(tmp_path, "untied")
    spread: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        **FP8,
    }
    with engine(run.base, run=run, **spread) as live:
        for version in (1, 2):
            run.step()
            assert live("update")["version"] == version
            assert live("attest")["exact"]
        found = live.generate(), live("checksums")
    same_as_fresh(run, 2, found, **spread)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "how"), [("untied", FP8), ("moe", {})])
def test_a_reload_that_breaks_off_poisons_until_healed(
    kind: str, how: dict[str, str], tmp_path: Path
) -> None:
    run = Run(tmp_path, kind)
    faults = tmp_path / "faults"
    with engine(run.base, run=run, env=install(faults), **how) as live:
        run.step()
        (faults / "fault").write_text("half")
        assert "the device is gone" in live.answer("update")["failed"]
        (rank,) = live("status")["ranks"]
        assert "applied in part" in rank["poisoned"]
        (faults / "fault").unlink()
        assert live("heal") == {"version": 1}
        assert live("attest")["exact"]
        same_as_fresh(run, 1, (live.generate(), live("checksums")), **how)
        run.step()
        assert live("update")["version"] == 2
        same_as_fresh(run, 2, (live.generate(), live("checksums")), **how)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "fault", "reason"),
    [
        ("moe", "kernels", r"again does not make \S*w13_weight what it was"),
        ("untied", "packed", r"loaded into \S*proj\.weight is not seen in memory"),
    ],
)
def test_what_reloading_cannot_renew_or_show_is_refused(
    kind: str, fault: str, reason: str, tmp_path: Path
) -> None:
    """vLLM's reloading as it is leaves experts unpacked, and packed linears out of sight."""
    run = Run(tmp_path, kind)
    more = install(tmp_path / "faults")
    (tmp_path / "faults" / "fault").write_text(fault)
    with (
        pytest.raises(RuntimeError, match=reason),
        engine(run.base, run=run, env=more),
    ):
        pass


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_dtype_that_the_server_casts_to_is_followed(dtype: str, tmp_path: Path) -> None:
    run = Run(tmp_path, "untied")
    with engine(run.base, run=run, dtype=dtype) as live:
        for version in (1, 2):
            run.step()
            assert live("update")["version"] == version
        assert live("status")["ranks"][0]["reloaded"] == {}
        attested = live("attest")
        assert (attested["exact"], attested["not_compared"]) == (True, [])
        same_as_fresh(run, 2, (live.generate(), live("checksums")), dtype=dtype)
