"""How the benchmark of whole servers evaluates its figures."""

import bench_heads
import bench_serve as bench
import pytest

LATENCY, THROUGHPUT = "answer, alone, ms", "requests a second, 16 at once"


@pytest.mark.parametrize("figure, ratio", [(LATENCY, 2.0), (THROUGHPUT, 0.5)])
def test_ratio_above_one_is_an_improvement(figure, ratio):
    row = bench.row("fleet", figure, {"stock": [10.0] * 8, "patched": [5.0] * 8})
    assert (row["ratio"], row["noise"]) == (ratio, 0.0)
    assert bool(bench.regressions([row])) == (ratio < 1)


@pytest.mark.parametrize(
    "values",
    [
        [10, 11, 10, 11, 10, 11, 10, 11],  # first and second of a round
        [10, 10, 11, 11, 10, 10, 11, 11],  # every other round
        [10, 10, 10, 10, 11, 11, 11, 11],  # early and late
    ],
)
def test_noise_is_difference_between_runs_of_one_engine(values):
    assert bench.noise({"stock": [10.0] * 8, "patched": values}) == pytest.approx(0.1)


def test_slowdown_beyond_noise_is_reported():
    row = {"fleet": "nixl", "figure": LATENCY, "noise": 0.05}
    assert bench.regressions([{**row, "ratio": 0.96}]) == []
    assert "nixl: answer, alone, ms: 0.94" in bench.regressions([{**row, "ratio": 0.94}])[0]


@pytest.mark.parametrize("packed, is_missed", [(10.0, False), (20.5, False), (23.0, True)])
def test_packed_heads_slower_than_slices_are_reported(packed, is_missed):
    values = {"packed": packed, "sliced": 20.0, "equal TP": 9.0}
    blocks = {mode: [value, value * 1.1] * 4 for mode, value in values.items()}
    row = bench_heads.row("nixl TP 2 to 1", bench_heads.FIGURES[0], blocks)
    assert row["gain"] == pytest.approx(20 / packed)
    assert row["noise"] == pytest.approx(0.1)
    assert bool(bench_heads.misses([row])) == is_missed
