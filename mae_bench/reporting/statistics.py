"""What a few seeds, pairs of seeds and pairs of predictions allow to say. Imports no torch; scipy only when used.

Numbers are in the metric's unit (percent points), p-values two-sided and not corrected: a caller that tests several
differences at once passes them through `holm`. A value that is undefined (nan) makes every result undefined; nothing
is dropped unsaid. docs/statistics.md gives the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
ENUMERATED = 16  # pairs up to which every one of the 2^n sign flips is looked at


@dataclass(frozen=True)
class Summary:
    """Values of ``n`` seeds: their mean, sample standard deviation and the 95 % interval of the mean."""

    n: int
    mean: float
    std: float  # nan for n < 2
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """``first`` - ``second`` over the ``n`` keys that both have, with the 95 % interval of its mean."""

    n: int
    difference: float
    low: float
    high: float
    p: float
    test: str  # what ``p`` is from
    exact: float  # p of the sign-flip test; nan for more than `ENUMERATED` pairs


@dataclass(frozen=True)
class McNemar:
    """Two predictions of the same ``n`` images: how many each alone has right; first - second in percent points."""

    n: int
    only_first: int  # images that only the first has right
    only_second: int
    difference: float
    low: float
    high: float
    p: float
    test: str = "exact McNemar"


@dataclass(frozen=True)
class Classes:
    """Differences over classes, as a description: classes share images and weights, so they are no sample."""

    n: int  # classes that both define
    above: int  # where the first is higher
    below: int
    median: float
    p: float  # Wilcoxon signed-rank


def summarise(values: Sequence[float]) -> Summary:
    """Mean, spread and Student's t interval of the mean of ``values``, one per seed.

    Why `bootstrap`'s interval is not the one: the mean of a resample lies between the smallest and the largest value,
    so a percentile or BCa interval of n values covers the mean of a symmetric distribution at most 1 - 2^(1-n) of the
    time: 75 % for 3 seeds, 94 % for 5. Even of an exponential distribution the t interval covers more for every n up to
    20 (tests/test_reporting_statistics.py repeats it). Equal values give an interval of width 0, one value none (nan).
    """
    x = np.asarray(values, dtype=float)
    if len(x) == 0 or not np.isfinite(x).all():
        return Summary(len(x), math.nan, math.nan, math.nan, math.nan)
    mean, std = _mean(x), _std(x)
    low, high = _interval(mean, std, len(x))
    return Summary(len(x), mean, std, low, high)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % BCa bootstrap interval of the mean (Efron 1987; `scipy.stats.bootstrap`), always the same for the same
    values in any order. For few seeds it is too narrow (`summarise`). nan for fewer than three values.
    """
    x = np.sort(np.asarray(values, dtype=float))
    if len(x) < 3 or not np.isfinite(x).all():
        return math.nan, math.nan
    if x[0] == x[-1]:
        return float(x[0]), float(x[0])
    from scipy.stats import bootstrap

    generator = np.random.default_rng(0)
    found = bootstrap((x,), np.mean, n_resamples=RESAMPLES, confidence_level=LEVEL, rng=generator).confidence_interval
    return float(found.low), float(found.high)


def paired(first: Mapping[Hashable, float], second: Mapping[Hashable, float]) -> Paired:
    """Compare two sets of runs that pair by key, usually the seed; keys that only one side has are left out.

    ``p`` is the paired t test's, the dual of the interval. ``exact`` assumes no normal distribution, only that a
    difference is as likely as its negative under the null hypothesis: the share of the 2^n sign flips whose sum is at
    least as extreme. It cannot fall below 2^(1-n): five pairs or fewer never reach 0.05. Where all differences are one
    value other than 0 there is no spread to hold it against: neither p nor interval. Pairs of equal values have p = 1.
    """
    keys = sorted((key for key in first if key in second), key=str)
    x = np.array([first[key] - second[key] for key in keys], dtype=float).round(10)  # 50.1 - 50 is 60.1 - 60
    if len(x) < 2 or not np.isfinite(x).all():
        test = "none: a value is undefined" if len(x) >= 2 else "none: fewer than two pairs"
        return Paired(len(x), _mean(x) if len(x) else math.nan, math.nan, math.nan, math.nan, test, math.nan)
    mean, std, exact = _mean(x), _std(x), _sign_flip(x)
    if std == 0 and mean != 0:
        return Paired(len(x), mean, math.nan, math.nan, math.nan, "none: the differences have no spread", exact)
    low, high = _interval(mean, std, len(x))
    if std == 0:
        return Paired(len(x), 0.0, 0.0, 0.0, 1.0, "none: all pairs are equal", exact)
    from scipy.special import stdtr

    p = 2 * float(stdtr(len(x) - 1, -abs(mean) / (std / math.sqrt(len(x)))))
    return Paired(len(x), mean, low, high, p, "paired t", exact)


def mcnemar(first: Sequence[bool] | np.ndarray, second: Sequence[bool] | np.ndarray) -> McNemar:
    """Compare two runs image by image: is an image that only one of them has right as often the first's?

    Only those images carry information; given their number, the first's share is binomial with 1/2 under the null
    hypothesis, so p is exact for any number of them. This is about the two trained models on this set of images, not
    about two recipes: another seed moves the answer. The interval is Agresti and Min's (2005, adjusted Wald: half an
    image added to each of the four counts).

    Args:
        first, second: whether each image is right, in one order.

    Raises:
        ValueError: no images, or two numbers of images.
    """
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ValueError(f"expected two equally long lists of images, got shapes {a.shape} and {b.shape}")
    from scipy.stats import binomtest

    n, only_first, only_second = len(a), int((a & ~b).sum()), int((b & ~a).sum())
    discordant, excess = only_first + only_second, only_first - only_second
    p = float(binomtest(only_first, discordant).pvalue) if discordant else 1.0
    centre, wide = excess / (n + 2), _normal() * math.sqrt(discordant + 1 - excess**2 / (n + 2)) / (n + 2)
    low, high = max(centre - wide, -1.0), min(centre + wide, 1.0)
    return McNemar(n, only_first, only_second, 100 * excess / n, 100 * low, 100 * high, p)


def over_classes(first: Mapping[str, float], second: Mapping[str, float]) -> Classes:
    """How the classes that both define (no nan) moved; Wilcoxon's signed-rank test leaves out those that did not."""
    x = np.array([first[key] - second[key] for key in sorted(first.keys() & second.keys())], dtype=float)
    x = x[np.isfinite(x)]
    if not len(x):
        return Classes(0, 0, 0, math.nan, math.nan)
    p = 1.0
    if moved := x[x != 0].tolist():
        from scipy.stats import wilcoxon

        p = float(wilcoxon(moved).pvalue)
    return Classes(len(x), int((x > 0).sum()), int((x < 0).sum()), float(np.median(x)), p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of tests that are made together (Holm 1979): the chance of one false finding among all of them
    is at most the threshold, whatever their dependence. nan is no test and stays nan.
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, highest = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        adjusted[i] = highest
    return adjusted


def lower_is_better(metric: str) -> bool:
    """Losses are, as in the pipelines' ``best``; every other metric of ours is a percentage of what is right."""
    return "loss" in metric


def impossible(metric: str, value: float) -> str:
    """The range that a value is outside of, or an empty string: a loss is not negative, a percentage in [0, 100]."""
    lower = lower_is_better(metric)
    return "" if value >= 0 and (lower or value <= 100) else "[0, ∞)" if lower else "[0, 100]"


def quantile(freedom: float) -> float:
    """Student's t for a 95 % interval at that many degrees of freedom: 12.7 at 1, 4.3 at 2, 2.8 at 4, 2.0 at 60."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def _normal() -> float:
    from scipy.special import ndtri

    return float(ndtri((1 + LEVEL) / 2))


def _mean(x: np.ndarray) -> float:
    # Equal values have exactly their own mean; a sum of floats may miss it.
    return float(x[0]) if (x == x[0]).all() else float(x.mean())


def _std(x: np.ndarray) -> float:
    if len(x) < 2:
        return math.nan
    return 0.0 if (x == x[0]).all() else float(x.std(ddof=1))


def _interval(mean: float, std: float, n: int) -> tuple[float, float]:
    if n < 2 or not math.isfinite(std):
        return math.nan, math.nan
    wide = quantile(n - 1) * std / math.sqrt(n) if std else 0.0
    return mean - wide, mean + wide


def _sign_flip(x: np.ndarray) -> float:
    """Exact two-sided p of the sign-flip (permutation) test of a mean of zero."""
    if len(x) > ENUMERATED:
        return math.nan
    sums = np.zeros(1)
    for value in x:
        sums = np.concatenate([sums + value, sums - value])
    # Sums that are equal on paper must count as equal.
    return float((np.abs(sums) >= abs(x.sum()) - 1e-9 * np.abs(x).sum()).mean())
