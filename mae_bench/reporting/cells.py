"""From runs to cells: which runs count, mean and spread over seeds, and the difference of two initialisations.

A cell is one backbone (with its own weights, or with given ones) in one column; a column is one task, protocol and
metric. Runs of two protocols never meet.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

COLUMN = ["task", "protocol", "metric"]
ROW = ["backbone", "given"]
CELL = [*COLUMN, *ROW]
ENGINES = ["classification", "detection", "segmentation"]
SIZES = ["t", "s", "b", "l", "h"]
INITS = ["scratch", "supervised", "moco_v3", "dino", "beit", "beit_v2", "dinov2", "mae"]  # baselines first


def select(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The runs (of `store.frame`) that a table counts, and one line for each kind that it leaves out.

    Smoke runs and pre-training runs never count. An evaluation of a trained model counts only where the cell has no
    training run. Within a cell only the newest run's recipe counts, and of each seed the newest run.
    """
    smoke = runs["smoke"].astype(bool)
    pretraining = ~smoke & (runs["engine"] == "pretraining")
    counted = runs[~smoke & ~pretraining].sort_values([*CELL, "created", "digest"])
    cell = counted.groupby(CELL, sort=False)
    counted = counted[counted["eval_only"] == cell["eval_only"].transform("all")]
    newest = counted.groupby(CELL, sort=False)["recipe_hash"].transform("last")
    counted = counted[counted["recipe_hash"] == newest]
    # A training run is one of its seed; an evaluation is one of its model.
    sample = counted["seed"].astype(str).where(~counted["eval_only"], counted["weights"])
    counted = counted.assign(sample=sample).drop_duplicates([*CELL, "sample"], keep="last")
    superseded = len(runs) - int(smoke.sum()) - int(pretraining.sum()) - len(counted)
    notes = [
        (int(smoke.sum()), "smoke: two steps on made data measure nothing"),
        (int(pretraining.sum()), "pre-training: no transfer result"),
        (superseded, "superseded by a newer run of the same seed, by a newer recipe, or by a training run"),
    ]
    return counted, [f"{count} run{'s' if count > 1 else ''} left out ({why})" for count, why in notes if count]


def cells(runs: pd.DataFrame) -> pd.DataFrame:
    """One row a cell of the runs that `select` chose: columns in a table's order, baselines first.

    ``mean`` and ``std`` (sample standard deviation, nan for one run) are over ``n`` runs; both are nan if any run's
    value is undefined. ``best`` is the mean of the runs' best values. ``mixed`` says that the runs started from
    different weight files.
    """
    rows = []
    for key, group in runs.sort_values(["seed", "created", "digest"]).groupby(CELL, sort=True):
        values = group["value"].to_numpy(dtype=float)
        first = group.iloc[0]
        rows.append(
            dict(zip(CELL, key, strict=True))
            | {name: first[name] for name in ("engine", "size", "init", "ours", "eval_only")}
            | {
                "n": len(group),
                "mean": float(np.mean(values)),
                "std": float(np.std(values, ddof=1)) if len(group) > 1 else math.nan,
                "best": float(np.mean(group["best"].to_numpy(dtype=float))),
                "trivial": first["trivial"],
                "mixed": not first["eval_only"] and group["weights"].nunique() > 1,
                "seeds": " ".join(str(seed) for seed in group["seed"]),
            }
        )
    names = [*CELL, "engine", "size", "init", "ours", "eval_only", "n", "mean", "std", "best", "trivial", "mixed"]
    table = pd.DataFrame(rows, columns=[*names, "seeds"])
    ranks = {"engine": ENGINES, "size": SIZES, "init": INITS}
    order = {f"_{name}": table[name].map(known.index) for name, known in ranks.items()}
    by = ["_engine", *COLUMN, "_size", "_init", *ROW]
    return table.assign(**order).sort_values(by, ignore_index=True).drop(columns=list(order))


def compare(runs: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """Difference of two initialisations, per column and size: ``first`` - ``second`` (e.g. "mae", "scratch").

    ``bound`` is 2 sqrt(s1^2 + s2^2) of the two sample standard deviations over seeds. ``verdict`` is 'above' or 'below'
    where the difference exceeds the bound, 'within' where it does not, and 'no spread' where a side has one run.
    """
    table = cells(select(runs)[0])
    keep = [*CELL, "size", "n", "mean", "std"]
    pairs = table.loc[table["init"] == first, keep].merge(
        table.loc[table["init"] == second, keep], on=[*COLUMN, "size"], suffixes=("_1", "_2")
    )
    pairs["difference"] = pairs["mean_1"] - pairs["mean_2"]
    pairs["bound"] = 2 * np.sqrt(pairs["std_1"] ** 2 + pairs["std_2"] ** 2)
    pairs["verdict"] = [_verdict(*pair) for pair in zip(pairs["difference"], pairs["bound"], strict=True)]
    return pairs


def _verdict(difference: float, bound: float) -> str:
    if math.isnan(difference):
        return "undefined"
    if math.isnan(bound):
        return "no spread"
    if abs(difference) <= bound:
        return "within"
    return "above" if difference > 0 else "below"
