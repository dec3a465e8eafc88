"""One static HTML page of results: no request to any other file or host, and the same bytes for the same records.

The parts: `matrix` (summary), `curves` and `plots` (charts), `details` (what a record says). The files in ``assets/``
are the page's template, style and script. Every text goes through `one_line` and Jinja's escaping; what the script
shows, it shows as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from mae_bench import places
from mae_bench.errors import UserError
from mae_bench.reporting import details, grid, plots, shown, verdicts
from mae_bench.reporting.cells import cells, rows, select
from mae_bench.reporting.curves import SWEEPS, Group, Run, sweep_charts, training_curves
from mae_bench.reporting.files import write_whole
from mae_bench.reporting.matrix import first_anchor, matrices
from mae_bench.reporting.published import Published, load_published
from mae_bench.reporting.record import one_line, read_record
from mae_bench.reporting.render import render
from mae_bench.reporting.shown import Shown

MOST_RUNS = 400  # records in a page
MOST_CELLS = 1000  # rows of the table of results
MOST_GROUPS = 24  # tasks and protocols with training curves
MOST_PICTURE_BYTES = 3_000_000  # of all pictures together, as they are embedded
LONG = 2000  # characters of a text
SELECT = "name fewer with --records or --only"


@dataclass(frozen=True)
class Field:
    """One field of a table that can be sorted: ``sort`` is its number, ``anchor`` the record that it opens."""

    text: str
    sort: str = ""
    anchor: str = ""
    code: bool = False
    marks: str = ""


@dataclass(frozen=True)
class Line:
    """A row, and what the filters look at."""

    fields: tuple[Field, ...]
    task: str
    backbone: str
    init: str
    name: str = ""  # its anchor


@dataclass(frozen=True)
class Sortable:
    name: str
    caption: str
    heads: tuple[tuple[str, bool], ...]  # text, and whether it is over numbers
    lines: tuple[Line, ...]


@dataclass
class _Kept:
    """The runs whose records are in the page, in its order: those that count, pre-training, then all others."""

    runs: list[Shown]
    records: list[Run]
    anchors: dict[str, str] = field(default_factory=dict)  # record file -> anchor
    left_out: int = 0


def page(
    runs: pd.DataFrame,
    *,
    tables: Sequence[grid.Table] = (),
    published: Sequence[Published] | None = None,
    stale: bool = False,
    only: str | None = None,
) -> str:
    """The page of `store.load_frame`'s runs, judged by `staleness.judge`, in the runs' own primary metrics.

    Args:
        tables: papers' and suites' tables, shown as they are.
        published: instead of the rows of results/published.
        stale: take in runs whose recipe or protocol has changed since.
        only: show no runs but those `matching` this. Which runs count is decided among all.

    Raises:
        UserError: no run, none that fits ``only``, or a record that cannot be read any more.
    """
    if runs.empty:
        raise UserError("no records to report: `python -m mae_bench run --task … --backbone …` makes some")
    numbers = load_published() if published is None else published
    chosen, left_out = select(runs, stale=stale)
    wanted = matching(runs, only) if only else runs
    if only:
        if wanted.empty:
            raise UserError(f"--only {only}: no run's task, backbone, protocol or id contains it")
        chosen = chosen[chosen["digest"].isin(wanted["digest"])]
        left_out = [f"only runs that contain '{one_line(only)}': {len(wanted)} of {len(runs)}", *left_out]
    found = shown.beside(cells(chosen), numbers)
    flags = [flag for flag in verdicts.flags(runs) if not set(flag.runs).isdisjoint(wanted["file"])]
    kept = _keep(runs, chosen, stale, set(wanted["digest"]))
    counted = set(chosen["digest"])
    drawn = [one for one, row in zip(kept.records, kept.runs, strict=True) if row["status"] in COUNTED]
    groups = training_curves(drawn)
    sweeps = [(sweep, sweep_charts(sweep, drawn, numbers)) for sweep in SWEEPS]
    pictures, picture_notes = _pictures(kept)
    notes = [*left_out, *picture_notes]
    for count, what in (
        (kept.left_out, "records not in the page"),
        (max(0, len(found) - MOST_CELLS), "cells not in summary and results"),
        (max(0, len(groups) - MOST_GROUPS), "tasks whose curves are not drawn"),
    ):
        notes += [f"{what}: {count}; {SELECT}"] if count else []
    return _render({
        "matrices": matrices(found[:MOST_CELLS], flags, kept.anchors),
        "results": _results(found[:MOST_CELLS], kept),
        "runs": _runs(kept),
        "papers": [_paper(table) for table in tables],
        "groups": groups[:MOST_GROUPS],
        "sweeps": sweeps,
        "pictures": pictures,
        "footnotes": [*shown.footnotes(found), *shown.sources(found)],
        "flags": [(flag.kind, flag.text, first_anchor(flag.runs, kept.anchors)) for flag in flags[:100]],
        "left_out": notes,
        "licences": licences(),
        "counts": {"records": len(wanted), "counted": len(counted), "tasks": chosen["task"].nunique(),
                   "backbones": chosen["backbone"].nunique(), "cells": len(found)},
        "data": _json(_embedded(kept, groups[:MOST_GROUPS])),
    })  # fmt: skip


COUNTED = ("counted", "pre-training")


def matching(runs: pd.DataFrame, pattern: str) -> pd.DataFrame:
    """The runs whose task, backbone, protocol or run id contains ``pattern``."""
    names = ("task", "backbone", "protocol", "run_id")
    return runs[[any(pattern in value for value in row) for row in zip(*(runs[name] for name in names), strict=True)]]


def _keep(runs: pd.DataFrame, chosen: pd.DataFrame, stale: bool, wanted: set[str]) -> _Kept:
    """Read the records that the page shows, of the runs whose digests are ``wanted``."""
    counted = set(chosen["digest"])
    pretraining = runs[(runs["engine"] == "pretraining") & ~runs["smoke"]].sort_values(["created", "digest"])
    newest = set(
        pretraining.drop_duplicates(["task", "protocol", "backbone", "seed", "recipe_hash"], keep="last")["digest"]
    )
    ordered: list[tuple[int, Shown]] = []
    for row in rows(runs[runs["digest"].isin(wanted)]):
        row["status"] = _status(row, counted, newest, stale)
        place = [*COUNTED].index(row["status"]) if row["status"] in COUNTED else len(COUNTED)
        ordered.append((place, row))
    ordered.sort(key=lambda one: one[0])  # stable: within, the order of the store
    kept = _Kept([row for _, row in ordered[:MOST_RUNS]], [], left_out=max(0, len(ordered) - MOST_RUNS))
    taken: set[str] = set()
    for row in kept.runs:
        row["label"] = _label(row)
        row["anchor"] = details.anchor_of(row["run_id"], row["digest"], taken)
        taken.add(row["anchor"])
        kept.anchors[row["file"]] = row["anchor"]
        kept.records.append(Run(read_record(Path(row["file"])), row["label"]))
    return kept


def _status(row: Shown, counted: set[str], newest: set[str], stale: bool) -> str:
    if row["digest"] in counted:
        return "counted"
    if row["smoke"]:
        return "smoke"
    if row.get("stale") and not stale:
        return f"stale: {row['stale']}"
    return "pre-training" if row["digest"] in newest else "superseded"


def _label(row: Shown) -> str:
    """A run's cell; a pre-training's changed values too, which tell it from others of its backbone."""
    extra = f" {' '.join(row['settings'])}" if row["engine"] == "pretraining" and row["settings"] else ""
    return one_line(shown.label(row) + extra, 100)


def _number(value: float, text: str) -> Field:
    return Field(text, "" if pd.isna(value) else repr(float(value)))


def _results(found: Sequence[Shown], kept: _Kept) -> Sortable:
    heads = (("task", False), ("backbone", False), ("metric", False), ("mean ± std", True), ("n", True),
             ("95 % interval", True), ("best", True), ("trivial", True), ("published", True), ("gap", True),
             ("verdict", False), ("protocol", False))  # fmt: skip
    lines = []
    for cell in found:
        label, one, ends = shown.label(cell), cell["published"], (cell["low"], cell["high"])
        interval: str = grid.DASH if pd.isna(ends[0]) else " to ".join(map(shown.number, ends))
        fields = (
            Field(cell["task"], code=True),
            Field(label, code=True),
            Field(cell["metric"]),
            Field(
                shown.value(cell),
                _number(cell["mean"], "").sort,
                first_anchor(cell["files"], kept.anchors),
                marks=shown.marks(cell),
            ),
            _number(cell["n"], str(cell["n"])),
            _number(ends[0], interval),
            _number(cell["best"], grid.DASH if pd.isna(cell["best"]) else shown.number(cell["best"])),
            _number(cell["trivial"], shown.span([cell["trivial"]])),
            _number(one.value, shown.printed(one.value)) if one else Field(grid.DASH),
            _number(cell["gap"], shown.signed(cell["gap"])),
            Field(cell["verdict"] or grid.DASH),
            Field(cell["protocol"], code=True),
        )
        lines.append(Line(fields, cell["task"], label, cell["init"]))
    return Sortable("results", "Every cell: one backbone, task, protocol and metric", heads, tuple(lines))


def _runs(kept: _Kept) -> Sortable:
    heads = (("run", False), ("task", False), ("backbone", False), ("seed", True), ("metric", False), ("value", True),
             ("status", False), ("created", False), ("recipe", False))  # fmt: skip
    lines = []
    for row in kept.runs:
        fields = (
            Field(_short(row["run_id"]), anchor=row["anchor"], code=True),
            Field(row["task"], code=True),
            Field(row["label"], code=True),
            _number(row["seed"], str(row["seed"])),
            Field(row["metric"]),
            _number(row["value"], shown.number(row["value"])),
            Field(row["status"].partition(":")[0]),
            Field(f"{row['created']:%Y-%m-%d %H:%M}"),
            Field(row["recipe_hash"][:8], code=True),
        )
        lines.append(Line(fields, row["task"], row["label"], row["init"], row["anchor"]))
    return Sortable("runs", "Every record: one run of one seed", heads, tuple(lines))


def _short(run_id: str) -> str:
    """A run id without its task, backbone and time, which stand beside it."""
    folder = re.search(r"\.(seed\d+-[0-9a-f]{8}(-\d+)?)\.\d{8}T\d{6}Z$", run_id)
    return folder[1] if folder else one_line(run_id, 60)


def _paper(table: grid.Table) -> dict[str, Any]:
    """A table as `render` writes it; ``open``: a number of ours is in it."""
    labels = sum(column.align == "left" for column in table.columns)
    beside = any(cell.n is not None for row in table.rows for cell in row.cells)
    return {"title": table.title, "labels": labels, "open": beside, "html": Markup(render(table, "html"))}


def _pictures(kept: _Kept) -> tuple[list[dict[str, Any]], list[str]]:
    """One picture a task and backbone, the first seed's, and a note for each that is left out."""
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    seen: set[tuple[str, str, str]] = set()
    size = skipped = 0
    for row, run in zip(kept.runs, kept.records, strict=True):
        source, fault = details.picture(Path(row["file"]))
        key = row["task"], row["protocol"], row["label"]
        if fault:
            notes.append(f"the picture beside {one_line(row['run_id'], 100)} is left out: {fault}")
        if not source:
            continue
        if row["status"] not in COUNTED or key in seen or size + len(source) > MOST_PICTURE_BYTES:
            skipped += 1
            continue
        seen.add(key)
        size += len(source)
        text = details.alternative(run.record)
        found.append({"source": Markup(source), "text": text, "anchor": row["anchor"]})  # base64: nothing to escape
    if skipped:
        notes.append(
            f"pictures left out: {skipped}; one a task and backbone is shown, {MOST_PICTURE_BYTES // 10**6} MB in all"
        )
    return found, notes


def _embedded(kept: _Kept, groups: Sequence[Group]) -> dict[str, Any]:
    """What the script shows of the records; recipes stand there once, by their hash."""
    curves = {(group.task, group.protocol): group.name for group in groups}
    siblings: dict[tuple[str, ...], list[list[str]]] = {}
    for row in kept.runs:
        siblings.setdefault(_cell(row), []).append([row["anchor"], str(row["seed"])])
    runs: dict[str, details.Json] = {}
    recipes: dict[str, details.Rows] = {}
    for row, run in zip(kept.runs, kept.records, strict=True):
        runs[row["anchor"]] = details.details(run.record) | {
            "what": one_line(f"{row['task']}, {row['label']}, seed {row['seed']}: {row['status']}"),
            "siblings": siblings[_cell(row)],
            "curve": curves.get((row["task"], row["protocol"]), "") if row["status"] in COUNTED else "",
        }
        recipes.setdefault(run.record.recipe_hash, details.recipe(run.record))
    return {"runs": runs, "recipes": recipes}


def _cell(row: Shown) -> tuple[str, ...]:
    return row["task"], row["protocol"], row["label"], row["status"]


def _json(value: object) -> Markup:
    """JSON for a ``<script type="application/json">``: pure ASCII without any character that HTML knows."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e"))


def licences() -> list[tuple[str, str, str]]:
    """(file, source, licence) of each file of published numbers, as the README beside them lists it."""
    line = re.compile(r"^\| `([\w.-]+\.csv)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
    readmes = [root / "results" / "published" / "README.md" for root in places.recipe_roots()]
    texts = [path.read_text(encoding="utf-8") for path in readmes if path.is_file()]
    return [(file, source.replace("`", ""), licence) for text in texts for file, source, licence in line.findall(text)]


def _asset(name: str) -> str:
    return resources.files("mae_bench.reporting").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """A source expression of a content security policy (CSP level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _plain(value: object) -> object:
    return value if isinstance(value, Markup) else one_line(value, LONG)


def _render(content: dict[str, Any]) -> str:
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, finalize=_plain,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    style, script = _asset("page.css"), _asset("page.js")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    return (
        environment.get_template("page.html")
        .render(
            **content,
            style=Markup(style),
            script=Markup(script),
            policy=Markup(policy),
            svg=plots.svg,
            legend=plots.legend,
        )
        .lstrip()
    )


def write(text: str, out: Path) -> None:
    """Write the page. Raises `UserError` for a name that is no page's, or a folder that cannot be written."""
    if out.suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: a page is HTML; name it .html")
    try:
        write_whole(out, text)
    except OSError as error:
        raise UserError(f"cannot write --out {out}: {error.strerror}") from error
