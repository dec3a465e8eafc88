"""Is a number of ours the published one; and which numbers look wrong by themselves. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from statistics import median
from typing import Any, Literal

import pandas as pd

from mae_bench.reporting.published import Published
from mae_bench.reporting.record import one_line
from mae_bench.reporting.statistics import Summary, impossible, lower_is_better, quantile, summarise

Kind = Literal["within", "low", "above", "one seed", "no spread", "undefined"]


@dataclass(frozen=True)
class Verdict:
    """``sigmas``: (ours - published) in standard errors of that difference; nan where there is no spread to say it."""

    kind: Kind
    text: str
    sigmas: float


def against(summary: Summary, published: Published, protocol: str | None = None) -> Verdict:
    """What a cell of ours says beside the published number of its protocol, weights and metric.

    Under the hypothesis that both are draws of one distribution, the difference of our mean over n seeds from a mean
    of k published runs has the variance s^2/n + t^2/k, s being our sample standard deviation and t the published one.
    A number of which the source does not say what it averages is one draw: k = 1. Where no t is published those runs
    are taken to scatter as ours do, t = s: this is Student's prediction interval of one more run. The number was also
    rounded when it was printed, which adds u^2/12, u being one unit of its last digit.

    'within noise' is a difference that a t test (Welch's degrees of freedom) accepts at 5 %: 3 seeds need 4.3 standard
    errors to be 'low', 5 seeds 2.8. 'low' is worse than published, for a loss too; 'above' is better and asks for a
    check, since an evaluation that sees the labels is as likely a cause as a better model. One seed gets no verdict.

    Args:
        protocol: of the cell; given, it is compared with the published one.

    Raises:
        ValueError: the number is unverified or of no protocol or another one. Never a verdict across protocols.
    """
    if published.protocol_id == "none" or not published.verified or protocol not in (None, published.protocol_id):
        raise ValueError(f"no verdict on protocol '{protocol}' from a number of '{published.protocol_id}'")
    gap = summary.mean - published.value
    if math.isnan(gap):
        return Verdict("undefined", "undefined", math.nan)
    if summary.n < 2:
        return Verdict("one seed", f"one seed: {gap:+.1f}", math.nan)
    variance, freedom = _noise(summary, published)
    if not freedom:
        return Verdict("no spread", f"no spread over seeds: {gap:+.1f}", math.nan)
    sigmas = gap / math.sqrt(variance)
    if abs(sigmas) <= quantile(freedom):
        return Verdict("within", "within noise", sigmas)
    if (gap > 0) == lower_is_better(published.metric):
        return Verdict("low", f"low by {abs(sigmas):.1f}σ", sigmas)
    return Verdict("above", f"above by {abs(sigmas):.1f}σ: check", sigmas)


def _noise(summary: Summary, published: Published) -> tuple[float, float]:
    """Variance of the difference and its degrees of freedom (Welch-Satterthwaite); 0 where nothing was measured."""
    runs = published.n or 1
    if published.std is None or published.std_n is None:
        parts = [(summary.std**2 * (1 / summary.n + 1 / runs), summary.n - 1)]
    else:
        parts = [(summary.std**2 / summary.n, summary.n - 1), (published.std**2 / runs, published.std_n - 1)]
    total = sum(part for part, _ in parts)
    if not total:
        return 0.0, 0.0
    freedom = total**2 / sum(part**2 / own for part, own in parts)
    return total + _unit(published.value) ** 2 / 12, freedom


def _unit(value: float) -> float:
    """One unit of the last printed digit; at most a tenth, since 68.0 is printed with its zero."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    return 10.0 ** min(int(exponent), -1)


FlagKind = Literal["undefined", "impossible", "chance", "identical", "dead seed", "spread"]
RUN = ["task", "metric", "protocol", "backbone", "given", "recipe_hash"]  # equal = seeds of one thing
MARGIN = 0.5  # percent points (percent, for a loss) above a trivial prediction that are nothing
WIDE = 5.0  # times the usual spread of a column; without a usual one, percent points


@dataclass(frozen=True)
class Flag:
    """Something that a person should look at before believing a table. ``runs``: record files, else run ids."""

    kind: FlagKind
    runs: tuple[str, ...]
    text: str


def flags(frame: pd.DataFrame) -> list[Flag]:
    """What looks wrong in the runs of `store.frame`, in a fixed order. Smoke runs, and runs without the metric, are
    passed over.

    - undefined, impossible: no number, one outside [0, 100], or a best evaluation that is worse than the last one
    - chance: within twice the spread over seeds of a trivial prediction, or within half a point of it
    - identical: runs of different recipes or backbones with the same value at every seed that they share. An option
      that does nothing looks like this; so do weights that never arrived. Equal accuracies on few images may be an
      accident: a frame of a loss (``metric="val_loss"``) decides, since it has all the digits
    - dead seed: different seeds with one value
    - spread: five times as wide as is usual for the task, or five points where fewer than three cells tell what is
    """
    runs = frame[~frame["smoke"].astype(bool) & frame["measured"]].sort_values([*RUN, "seed", "created", "digest"])
    named = runs.assign(name=[_name(row) for row in runs.to_dict("records")])
    found = [flag for row in named.to_dict("records") for flag in _impossible(row)]
    trained = named[~named["eval_only"].astype(bool) & named["value"].notna()].drop_duplicates(
        [*RUN, "seed"], keep="last"
    )
    groups = [_Group.of(rows) for _, rows in trained.groupby(RUN, sort=True)]
    for one in groups:
        found += [*one.chance(), *one.dead()]
    return found + _identical([one for one in groups if not one.trivially_equal]) + _wide(groups)


def _name(row: dict[Hashable, Any]) -> str:
    return str(row.get("file") or row["run_id"])


def _impossible(row: dict[Hashable, Any]) -> Iterator[Flag]:
    value, best, metric = row["value"], row["best"], row["metric"]
    label = one_line(f"{row['task']} {row['backbone']} seed {row['seed']}: {metric}")
    lower = lower_is_better(metric)
    if math.isnan(value):
        yield Flag("undefined", (row["name"],), f"{label} is undefined")
    elif outside := impossible(metric, value):
        yield Flag("impossible", (row["name"],), f"{label} is {value:g}, outside {outside}")
    if (best > value if lower else best < value) and not math.isclose(best, value, rel_tol=1e-6):
        yield Flag("impossible", (row["name"],), f"{label} is {value:g} at the end, and the best of all is {best:g}")


@dataclass(frozen=True)
class _Group:
    """Trained runs that differ in their seed alone, without undefined values."""

    key: tuple[Any, ...]
    label: str
    names: tuple[str, ...]
    values: dict[int, float]
    trivial: float
    summary: Summary

    @classmethod
    def of(cls, rows: pd.DataFrame) -> _Group:
        first = rows.iloc[0]
        values = {int(seed): float(value) for seed, value in zip(rows["seed"], rows["value"], strict=True)}
        label = one_line(f"{first['task']} {first['backbone']} {first['protocol']} {first['metric']}")
        key, names = tuple(first[RUN]), tuple(rows["name"])
        return cls(key, label, names, values, float(first["trivial"]), summarise(list(values.values())))

    @property
    def trivially_equal(self) -> bool:
        """Nothing and everything right are values that recipes may share."""
        return all(value in (0.0, 100.0, self.trivial) for value in self.values.values())

    def chance(self) -> Iterator[Flag]:
        lower = lower_is_better(self.key[1])
        gain = self.trivial - self.summary.mean if lower else self.summary.mean - self.trivial
        margin = MARGIN / 100 * abs(self.trivial) if lower else MARGIN
        spread = 0.0 if math.isnan(self.summary.std) else 2 * self.summary.std
        if gain <= max(margin, spread):  # False where no trivial prediction is known
            text = f"{self.label}: {self.summary.mean:.4g} is no better than a trivial prediction's {self.trivial:.4g}"
            yield Flag("chance", self.names, text)

    def dead(self) -> Iterator[Flag]:
        if len(self.values) > 1 and self.summary.std == 0 and not self.trivially_equal:
            yield Flag(
                "dead seed", self.names, f"{self.label}: {self.summary.n} seeds, one value {self.summary.mean:g}"
            )


def _identical(groups: list[_Group]) -> list[Flag]:
    """Each set of groups of one task and metric that agree, to the last digit, on every seed that all of them have."""
    places: dict[tuple[Any, ...], list[_Group]] = {}
    for one in groups:
        for seed, value in one.values.items():
            places.setdefault((*one.key[:2], seed, value), []).append(one)
    found: dict[tuple[str, ...], Flag] = {}
    for (_, metric, seed, value), members in places.items():
        shared = set.intersection(*(set(one.values) for one in members))
        agree = all(len({one.values[other] for one in members}) == 1 for other in shared)
        if len(members) > 1 and agree:
            who = "; ".join(one_line(f"{one.key[3]} {one.key[2]}", 100) for one in members[:4])
            more = f"; and {len(members) - 4} more" if len(members) > 4 else ""
            seeds = f"seed {seed}" if len(shared) == 1 else f"all {len(shared)} shared seeds"
            text = f"{one_line(members[0].key[0])} {one_line(metric)} {value:g} is identical at {seeds}: {who}{more}"
            names = tuple(name for one in members for name in one.names)
            found.setdefault(names, Flag("identical", names, text))
    return list(found.values())


def _wide(groups: list[_Group]) -> list[Flag]:
    columns: dict[tuple[Any, ...], list[_Group]] = {}
    for one in groups:
        if one.summary.n > 2:
            columns.setdefault(one.key[:2], []).append(one)
    found = []
    for (_, metric), members in columns.items():
        percent = not lower_is_better(metric)
        for one in members:
            others = [other.summary.std for other in members if other is not one]
            if len(others) > 2:
                usual = median(others)
                limit, told = max(WIDE * usual, MARGIN if percent else 0.0), f"usual is {usual:.3g}"
            else:
                limit, told = WIDE if percent else math.inf, "that is wide for any task"
            if one.summary.std > limit:
                text = f"{one.label}: {one.summary.n} seeds spread by {one.summary.std:.3g}; {told}"
                found.append(Flag("spread", one.names, text))
    return found
