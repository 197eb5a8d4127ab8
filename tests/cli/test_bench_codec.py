"""``thinwire bench codec``: bounds by hand, rivals' streams, judgements, and the report's shape."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from thinwire.cli import bench_codec, bench_synthetic
from thinwire.cli.bench_bound import binomial_bits, bound, entropy_bits, exponents, tally
from thinwire.cli.bench_drawn import change_rates, drawn, scaled_rates
from thinwire.cli.bench_rivals import gaps16
from thinwire.cli.bench_sizes import delta_between, find_pairs, size_row, tallies
from thinwire.cli.bench_speed import both_ways, part_of
from thinwire.cli.bench_synthetic import CASES, TINY, synthetic
from thinwire.cli.bench_targets import judge
from thinwire.dtypes import dtype
from thinwire.errors import Misuse
from thinwire.patch import Patch
from thinwire.schema import Schema, TensorSpec

BF16, F16 = dtype("BF16"), dtype("F16")
ONE, TWO = 0x3F80, 0x4000  # 1.0 and 2.0: exponents 127 and 128


def quiet(what: str, done: int, total: int) -> None:
    pass


def delta_of(old: np.ndarray, new: np.ndarray):
    schema = Schema((TensorSpec("w", BF16, old.shape),))
    return delta_between(schema, [old], [new])


# --- the bound -----------------------------------------------------------------------------


def test_entropies_by_hand() -> None:
    assert entropy_bits([]) == entropy_bits([7]) == entropy_bits([7, 0]) == 0
    assert entropy_bits([4, 4]) == 8
    assert entropy_bits([2, 1, 1]) == 6
    assert binomial_bits(8, 4) == 8
    assert binomial_bits(8, 0) == binomial_bits(8, 8) == 0
    assert binomial_bits(4, 1) == pytest.approx(2 + 3 * math.log2(4 / 3))


def test_exponents() -> None:
    bits = np.array([0, ONE, ONE | 0x8000, TWO + 5, 0x7FC0], "u2")
    assert exponents(bits, BF16).tolist() == [0, 127, 127, 128, 255]
    assert exponents(np.array([0x3C00, 0xFC00], "u2"), F16).tolist() == [15, 31]
    assert exponents(np.array([1, 2], "u1"), dtype("U8")).tolist() == [0, 0]


def test_bound_by_hand() -> None:
    old = np.array([ONE + 1] * 8 + [TWO + 1] * 4, "u2")
    new = old.copy()
    new[:4] += np.array([1, 1, 2, 2], "u2")  # four of eight, two kinds of step
    found = bound(tallies(delta_of(old, new)))
    assert found.positions * 8 == pytest.approx(8)  # the other exponent never changes: no bits
    assert found.steps * 8 == pytest.approx(4)
    assert found.nbytes == 2


def test_steps_count_relative_to_the_weights_sign() -> None:
    old = np.array([ONE + 1, (ONE + 1) | 0x8000] * 2, "u2")
    new = old + np.uint16(1)  # each grows in magnitude
    found = tally(BF16, [old], [(old, delta_of(old, new).patches[0])])
    assert found.step.tolist() == [1]
    assert found.count.tolist() == [4]
    flipped = tally(BF16, [old], [(old, delta_of(old, old ^ np.uint16(0x8000)).patches[0])])
    assert len(flipped.step) == 1
    assert flipped.step[0] < 0


def test_tensors_are_pooled() -> None:
    old = np.array([ONE] * 4, "u2")
    changed = delta_of(old, old + np.uint16(1)).patches[0]
    found = tally(BF16, [old, old], [(old, changed)])
    assert found.elements[127] == 8
    assert found.changed[127] == 4
    assert bound([found]).positions * 8 == pytest.approx(8)


# --- rivals, drawing, parts ----------------------------------------------------------------


def test_gaps_pass_over_long_runs() -> None:
    assert gaps16(np.array([0, 1, 5], "i4")).tolist() == [0, 0, 3]
    assert gaps16(np.array([65534, 65535], "i4")).tolist() == [65534, 0]
    assert gaps16(np.array([65535], "i4")).tolist() == [65535, 0]
    assert gaps16(np.array([2 * 65535 + 3], "i4")).tolist() == [65535, 65535, 3]
    assert gaps16(np.array([], "i4")).tolist() == []


def test_rates_are_scaled_to_a_share() -> None:
    rates = scaled_rates(np.array([0.5, 0.1, 0.0]), np.array([10, 100, 1000]), 40 / 1110)
    assert rates.tolist() == pytest.approx([1, 0.3, 0])  # 10 of 10, 30 of 100


def test_drawn_changes_follow_what_was_measured() -> None:
    real = synthetic(TINY, "BF16", 0.02)
    (measured,) = tallies(real)
    assert change_rates(measured).max() <= 1
    made = drawn(TINY, measured, 0.01)
    assert sum(map(len, made.patches)) == pytest.approx(0.01 * made.schema.numel, rel=0.3)
    (again,) = tallies(made)
    assert set(again.step.tolist()) <= set(measured.step.tolist())
    assert [patch.check() for patch in made.patches] == list(made.patches)


@pytest.mark.parametrize(("name", "density"), CASES)
def test_synthetic_states(name: str, density: float) -> None:
    delta = synthetic(TINY, name, density)
    assert all(spec.dtype.name == name for spec in delta.schema)
    share = sum(map(len, delta.patches)) / delta.schema.numel
    assert share == pytest.approx(density, rel=0.5)
    row = size_row(delta, {})
    assert row["sizes"]["compact"] < row["sizes"]["raw"]
    assert row["changed"] == sum(map(len, delta.patches))


def test_part_keeps_whole_tensors_and_their_patches() -> None:
    delta = synthetic(TINY, "BF16", 0.1)
    part = part_of(delta, 20_000)
    assert 0 < part.schema.numel <= 20_000
    for patch in part.patches:
        assert part.schema[patch.ordinal] == patch.spec
        assert np.array_equal(part.new[patch.ordinal][patch.positions], patch.bits)
    assert len(part.schema) < len(delta.schema)


def test_speed_puts_the_state_back_between_rounds() -> None:
    delta = synthetic(TINY, "BF16", 0.1)
    rows = both_ways(delta, ["compact", "raw"], threads=2, repeat=2, progress=quiet)
    assert list(rows) == ["copy", "compact_encode", "compact_decode", "raw_encode", "raw_decode"]
    assert rows["copy"]["copies"] == 1
    assert all(row["seconds"] > 0 for row in rows.values())


# --- judgements ----------------------------------------------------------------------------


def test_judgements() -> None:
    def pair(compact: int, bound: int, arc: int) -> dict[str, object]:
        sizes = {"compact": compact, "arc_v3": arc}
        return {"pair": "p", "bound": {"bytes": bound}, "commit_bytes": 1000, "sizes": sizes}

    def verdicts(document: dict[str, object]) -> list[tuple[float, bool]]:
        return [(target["limit"], target["met"]) for target in judge(document)]

    small, large = pair(104_000, 100_000, 200_000), pair(1_040_000, 1_000_000, 1_700_000)
    assert verdicts({"pairs": [small]}) == [(1.05, True), (1.8, True), (2.0, False)]
    assert verdicts({"pairs": [large]}) == [(1.03, False), (1.8, False), (2.0, False)]
    assert verdicts({"pairs": []}) == []
    at_the_border = pair(301_000, 301_000, 602_000)  # a payload of 300 kB exactly is small
    assert verdicts({"pairs": [at_the_border]})[0] == (1.05, True)
    drawn_row = {"what": "x", "sizes": {"compact": 6_000_001}}
    assert verdicts({"pairs": [], "drawn": drawn_row}) == [(6_000_000, False)]
    synthetic_row = {
        "dtype": "BF16",
        "density": 0.5,
        "speed": {"copy": {"mb_per_s": 1.0}, "compact_encode": {"mb_per_s": 250.0}},
    }
    assert verdicts({"pairs": [], "synthetic": [synthetic_row]}) == [(200, True)]


# --- the command ---------------------------------------------------------------------------


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """One tiny pair, named as the state maker names them."""
    delta = synthetic(TINY, "BF16", 0.02)
    folder = tmp_path / "states" / "tiny-lr1e-06"
    folder.mkdir(parents=True)
    torch = pytest.importorskip("torch")
    save_torch = pytest.importorskip("safetensors.torch").save_file
    for name, state in (("before", delta.old), ("after", delta.new)):
        tensors = {
            spec.name: torch.from_numpy(bits).view(torch.bfloat16).reshape(spec.shape)
            for spec, bits in zip(delta.schema, state)
        }
        save_torch(tensors, folder / f"{name}.safetensors")
    (folder / "shares.json").write_text("[0.03, 0.02]")
    return folder.parent


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_synthetic, "quick_shape", lambda: TINY)
    monkeypatch.setattr(bench_synthetic, "full_shape", lambda: TINY)
    monkeypatch.setattr(bench_codec, "_ARC_ELEMENTS", 20_000)


@pytest.fixture
def rivals() -> None:
    for module in ("zstandard", "fireworks_delta_compression"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")


def report():
    """The script that turns the document into the page's tables."""
    pytest.importorskip("matplotlib")
    file = Path(__file__).parents[2] / "benchmarks" / "report.py"
    spec = importlib.util.spec_from_file_location("report", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_filled_between_markers() -> None:
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    filled = report().fill(page, "x", r"new \1")
    assert filled == "a\n<!-- begin x -->\nnew \\1\n<!-- end x -->\nb\n"
    assert report().fill(filled, "x", r"new \1") == filled
    with pytest.raises(SystemExit):
        report().fill(page, "y", "")


def test_the_page_shows_the_committed_results() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    document = json.loads((root / "bench" / "results" / "codec.json").read_text())
    for name, table in report().TABLES.items():
        assert report().fill(page, name, table(document)) == page, name


@pytest.mark.usefixtures("tiny", "rivals")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_document(cli, states: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "codec.json"
    out = cli("bench", "codec", "--states", states, "--json", file, "--repeat", 1).stdout
    document = json.loads(file.read_text())
    assert document.keys() == {
        *("environment", "pairs", "changed_shares", "synthetic", "drawn", "speed"),
        *("targets", "targets_met"),
    }
    (pair,) = document["pairs"]
    assert (pair["pair"], pair["model"], pair["lr"]) == ("tiny-lr1e-06", "tiny", 1e-6)
    assert pair["sizes"].keys() == pair["per_change"].keys()
    assert {"raw", "packed", "compact", "xor_zstd", "arc_v3", "arc_v3_as_shipped"} <= {
        *pair["sizes"]
    }
    assert pair["sizes"]["arc_v3"] <= pair["sizes"]["arc_v3_as_shipped"]
    assert document["changed_shares"] == [{"model": "tiny", "lr": 1e-6, "shares": [0.03, 0.02]}]
    assert len(document["synthetic"]) == len(CASES)
    assert document["drawn"]["from_pair"] == "tiny-lr1e-06"
    assert document["speed"]["steps"]["packed_decode"]["copies"] > 0
    assert document["targets_met"] == all(target["met"] for target in document["targets"])
    assert "tiny-lr1e-06: compact / bound" in out

    for name, table in report().TABLES.items():
        assert table(document).startswith("| "), name
    kept = document["synthetic"]
    cli("bench", "codec", "--states", states, "--json", file, "--repeat", 1, "--only", "pairs")
    assert json.loads(file.read_text())["synthetic"] == kept


def test_states_that_are_none(cli, tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="no pair"):
        find_pairs(tmp_path)
    assert "make_states" in cli.fails("bench", "codec", "--states", tmp_path, status=2)
    folder = tmp_path / "odd"
    folder.mkdir()
    save_file({"w": np.zeros(1, "f2")}, folder / "after.safetensors")
    with pytest.raises(Misuse, match="named"):
        find_pairs(tmp_path)


def test_a_codec_that_lies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire import codec
    from thinwire.errors import ThinwireError

    delta = synthetic(TINY, "BF16", 0.02)
    first = delta.patches[0]
    wrong = [Patch(first.ordinal, first.spec, first.positions, first.bits ^ np.uint16(1))]
    monkeypatch.setattr(codec, "decode", lambda *args: [*wrong, *delta.patches[1:]])
    with pytest.raises(ThinwireError, match="did not decode"):
        size_row(delta, {})
