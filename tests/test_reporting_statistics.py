"""The statistics against hand-made numbers, scipy and their definitions; and why the interval is Student's."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mae_bench.reporting.statistics import bootstrap, holm, impossible, mcnemar, over_classes, paired, summarise

PERCENT = st.floats(0, 100, allow_nan=False).map(lambda value: round(value, 2))


def test_bootstrap_is_scipys_and_the_same_in_any_order() -> None:
    values = [57.2, 56.1, 56.9, 57.7, 56.4]
    low, high = bootstrap(values)
    assert min(values) < low < sum(values) / 5 < high < max(values)
    assert (low, high) == bootstrap(values[::-1])
    t = summarise(values)
    assert t.low < low and high < t.high  # too narrow for five seeds: why the table's interval is the other
    assert bootstrap([1.0, 1.0, 1.0]) == (1.0, 1.0)
    assert all(math.isnan(end) for end in bootstrap([1.0, 2.0]))
    assert all(math.isnan(end) for end in bootstrap([1.0, 2.0, math.nan]))


def test_summary_of_three_seeds() -> None:
    found = summarise([83.4, 83.6, 83.8])
    assert (found.n, found.mean, found.std) == (3, pytest.approx(83.6), pytest.approx(0.2))
    assert found.high - found.mean == pytest.approx(4.302653 * 0.2 / math.sqrt(3), rel=1e-6)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


@given(st.lists(PERCENT, min_size=2, max_size=10).filter(lambda values: len(set(values)) > 1))
def test_the_interval_is_scipys(values: list[float]) -> None:
    found = summarise(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("value", [70.1, 0.0, 100.0])
def test_equal_values_have_no_spread(value: float) -> None:
    found = summarise([value] * 3)
    assert (found.mean, found.std, found.low, found.high) == (value, 0.0, value, value)


@pytest.mark.parametrize("values", [[], [80.0], [80.0, math.nan], [80.0, math.inf, 81.0]])
def test_what_cannot_be_said_is_nan(values: list[float]) -> None:
    found = summarise(values)
    assert found.n == len(values)
    assert math.isnan(found.std) and math.isnan(found.low) and math.isnan(found.high)
    assert found.mean == 80.0 if len(values) == 1 else math.isnan(found.mean)


def test_a_resampled_interval_covers_too_little() -> None:
    """Three seeds, true mean 0, 2000 times: Student's t keeps its promise, the percentile bootstrap cannot."""
    x = np.random.default_rng(0).standard_normal((2000, 3))
    resamples = np.array(list(itertools.product(range(3), repeat=3)))
    means = x[:, resamples].mean(axis=2)  # all 27: no sampling error
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    intervals = [summarise(row) for row in x]
    assert 0.93 < np.mean([one.low <= 0 <= one.high for one in intervals]) < 0.97
    assert np.mean((low <= 0) & (high >= 0)) < 0.80


SEEDS = {0: (57.0, 55.0), 1: (56.1, 55.2), 2: (58.0, 55.9), 3: (55.5, 55.7), 4: (57.7, 54.9), 5: (56.0, 55.0)}


def test_paired_seeds() -> None:
    first, second = ({seed: pair[i] for seed, pair in SEEDS.items()} for i in (0, 1))
    found = paired(first | {9: 1.0}, {7: 2.0} | dict(reversed(second.items())))
    expected = stats.ttest_rel(list(first.values()), list(second.values()))
    interval = expected.confidence_interval(0.95)
    assert (found.n, found.test) == (6, "paired t")
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.exact == 4 / 64  # by hand: only -0.2 opposes, and flipping it is the one way to a larger sum


@given(st.lists(st.tuples(PERCENT, PERCENT), min_size=2, max_size=8))
def test_sign_flips_are_counted(pairs: list[tuple[float, float]]) -> None:
    found = paired(dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs)))
    cents = [round(100 * a) - round(100 * b) for a, b in pairs]
    flips = [
        sum(s * c for s, c in zip(signs, cents, strict=True)) for signs in itertools.product((1, -1), repeat=len(cents))
    ]
    assert found.exact == sum(abs(total) >= abs(sum(cents)) for total in flips) / len(flips)
    assert found.difference == pytest.approx(sum(cents) / 100 / len(cents), abs=1e-9)
    other = paired(dict(enumerate(b for _, b in pairs)), dict(enumerate(a for a, _ in pairs)))
    assert (other.difference, other.p) == (pytest.approx(-found.difference), pytest.approx(found.p, nan_ok=True))


@pytest.mark.parametrize("gap", [0.1, 40.0])
def test_equal_differences_allow_no_test(gap: float) -> None:
    """Nothing to hold the difference against: 'within noise' would be said of any effect."""
    second = {0: 50.0, 1: 60.0, 2: 70.0}
    found = paired({seed: value + gap for seed, value in second.items()}, second)  # floats: not equal to the last bit
    assert (found.exact, found.test) == (0.25, "none: the differences have no spread")
    assert all(math.isnan(value) for value in (found.p, found.low, found.high))
    assert found.difference == pytest.approx(gap)


def test_equal_values_do_not_differ() -> None:
    found = paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert (found.difference, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [("mIoU", 950.0, "[0, 100]"), ("top1", -0.1, "[0, 100]"), ("top1", 100.0, ""), ("val_loss", 950.0, ""),
     ("loss", -1.0, "[0, ∞)"), ("top1", 0.0, "")],
)  # fmt: skip
def test_impossible_values(metric: str, value: float, expected: str) -> None:
    assert impossible(metric, value) == expected


@pytest.mark.parametrize(
    ("first", "second", "n", "test"),
    [
        ({}, {}, 0, "fewer than two pairs"),
        ({0: 1.0, 1: 2.0}, {1: 2.5, 2: 0.0}, 1, "fewer than two pairs"),
        ({0: 1.0, 1: math.nan}, {0: 2.0, 1: 3.0}, 2, "a value is undefined"),
    ],
)
def test_no_test_without_pairs(first: dict[int, float], second: dict[int, float], n: int, test: str) -> None:
    found = paired(first, second)
    assert (found.n, found.test) == (n, f"none: {test}")
    assert all(math.isnan(value) for value in (found.p, found.low, found.high, found.exact))


def test_many_pairs_are_not_enumerated() -> None:
    x = np.random.default_rng(1).normal(1, 1, 20)
    found = paired(dict(enumerate(x.tolist())), dict.fromkeys(range(20), 0.0))
    assert math.isnan(found.exact) and found.p == pytest.approx(stats.ttest_1samp(x, 0).pvalue)


def test_mcnemar_by_hand() -> None:
    first = [True] * 60 + [True] * 8 + [False] * 2 + [False] * 30
    second = [True] * 60 + [False] * 8 + [True] * 2 + [False] * 30
    found = mcnemar(first, second)
    assert (found.n, found.only_first, found.only_second) == (100, 8, 2)
    assert found.difference == pytest.approx(6.0)
    assert found.p == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert found.low < 0 < found.difference < found.high  # not significant, and the interval says so, too


def test_mcnemar_of_equal_predictions() -> None:
    found = mcnemar([True, False], [True, False])
    assert (found.difference, found.p) == (0.0, 1.0)
    assert found.low < 0 < found.high


@pytest.mark.parametrize(("first", "second"), [([], []), ([True], [True, False]), ([[True]], [[True]])])
def test_mcnemar_wants_the_same_images(first: list[bool], second: list[bool]) -> None:
    with pytest.raises(ValueError, match="equally long"):
        mcnemar(first, second)


@pytest.mark.filterwarnings("error")
def test_classes_are_described() -> None:
    found = over_classes({"a": 5.0, "b": 4.0, "c": 3.0, "d": math.nan}, {"a": 1.0, "b": 4.5, "c": 3.0, "d": 2.0})
    assert (found.n, found.above, found.below, found.median) == (3, 1, 1, 0.0)
    assert found.p == pytest.approx(1.0)
    many = {str(i): float(i) for i in range(40)}
    assert over_classes(many, {key: value - 1 - value / 50 for key, value in many.items()}).p < 1e-6
    assert over_classes({"a": 1.0}, {"a": 1.0}).p == 1.0
    assert math.isnan(over_classes({"a": 1.0}, {"b": 1.0}).p)


def test_holm_by_hand() -> None:
    assert holm([0.01, math.nan, 0.04, 0.03]) == pytest.approx([0.03, math.nan, 0.06, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_never_lowers_and_keeps_the_order(values: list[float]) -> None:
    adjusted = holm(values)
    assert all(p <= q <= 1 for p, q in zip(values, adjusted, strict=True))
    assert [q for _, q in sorted(zip(values, adjusted, strict=True))] == sorted(adjusted)
