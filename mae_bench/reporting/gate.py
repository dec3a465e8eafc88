"""A gate for a user's CI: fail when a number has fallen by more than its tolerance. docs/gate.md shows the workflow."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pandas as pd
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from mae_bench.errors import UserError
from mae_bench.recipes import explain
from mae_bench.reporting.cells import cells, rows, select
from mae_bench.reporting.files import read_bounded, write_whole
from mae_bench.reporting.record import one_line
from mae_bench.reporting.statistics import impossible, lower_is_better, summarise
from mae_bench.reporting.store import PRIMARY
from mae_bench.schema import Strict

MAX_BYTES = 4 << 20
LEAST_TOLERANCE = 0.5  # percent points
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+:@=,-]*$", max_length=300)]
Status = Literal["ok", "rose", "fell", "missing", "unclear"]
Key = tuple[str, str, str, str, bool]
Cells = dict[Key, list[dict[str, Any]]]
KEY = ["task", "protocol", "backbone", "metric", "eval_only"]


class Baseline(Strict):
    """What a number has to keep to: ``value``, the mean over ``seeds``, give or take ``tolerance``."""

    task: Name
    protocol: Name
    backbone: Name
    metric: Name
    value: float
    tolerance: float = Field(ge=0)  # in the metric's unit: percent points
    higher_is_better: bool | None = None  # for a reader: the metric decides, and what contradicts it is refused
    seeds: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)  # only these count; empty = all there are
    eval_only: bool = False  # evaluations of a trained model count, and else runs that train

    @model_validator(mode="after")
    def _direction(self) -> Baseline:
        if self.higher_is_better == lower_is_better(self.metric):
            better = "lower" if lower_is_better(self.metric) else "higher"
            raise ValueError(f"higher_is_better: {better} is better for {self.metric}; leave the key out")
        return self

    @property
    def key(self) -> Key:
        return self.task, self.protocol, self.backbone, self.metric, self.eval_only

    @property
    def label(self) -> str:
        evaluated = ", evaluated" if self.eval_only else ""
        return f"{self.task} {self.backbone} {self.metric} ({self.protocol}{evaluated})"


@dataclass(frozen=True)
class Result:
    """One baseline held against the runs."""

    baseline: Baseline
    status: Status
    text: str

    def line(self) -> str:
        return f"{self.status:<8} {self.text}"


BASELINES = TypeAdapter(list[Baseline])


def read_baselines(path: Path) -> list[Baseline]:
    """A JSON list of `Baseline`. Raises `UserError` that names the file, the entry and the key."""
    text = read_bounded(path, MAX_BYTES, "no list of baselines", "; `gate --write` makes it from records")
    try:
        found = BASELINES.validate_json(text)
    except ValidationError as error:
        raise UserError(one_line(explain(error, Baseline, str(path)))) from error
    times = Counter(one.key for one in found)
    for one in found:
        if times[one.key] > 1:
            raise UserError(f"{path}: {one.label} stands there twice; keep one")
    if not found:
        raise UserError(f"{path} lists no baseline, so nothing could ever fail; `gate --write` makes some from records")
    return found


def check(baselines: Sequence[Baseline], runs: pd.DataFrame) -> list[Result]:
    """Hold each baseline against the runs that a table counts (`cells.select`), in the order of the baselines.

    Args:
        runs: `store.frame` of the baselines' metrics, judged by `staleness.judge`.
    """
    measured = _measured(runs)
    return [_check(one, measured.get(one.key, []), runs) for one in baselines]


def _measured(runs: pd.DataFrame) -> Cells:
    """The cells of each key; more than one where runs started from different weights that the user gave."""
    found: Cells = {}
    for row in rows(cells(select(runs)[0])):
        task, protocol, backbone, metric, eval_only = (row[name] for name in KEY)
        found.setdefault((task, protocol, backbone, metric, bool(eval_only)), []).append(row)
    return found


def _uncounted(baseline: Baseline, runs: pd.DataFrame, seeds: Sequence[int] = ()) -> str:
    """Why the runs of a baseline, or of some of its seeds, do not count; empty if there are none."""
    own = runs[(runs[KEY[:4]] == list(baseline.key[:4])).all(axis=1) & ~runs["smoke"]]
    if seeds:
        own = own[own["seed"].isin(seeds)]
    reasons = [
        *(f"stale: {reason}" for reason in sorted(set(own.get("stale", ())) - {""})),
        *(["runs without this metric"] if not own["measured"].all() else []),
        *(["evaluations of trained models"] if not baseline.eval_only and own["eval_only"].any() else []),
    ]
    return f" that counts ({'; '.join(reasons)})" if reasons else ""


def _check(baseline: Baseline, cells: list[dict[str, Any]], runs: pd.DataFrame) -> Result:
    label = one_line(baseline.label)
    if not cells:
        return Result(baseline, "missing", f"{label}: no run{_uncounted(baseline, runs)}")
    if len(cells) > 1:
        given = ", ".join(str(cell["given"] or "the backbone's own") for cell in cells)
        return Result(baseline, "unclear", f"{label}: runs of several weights ({given}); name the records of one")
    values = _values(cells[0], baseline.seeds)
    if absent := [seed for seed in baseline.seeds if seed not in values]:
        why = _uncounted(baseline, runs, absent)
        return Result(baseline, "missing", f"{label}: no run of seed {', '.join(map(str, absent))}{why}")
    if len(cells[0]["data"]) > 1:
        return Result(baseline, "unclear", f"{label}: runs on different data; name the records of one")
    summary = summarise(list(values.values()))
    change = summary.mean - baseline.value
    if math.isnan(change):
        return Result(baseline, "unclear", f"{label}: undefined in a run; baseline {baseline.value:g}")
    for value in values.values():
        if outside := impossible(baseline.metric, value):
            return Result(baseline, "unclear", f"{label}: {value:g} in a run, outside {outside}")
    gain = -change if lower_is_better(baseline.metric) else change
    # Differences of printed numbers: 57.0 - 56.5 is 0.5.
    beyond = abs(gain) > baseline.tolerance * (1 + 1e-9) + 1e-9
    status: Status = "ok" if not beyond else "rose" if gain > 0 else "fell"
    hint = "; better than it says: raise the baseline with --write" if status == "rose" else ""
    given = f" given {cells[0]['given']}" if cells[0]["given"] else ""
    text = (
        f"{label}{given}: {summary.mean:.2f} (n={summary.n}), baseline {baseline.value:g} "
        f"± {baseline.tolerance:g}, change {round(change, 2) + 0.0:+.2f}{hint}"
    )
    return Result(baseline, status, text)


def _values(cell: dict[str, Any], seeds: list[int]) -> dict[Any, float]:
    values: dict[Any, float] = cell["values"]
    return {seed: value for seed, value in values.items() if not seeds or seed in seeds}


def failed(results: Iterable[Result], allow_missing: bool = False) -> list[Result]:
    """Those that close the gate."""
    bad = {"fell", "unclear"} | (set() if allow_missing else {"missing"})
    return [result for result in results if result.status in bad]


def report(results: Sequence[Result], allow_missing: bool = False) -> str:
    """A line per baseline and a summary; inside a GitHub Actions job (``GITHUB_ACTIONS``) annotations, too."""
    bad = failed(results, allow_missing)
    lines = [result.line() for result in results]
    if os.environ.get("GITHUB_ACTIONS") == "true":
        lines += [annotation("error", f"{result.status}: {result.text}") for result in bad]
        lines += [
            annotation("notice", f"{result.status}: {result.text}") for result in results if result.status == "rose"
        ]
    counts = {status: sum(result.status == status for result in results) for status in get_args(Status)}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    lines.append(f"{'FAILED' if bad else 'passed'}: {len(results)} baselines, {told}")
    return "\n".join(lines) + "\n"


def annotation(kind: Literal["error", "notice"], message: str) -> str:
    """A workflow command of GitHub Actions (docs.github.com, "Workflow commands"): its data escape %, CR and LF."""
    data = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{kind} title=mae_bench gate::{data}"


def renewed(old: Sequence[Baseline], runs: pd.DataFrame) -> tuple[list[Baseline], list[str]]:
    """Baselines at what the runs hold now, and a line for each change; those without a run stay as they are.

    ``runs`` are as of `check`, with the primary metrics (`store.PRIMARY`). A known baseline keeps its tolerance and its
    seeds. A new one, of each cell's primary metric, gets all its seeds and twice their spread as tolerance, at least
    half a point.
    """
    measured = _measured(runs)
    lines, new = [], []
    for one in old:
        found = measured.pop(one.key, [])
        result = _check(one, found, runs)
        if result.status in ("missing", "unclear"):
            lines.append(f"kept     {result.text}")
            new.append(one)
            continue
        value = round(summarise(list(_values(found[0], one.seeds).values())).mean, 4)
        new.append(one.model_copy(update={"value": value}))
        if value != one.value:
            worse = (value > one.value) == lower_is_better(one.metric)
            lines.append(f"{'LOWERED' if worse else 'raised':<8} {one_line(one.label)}: {one.value:g} -> {value:g}")
    own = set(runs.loc[runs["primary"], KEY].itertuples(index=False, name=None))
    for key, found in sorted(measured.items()):
        if key in own:
            new += _added(found, lines)
    return new, lines


def _added(found: list[dict[str, Any]], lines: list[str]) -> Iterator[Baseline]:
    cell = found[0]
    label = one_line(f"{cell['task']} {cell['backbone']} {cell['metric']} ({cell['protocol']})")
    values = cell["values"].values()
    faults = {
        "runs of several weights": len(found) > 1,
        "runs on different data": len(cell["data"]) > 1,
        "undefined": math.isnan(cell["mean"]),
        "impossible": any(impossible(cell["metric"], value) for value in values),
    }
    if fault := next((fault for fault, holds in faults.items() if holds), ""):
        lines.append(f"left out {label}: {fault}")
        return
    spread = 0.0 if math.isnan(cell["std"]) else 2 * cell["std"]
    baseline = {
        **{name: cell[name] for name in ("task", "protocol", "backbone", "metric")},
        "value": round(cell["mean"], 4),
        "tolerance": round(max(spread, LEAST_TOLERANCE), 2),
        "higher_is_better": not lower_is_better(cell["metric"]),
        "seeds": [] if cell["eval_only"] else sorted(cell["values"]),
        "eval_only": bool(cell["eval_only"]),
    }
    try:
        yield Baseline.model_validate(baseline)
    except ValidationError as error:
        raise UserError(one_line(explain(error, Baseline, f"a baseline for {label}"))) from error
    lines.append(f"new      {label}: {baseline['value']:g} ± {baseline['tolerance']:g} (n={cell['n']})")


def write_baselines(path: Path, baselines: Iterable[Baseline]) -> None:
    """Write the file, sorted, whole or not at all."""
    ordered = [one.model_dump(mode="json", exclude_defaults=True) for one in sorted(baselines, key=lambda one: one.key)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(ordered, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; free space or choose another --against") from error


def gate(
    against: Path, frame: Callable[[Sequence[str]], pd.DataFrame], *, allow_missing: bool = False, write: bool = False
) -> tuple[str, int]:
    """What the command prints, and its exit code: 1 if the gate is closed. ``write`` renews ``against`` instead.

    ``frame`` gives the runs in some metrics, as of `check`: which, the file says.
    """
    old = [] if write and not against.exists() else read_baselines(against)
    metrics = sorted({one.metric for one in old})
    if not write:
        results = check(old, frame(metrics))
        return report(results, allow_missing), int(bool(failed(results, allow_missing)))
    new, lines = renewed(old, frame([PRIMARY, *metrics]))
    if not new:
        raise UserError("no baseline to write: no run counts in these records")
    write_baselines(against, new)
    return "".join(f"{line}\n" for line in [*lines, f"wrote {against}: {len(new)} baselines"]), 0
