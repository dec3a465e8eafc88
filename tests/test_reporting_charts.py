"""Charts of the page: lines, sweeps, ticks, and coordinates that are finite whatever the points."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting_records import record

from mae_bench.reporting import page, plots
from mae_bench.reporting.curves import SWEEPS, Run, sweep_charts, training_curves
from mae_bench.reporting.plots import Chart, Line, mean_line, nice_ticks, svg, thinned, tick_label


def test_training_curves_have_thin_seeds_and_a_bold_mean() -> None:
    history = [[{"step": float(s), "loss": 2.0 - s / 600 + seed, "top1": None} for s in range(600)] for seed in (0, 1)]
    runs = [Run(record(seed=seed, history=history[seed]), "vit_t_mae") for seed in (0, 1)]
    (group,) = training_curves(runs)
    (chart,) = group.charts  # the metric was never defined
    assert [(line.role, len(line.points)) for line in chart.lines] == [("run", 200), ("run", 200), ("mean", 50)]
    assert chart.lines[2].points[0][1] == pytest.approx(2.5, abs=0.02)
    assert "vit_t_mae from 2.5 to 1.502, mean of 2 seeds" in chart.description


def test_ours_stand_beside_figure_5_where_only_the_ratio_differs() -> None:
    runs = []
    for number, ratio in enumerate([0.25, 0.5, 0.75]):
        maker = str(number + 5) * 64
        recipe = {"values": {"mask_ratio": ratio, "steps": 10}, "backbone": {"name": "vit_t_mae"}}
        trained = record(engine="pretraining", recipe=recipe, recipe_hash=maker, effective={"steps": 10})
        weights = {"kind": "given", "sha256": maker, "maker": {"recipe_hash": maker}}
        runs.append(Run(trained, "vit_t_mae"))
        runs += [Run(record(seed=seed, value=40.0 + 10 * ratio + seed, weights=weights), "x") for seed in (0, 1)]
    (chart,) = sweep_charts(SWEEPS[0], runs, [])
    mean = next(line for line in chart.lines if line.role == "mean")
    assert mean.points == ((25.0, 43.0), (50.0, 45.5), (75.0, 48.0))
    assert sweep_charts(SWEEPS[1], runs, []) == []  # of one schedule each


def test_published_figures_are_those_of_the_paper() -> None:
    ratio, schedule = ([line.points for chart in sweep_charts(sweep, [], page.load_published()) for line in chart.lines]
                       for sweep in SWEEPS)  # fmt: skip
    assert [len(points) for points in (*ratio, *schedule)] == [10, 10, 5, 5]
    assert (75.0, 73.5) in ratio[1] and (1600.0, 85.1) in schedule[0]


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=12), st.booleans())
def test_any_points_make_a_chart_of_finite_coordinates(points: list[tuple[float, float]], log: bool) -> None:
    drawn = svg(Chart("c", "<t>", "d", "x", "y", (Line("l", tuple(points)),), log=log))
    assert not re.search(r"nan|inf", re.sub(r"<title>.*?</title>", "", drawn)) and "<t>" not in drawn
    for x, y in re.findall(r'cx="([^"]+)" cy="([^"]+)"', drawn):
        assert 0 <= float(x) <= plots.WIDTH and 0 <= float(y) <= plots.HEIGHT


@given(st.floats(-1e15, 1e15), st.floats(-1e15, 1e15))
def test_ticks_are_few_even_and_within(first: float, second: float) -> None:
    low, high = sorted((first, second))
    ticks = nice_ticks(low, high)
    room = 1e-8 * max(high - low, abs(low), abs(high), 1e-6)
    assert len(ticks) <= 6 and all(low - room <= tick <= high + room for tick in ticks)
    steps = [b - a for a, b in pairwise(ticks)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-3) for step in steps) or high - low < 1e-6 * abs(high)


def test_ticks_and_their_names() -> None:
    assert nice_ticks(0, 1) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0] and nice_ticks(83, 85.1) == [83.0, 83.5, 84.0, 84.5, 85.0]
    assert [tick_label(value) for value in (0.25, 1600, 20_000, 2.5e6, -50_000)] == [
        "0.25",
        "1600",
        "20k",
        "2.5M",
        "-50k",
    ]


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=700), st.integers(1, 200))
def test_thinning_keeps_few_points_in_order_and_in_range(points: list[tuple[float, float]], most: int) -> None:
    thin = thinned(points, most)
    assert len(thin) == min(len(points), most) and list(thin) == sorted(thin, key=lambda point: point[0])
    if points:
        low, high = min(y for _, y in points), max(y for _, y in points)
        assert all(low - 1 <= y <= high + 1 for _, y in thin)


def test_a_mean_line_is_over_the_steps_that_all_have() -> None:
    assert mean_line([((1.0, 2.0), (2.0, 4.0)), ((2.0, 6.0), (3.0, 9.0))]) == ((2.0, 5.0),)
    assert mean_line([]) == ()
