"""From runs to cells: which runs count, mean and spread over seeds, and the difference of two initialisations.

A cell is one backbone (with its own weights, or with given ones) in one column; a column is one task, protocol and
metric. Runs of two protocols never meet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from mae_bench.reporting.statistics import Paired, holm, paired, summarise

COLUMN = ["task", "protocol", "metric"]
ROW = ["backbone", "given"]
CELL = [*COLUMN, *ROW]
ENGINES = ["classification", "detection", "segmentation"]
SIZES = ["t", "s", "b", "l", "h"]
INITS = ["scratch", "supervised", "moco_v3", "dino", "beit", "beit_v2", "dinov2", "mae"]  # baselines first
FIRST = ["engine", "size", "init", "ours", "eval_only", "trivial"]  # equal in all runs of a cell
MEASURED = ["n", "mean", "std", "low", "high", "best", "mixed", "data", "other_code", "stale", "seeds", "values",
            "files"]  # fmt: skip
MARKED = ["eval_only", "mixed", "data", "other_code", "stale"]  # what a reader of one cell must know
THRESHOLD = 0.05


def select(runs: pd.DataFrame, *, stale: bool = False) -> tuple[pd.DataFrame, list[str]]:
    """The runs (of `store.frame`) that a table counts, and one line for each kind that it leaves out.

    Smoke runs and pre-training runs never count, and those that `staleness.judge` found stale only with ``stale``. An
    evaluation of a trained model counts only where the cell has no training run. Within a cell only the newest run's
    recipe counts, and of each seed the newest run. Those that do not have the metric are left out at the end: none of
    them gives its place to an older run.
    """
    smoke = runs["smoke"].astype(bool)
    pretraining = ~smoke & (runs["engine"] == "pretraining")
    old = runs["stale"].where(~smoke & ~pretraining, "") if "stale" in runs and not stale else None
    counted = runs[~smoke & ~pretraining & (True if old is None else old == "")].sort_values(
        [*CELL, "created", "digest"]
    )
    left = set() if old is None else set(zip(old, runs["digest"], strict=True))  # once a run, whatever its metrics
    reasons = Counter(reason for reason, _ in left if reason)
    current = set(counted["digest"])
    cell = counted.groupby(CELL, sort=False)
    counted = counted[counted["eval_only"] == cell["eval_only"].transform("all")]
    newest = counted.groupby(CELL, sort=False)["recipe_hash"].transform("last")
    counted = counted[counted["recipe_hash"] == newest]
    # A training run is one of its seed; an evaluation is one of its model.
    sample = counted["seed"].astype(str).where(~counted["eval_only"], counted["weights"])
    counted = counted.assign(sample=sample).drop_duplicates([*CELL, "sample"], keep="last")
    lacking = counted[~counted["measured"]]
    notes = [
        (runs["digest"][smoke].nunique(), "smoke: two steps on made data measure nothing"),
        (runs["digest"][pretraining].nunique(), "pre-training: no transfer result"),
        (
            len(current - set(counted["digest"])),
            "superseded by a newer run of the same seed, by a newer recipe, or by a training run",
        ),
        *((len(found), f"no metric {metric}") for metric, found in lacking.groupby("metric")),
        *((count, f"stale: {reason}; --stale takes them in") for reason, count in sorted(reasons.items())),
    ]
    lines = [f"{count} run{'s' if count > 1 else ''} left out ({why})" for count, why in notes if count]
    return counted[counted["measured"]], lines


def cells(runs: pd.DataFrame, *, each_run: bool = False) -> pd.DataFrame:
    """One row a cell of the runs that `select` chose: columns in a table's order, baselines first.

    ``mean``, ``std`` (sample standard deviation), ``low`` and ``high`` are `statistics.summarise`'s of the ``n`` runs;
    all are nan if any run's value is undefined. ``best`` is the mean of the runs' best values. ``values`` maps seeds to
    values (an evaluation's: weight files). ``mixed`` says that the runs have different weight files, ``data``
    holds the fingerprints of their data. ``other_code`` says that some were made by code that is not this tree's;
    ``stale`` holds the reasons why some are stale.
    ``each_run`` makes every run a cell of its own.
    """
    names = [*CELL, *FIRST, *MEASURED]
    found = [part for group in _groups(runs) for part in ([[run] for run in group] if each_run else [group])]
    table = pd.DataFrame(map(_cell, found), columns=names)
    ranks = {"engine": ENGINES, "size": SIZES, "init": INITS}
    order = {f"_{name}": table[name].map(known.index) for name, known in ranks.items()}
    by = ["_engine", *COLUMN, "_size", "_init", *ROW]
    return table.assign(**order).sort_values(by, ignore_index=True, kind="stable").drop(columns=list(order))


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _groups(runs: pd.DataFrame) -> Iterator[list[dict[str, Any]]]:
    """The runs of each cell, in the order of their seeds."""
    found = rows(runs.sort_values([*CELL, "seed", "created", "digest"]))
    for _, group in groupby(found, key=lambda run: tuple(run[name] for name in CELL)):
        yield list(group)


def _cell(group: list[dict[str, Any]]) -> dict[str, Any]:
    first = group[0]
    summary = summarise([run["value"] for run in group])
    return {name: first[name] for name in (*CELL, *FIRST)} | {
        "n": summary.n,
        "mean": summary.mean,
        "std": summary.std,
        "low": summary.low,
        "high": summary.high,
        "best": float(np.mean([run["best"] for run in group])),
        "mixed": len({run["weights"] for run in group}) > 1,
        "data": tuple(sorted({run["data"] for run in group})),
        "other_code": any(run.get("other_code", False) for run in group),
        "stale": tuple(sorted({run.get("stale", "") for run in group} - {""})),
        "seeds": " ".join(str(run["seed"]) for run in group),
        "values": {run["weights"] if run["eval_only"] else run["seed"]: run["value"] for run in group},
        "files": tuple(sorted(filter(None, (run.get("file", "") for run in group)))),
    }


def compare(runs: pd.DataFrame, first: str, second: str, *, stale: bool = False) -> pd.DataFrame:
    """Difference of two initialisations (e.g. "mae", "scratch"), one row per column, size and pair of backbones.

    Where two or more seeds have runs of both sides, ``difference``, ``low``, ``high`` and ``p`` are those of
    `statistics.paired` over these ``pairs``; otherwise ``difference`` is that of the means. ``adjusted`` is ``p`` by
    Holm's method over all rows: every row asks the same question again. ``bound`` is 2 sqrt(s1^2 + s2^2) of the two
    sample standard deviations. ``verdict``: 'above' or 'below' where ``adjusted`` is under 0.05 (without pairs: where
    the difference exceeds the bound), 'within' where not, 'no spread' where all pairs differ by one value, 'one run'
    where a side has no more, 'other data' where not all runs had the same data, or 'undefined'.
    """
    table = cells(select(runs, stale=stale)[0])
    keep = [*CELL, "size", "n", "mean", "std", "values", *MARKED]
    pairs = table.loc[table["init"] == first, keep].merge(
        table.loc[table["init"] == second, keep], on=[*COLUMN, "size"], suffixes=("_1", "_2")
    )
    found = [_paired(pair) for pair in rows(pairs)]
    adjusted = holm([one.p for one in found])
    means = pairs["mean_1"] - pairs["mean_2"]
    bound = 2 * np.sqrt(pairs["std_1"] ** 2 + pairs["std_2"] ** 2)
    pairs["difference"] = [one.difference if one.n > 1 else mean for one, mean in zip(found, means, strict=True)]
    pairs["bound"] = bound
    for name in ("low", "high", "p"):
        pairs[name] = [getattr(one, name) for one in found]
    pairs["adjusted"] = adjusted
    pairs["pairs"] = [one.n for one in found]
    pairs["verdict"] = [_verdict(pair) for pair in rows(pairs)]
    return pairs.drop(columns=["values_1", "values_2"])


def _paired(pair: dict[str, Any]) -> Paired:
    """Runs pair by seed; evaluations of trained models have none, and runs on other data are no pairs."""
    sides: list[dict[Hashable, float]] = [pair["values_1"], pair["values_2"]]
    if pair["eval_only_1"] or pair["eval_only_2"] or _other_data(pair):
        sides = [{}, {}]
    return paired(sides[0], sides[1])


def _other_data(pair: dict[str, Any]) -> bool:
    return len({*pair["data_1"], *pair["data_2"]}) > 1


def _verdict(pair: dict[str, Any]) -> str:
    difference, bound, p = pair["difference"], pair["bound"], pair["adjusted"]
    if math.isnan(difference):
        return "undefined"
    if _other_data(pair):
        return "other data"
    if math.isnan(p) and pair["pairs"] > 1:
        return "no spread"
    if math.isnan(p) and math.isnan(bound):
        return "one run"
    if (p >= THRESHOLD) if not math.isnan(p) else (abs(difference) <= bound):
        return "within"
    return "above" if difference > 0 else "below"
