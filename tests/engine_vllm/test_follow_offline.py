"""An engine that follows a run is the engine that a fresh start would give, version by version."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_vllm._runs import Run, engine


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["tied", "untied", "gpt2"])
def test_five_versions_equal_fresh_engines(kind: str, tmp_path: Path) -> None:
    run = Run(tmp_path, kind)
    followed, sums, fresh = {}, {}, {}
    with engine(run.base, run=run) as live:
        status = live("status")
        assert status["version"] == 0
        assert status["ranks"][0]["refused"] == {}
        followed[0] = live.generate()
        for version in range(1, 6):
            run.step()
            told = live("update", version=version if version % 2 else None)
            assert (told["version"], told["moved"]) == (version, True)
            followed[version] = live.generate()
            sums[version] = live("checksums")
            attested = live("attest")
            assert attested["exact"]
            assert attested["not_compared"] == []
            assert attested["tensors"] == len(run.state)
            assert live("named") == str(version)
        assert not live("update")["moved"]
    for version in (0, 3, 5):
        with engine(run.pulled(version)) as other:
            fresh[version] = other.generate()
            if version:
                assert other("checksums") == sums[version]
    assert {v: followed[v] for v in fresh} == fresh
    assert len({str(found) for found in followed.values()}) == 6  # the weights do show
