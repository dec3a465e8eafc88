"""A gate for a user's CI: fail when a number has fallen by more than its tolerance. docs/gate.md shows the workflow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from mae_bench.errors import UserError
from mae_bench.recipes import explain
from mae_bench.reporting import store
from mae_bench.reporting.cells import cells, select
from mae_bench.reporting.record import Record, one_line
from mae_bench.reporting.statistics import lower_is_better, summarise
from mae_bench.schema import Strict

MAX_BYTES = 4 << 20
LEAST_TOLERANCE = 0.5  # percent points
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+:@=,-]*$", max_length=300)]
Status = Literal["ok", "rose", "fell", "missing", "unclear"]
Key = tuple[str, str, str, str]


class Baseline(Strict):
    """What a number has to keep to: ``value``, the mean over ``seeds``, give or take ``tolerance``."""

    task: Name
    protocol: Name
    backbone: Name
    metric: Name
    value: float
    tolerance: float = Field(ge=0)  # in the metric's unit: percent points
    higher_is_better: bool = True
    seeds: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)  # only these count; empty = all there are

    @property
    def key(self) -> Key:
        return self.task, self.protocol, self.backbone, self.metric

    @property
    def label(self) -> str:
        return f"{self.task} {self.backbone} {self.metric} ({self.protocol})"


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
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; `gate --write` makes it from records") from error
    if len(text) > MAX_BYTES:
        raise UserError(f"{path} is larger than {MAX_BYTES} bytes: no list of baselines")
    try:
        found = BASELINES.validate_json(text)
    except ValidationError as error:
        raise UserError(one_line(explain(error, Baseline, str(path)))) from error
    keys = [one.key for one in found]
    for one in found:
        if keys.count(one.key) > 1:
            raise UserError(f"{path}: {one.label} stands there twice; keep one")
    if not found:
        raise UserError(f"{path} lists no baseline, so nothing could ever fail; `gate --write` makes some from records")
    return found


def check(baselines: Sequence[Baseline], records: Iterable[Record]) -> list[Result]:
    """Hold each baseline against the runs that a table counts (`cells.select`), in the order of the baselines."""
    measured = _measured(records, {one.metric for one in baselines})
    return [_check(one, measured.get(one.key, [])) for one in baselines]


def _measured(records: Iterable[Record], metrics: set[str]) -> dict[Key, list[dict[str, Any]]]:
    """The cells of each key; more than one where runs started from different weights that the user gave."""
    known, found = list(records), dict[Key, list[dict[str, Any]]]()
    for metric in sorted(metrics):
        chosen, _ = select(store.frame(known, metric))
        for row in cells(chosen).to_dict("records"):
            key = (row["task"], row["protocol"], row["backbone"], row["metric"])
            found.setdefault(key, []).append({str(name): value for name, value in row.items()})
    return found


def _check(baseline: Baseline, cells: list[dict[str, Any]]) -> Result:
    label = one_line(baseline.label)
    if not cells:
        return Result(baseline, "missing", f"{label}: no run")
    if len(cells) > 1:
        given = ", ".join(str(cell["given"] or "the backbone's own") for cell in cells)
        return Result(baseline, "unclear", f"{label}: runs of several weights ({given}); name the records of one")
    values = _values(cells[0], baseline.seeds)
    if absent := [seed for seed in baseline.seeds if seed not in values]:
        return Result(baseline, "missing", f"{label}: no run of seed {', '.join(map(str, absent))}")
    summary = summarise(list(values.values()))
    change = summary.mean - baseline.value
    if math.isnan(change):
        return Result(baseline, "unclear", f"{label}: undefined in a run; baseline {baseline.value:g}")
    gain = change if baseline.higher_is_better else -change
    # Differences of printed numbers: 57.0 - 56.5 is 0.5.
    beyond = abs(gain) > baseline.tolerance * (1 + 1e-9) + 1e-9
    status: Status = "ok" if not beyond else "rose" if gain > 0 else "fell"
    hint = "; better than it says: raise the baseline with --write" if status == "rose" else ""
    text = (
        f"{label}: {summary.mean:.2f} (n={summary.n}), baseline {baseline.value:g} "
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


def renewed(old: Sequence[Baseline], records: Iterable[Record]) -> tuple[list[Baseline], list[str]]:
    """Baselines at what the records hold now, and a line for each change; those without a run stay as they are.

    A known baseline keeps its tolerance and its seeds. A new one, of each cell's primary metric, gets all its seeds
    and twice their spread as tolerance, at least half a point.
    """
    known = list(records)
    primary = {record.metric for record in known}
    measured = _measured(known, primary | {one.metric for one in old})
    lines, new = [], []
    for one in old:
        found = measured.pop(one.key, [])
        result = _check(one, found)
        if result.status in ("missing", "unclear"):
            lines.append(f"kept     {result.text}")
            new.append(one)
            continue
        value = round(summarise(list(_values(found[0], one.seeds).values())).mean, 4)
        new.append(one.model_copy(update={"value": value}))
        if value != one.value:
            worse = (value < one.value) == one.higher_is_better
            lines.append(f"{'LOWERED' if worse else 'raised':<8} {one_line(one.label)}: {one.value:g} -> {value:g}")
    own = {(record.task, record.protocol, record.backbone, record.metric) for record in known}
    for key, found in sorted(measured.items()):
        if key in own:
            new += _added(found, lines)
    return new, lines


def _added(found: list[dict[str, Any]], lines: list[str]) -> Iterator[Baseline]:
    cell = found[0]
    label = one_line(f"{cell['task']} {cell['backbone']} {cell['metric']} ({cell['protocol']})")
    if len(found) > 1 or math.isnan(cell["mean"]):
        lines.append(f"left out {label}: {'runs of several weights' if len(found) > 1 else 'undefined'}")
        return
    spread = 0.0 if math.isnan(cell["std"]) else 2 * cell["std"]
    baseline = {
        **{name: cell[name] for name in ("task", "protocol", "backbone", "metric")},
        "value": round(cell["mean"], 4),
        "tolerance": round(max(spread, LEAST_TOLERANCE), 2),
        "higher_is_better": not lower_is_better(cell["metric"]),
        "seeds": [] if cell["eval_only"] else sorted(cell["values"]),
    }
    try:
        yield Baseline.model_validate(baseline)
    except ValidationError as error:
        raise UserError(one_line(explain(error, Baseline, f"a baseline for {label}"))) from error
    lines.append(f"new      {label}: {baseline['value']:g} ± {baseline['tolerance']:g} (n={cell['n']})")


def write_baselines(path: Path, baselines: Iterable[Baseline]) -> None:
    """Write the file, sorted, whole or not at all."""
    ordered = sorted((one.model_dump(mode="json") for one in baselines), key=lambda one: list(one.values())[:4])
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; free space or choose another --against") from error


def gate(
    against: Path, records: Sequence[Path], *, allow_missing: bool = False, write: bool = False
) -> tuple[str, int]:
    """What the command prints, and its exit code: 1 if the gate is closed. ``write`` renews ``against`` instead."""
    found = store.load_records(records)
    if not write:
        results = check(read_baselines(against), found)
        return report(results, allow_missing), int(bool(failed(results, allow_missing)))
    old = read_baselines(against) if against.exists() else []
    new, lines = renewed(old, found)
    if not new:
        raise UserError("no baseline to write: no run counts in these records")
    write_baselines(against, new)
    return "".join(f"{line}\n" for line in [*lines, f"wrote {against}: {len(new)} baselines"]), 0
