"""A cell of ours as tables show it: its number, its marks, the published number beside it, and the footnotes.

Shared by every table, so that one mark means one thing everywhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mae_bench.reporting import grid, verdicts
from mae_bench.reporting.cells import rows
from mae_bench.reporting.grid import DASH
from mae_bench.reporting.published import Published, headline
from mae_bench.reporting.statistics import Summary

Shown = dict[str, Any]  # one row of `cells.cells`, with `published` (Published | None), `gap` and `verdict`

OURS, EVALUATED, MIXED, OTHER_DATA, OTHER_CODE, STALE = "*", "†", "‡", "‖", "§", "¶"


def beside(summary: pd.DataFrame, published: Sequence[Published]) -> list[Shown]:
    """Cells with the published number of the same protocol, weights and metric; given weights have none."""
    known = {(row.protocol_id, row.ours, row.metric) for row in published}
    shown = rows(summary)
    for cell in shown:
        key = cell["protocol"], cell["backbone"], cell["metric"]
        attach(cell, headline(published, *key) if key in known and not cell["given"] else None)
    return shown


def attach(cell: Shown, found: Published | None) -> None:
    """Put a published number, the gap to it and the verdict into a cell; runs on different data have no verdict."""
    cell["published"] = found
    cell["gap"] = cell["mean"] - found.value if found else math.nan
    cell["verdict"] = ""
    if found:
        alike = len(cell["data"]) == 1
        cell["verdict"] = verdicts.against(summary_of(cell), found, cell["protocol"]).text if alike else "other data"


def summary_of(cell: Shown) -> Summary:
    return Summary(cell["n"], cell["mean"], cell["std"], cell["low"], cell["high"])


def ours(cell: Shown | None, links: Path | None, *, count: bool = True) -> grid.Cell:
    """Mean ± standard deviation (n), with marks and a link to the record or, for several, to their folder.

    ``links`` is the folder in which the table will lie; None = no links. ``count`` shows n.
    """
    if cell is None:
        return grid.Cell(DASH)
    text = spread(cell) if count else value(cell)
    return grid.Cell(text, cell["mean"], cell["std"], cell["n"], href=_href(cell["files"], links), notes=marks(cell))


def _href(files: Sequence[str], links: Path | None) -> str:
    if not files or links is None:
        return ""
    target = files[0] if len(files) == 1 else os.path.commonpath([Path(file).parent for file in files])
    return Path(os.path.relpath(target, links)).as_posix()


def published(cell: Shown | None) -> grid.Cell:
    found = cell["published"] if cell else None
    return grid.Cell(printed(found.value), found.value) if found else grid.Cell(DASH)


def gap(cell: Shown | None) -> grid.Cell:
    return grid.Cell(signed(cell["gap"]), cell["gap"]) if cell and cell["published"] else grid.Cell(DASH)


def verdict(cell: Shown | None) -> grid.Cell:
    return grid.Cell(cell["verdict"] or DASH) if cell else grid.Cell(DASH)


def marks(cell: Shown) -> str:
    found = [
        (OURS, cell["ours"]),
        (EVALUATED, cell["eval_only"]),
        (MIXED, cell["mixed"]),
        (OTHER_DATA, len(cell["data"]) > 1),
        (OTHER_CODE, cell["other_code"]),
        (STALE, cell["stale"]),
    ]
    return "".join(mark for mark, holds in found if holds)


def footnotes(shown: Sequence[Shown]) -> list[str]:
    """What the marks beside the numbers mean, each with the cells or keys that it is about."""
    notes = []
    keys: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for cell in shown:
        if cell["ours"]:
            keys.setdefault((cell["task"], tuple(sorted(cell["ours"]))), []).append(label(cell))
    for (task, values), labels in keys.items():
        who, what = ", ".join(dict.fromkeys(labels)), ", ".join(values)
        notes.append(f"{OURS} recipe values that nobody published, in {task} ({who}): {what}")
    meanings = [
        ("eval_only", f"{EVALUATED} a trained model evaluated, not trained here"),
        ("mixed", f"{MIXED} the runs have different weight files"),
        ("other_code", f"{OTHER_CODE} made by other code than this tree's"),
        ("given", "given …: weights that the user named, by the beginning of their sha256, not the backbone's own"),
    ]
    notes += [meaning for key, meaning in meanings if any(cell[key] for cell in shown)]
    if any(len(cell["data"]) > 1 for cell in shown):
        notes.append(f"{OTHER_DATA} the runs had different data, so that their mean and spread say little")
    reasons = dict.fromkeys(reason for cell in shown for reason in cell["stale"])
    notes += [f"{STALE} stale: {'; '.join(reasons)}"] if reasons else []
    if any(cell["n"] > 1 for cell in shown):
        notes.append("± sample standard deviation over n runs (seeds)")
    return notes


def sources(shown: Sequence[Shown]) -> list[str]:
    """Where each published number is from, and the spread that its verdict takes."""
    return [
        f"published {cell['task']} {label(cell)}: {printed(found.value)}, {found.source}, {found.source_locator}"
        + _stated(found)
        for cell in shown
        if (found := cell["published"])
    ]


def spreads(shown: Sequence[Shown]) -> list[str]:
    """The published spreads that the verdicts take, each once."""
    stated = [(cell["metric"], found) for cell in shown if (found := cell["published"]) and found.std is not None]
    return list(dict.fromkeys(f"published {metric} {printed(one.value)}{_stated(one)}" for metric, one in stated))


def _stated(found: Published) -> str:
    return "" if found.std is None else f"; standard deviation {found.std:g} over {found.std_n} runs: {found.spread}"


def label(cell: Shown) -> str:
    return str(cell["backbone"]) + (f" given {cell['given']}" if cell["given"] else "")


def name(cell: Shown) -> grid.Cell:
    return grid.Cell(label(cell), code=True)


def value(cell: Shown) -> str:
    return number(cell["mean"]) + ("" if math.isnan(cell["std"]) else f" ± {number(cell['std'])}")


def spread(cell: Shown) -> str:
    return f"{value(cell)} (n={cell['n']})"


def number(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{round(value, 2) + 0.0:.2f}"


def printed(value: float) -> str:
    """A published number with the decimals that it has, one at least: papers print 70.0, not 70."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def signed(value: float) -> str:
    return DASH if math.isnan(value) else f"{round(value, 2) + 0.0:+.2f}"


def span(values: Iterable[float]) -> str:
    """One number, or the lowest and the highest where they differ."""
    ends = list(dict.fromkeys(number(value) for value in sorted(v for v in values if not math.isnan(v))))
    return DASH if not ends else ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
