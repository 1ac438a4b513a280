"""How the benchmark of many ranks evaluates its figures."""

import bench_scale as bench
import pytest
import scale_plot


def rows(excess: dict[str, float], **more):
    """Rows of two rounds; every figure grows with a power `excess` above the work's."""
    return [
        {"engine": engine, "backend": "nixl", "ranks": size, "round": number, **more}
        | {name: 3 * size ** (power + excess[engine]) for name, power in bench.GROWTHS.items()}
        for number in range(2)
        for size in bench.RANKS
        for engine in bench.ENGINES
    ]


@pytest.mark.parametrize(
    "stock, patched, is_missed",
    [
        *((0.0, -0.5, False), (0.0, 0.05, False), (0.0, 0.2, True)),
        *((0.5, 0.55, False), (0.5, 0.7, True), (-0.5, 0.0, False), (-0.5, 0.2, True)),
    ],
)
def test_growth_faster_than_stock_and_the_work_is_reported(stock, patched, is_missed):
    found = bench.growths(rows({"stock": stock, "patched": patched}), 2)
    expected = [power + patched for power in bench.GROWTHS.values()]
    assert [one["patched"] for one in found] == pytest.approx(expected)
    missed = bench.faster_growing(found)
    assert len(missed) == (len(bench.GROWTHS) if is_missed else 0)
    assert all("grows with ranks to the power" in line for line in missed)


def test_noise_is_difference_between_rounds():
    measured = rows({"stock": 0.0, "patched": 0.2})
    for row in measured:
        if row["round"] == 1:
            row["messages"] *= row["ranks"] ** 0.3
    found = {one["figure"]: one for one in bench.growths(measured, 2)}
    assert found["messages"]["noise"] == pytest.approx(0.3)
    assert not any("messages" in line for line in bench.faster_growing(list(found.values())))


@pytest.mark.parametrize("lost, attempt", [(1, 4), (0, 2)])
def test_lost_request_is_reported_for_patched_only(lost, attempt):
    row = {"backend": "nixl", "ranks": 8, "lost": lost, "attempt": attempt}
    assert bench.lost_requests([{**row, "engine": "stock"}]) == []
    assert len(bench.lost_requests([{**row, "engine": "patched"}])) == 1


def test_longest_gap_includes_both_ends():
    assert bench.longest_gap([1.0, 5.0, 6.0], 2.0, 5.5) == 3.0
    assert bench.longest_gap([], 2.0, 5.5) == 3.5


def test_scale_plot_is_small_and_contains_text(tmp_path):
    more = dict.fromkeys(scale_plot.PANELS, 1.0)
    file = tmp_path / "scale.svg"
    scale_plot.draw(rows({"stock": 0.0, "patched": 0.0}, **more), file)
    text = file.read_text()
    assert "messages per request" in text and "patched, nixl" in text
    assert text.count("\n") < 300
