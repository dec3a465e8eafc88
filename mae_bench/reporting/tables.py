"""Tables from runs: our numbers, their spread over seeds, a trivial prediction and the published number beside them.

Everything here is a function of the runs alone: any order and any number of copies of the records give the same text.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pandas as pd

from mae_bench.errors import UserError, nearest
from mae_bench.reporting.cells import COLUMN, INITS, ROW, SIZES, cells, compare, select
from mae_bench.reporting.published import Published, headline, load_published
from mae_bench.reporting.record import one_line

Form = Literal["markdown", "csv"]
Layout = Literal["wide", "long"]
Cell = dict[str, Any]  # one row of `cells`, with `published` (Published | None) and `gap`

OURS, EVALUATED, MIXED = "*", "†", "‡"
LONG = ["task", "protocol", "metric", "size", "backbone", "mean ± std", "n", "best", "trivial", "published", "gap"]
DASH = "–"


def table(
    runs: pd.DataFrame,
    *,
    form: Form = "markdown",
    layout: Layout = "wide",
    published: Sequence[Published] | None = None,
) -> str:
    """The default table of `store.frame`'s runs, as text that ends with a newline.

    ``wide``: one row a backbone and one column a task's metric and protocol, the published number and the gap beside it
    where protocol and weights are the same. ``long``: one row a cell. CSV is always long, with numbers in columns of
    their own.

    Args:
        runs: from `store.frame`; rows may have been filtered.
        published: instead of the rows in ``results/published``.

    Raises:
        UserError: no run counts (none at all, or smoke runs only).
    """
    chosen, left_out = select(runs)
    if chosen.empty:
        why = "; ".join(left_out) or "no records"
        raise UserError(f"no results to show: {why}; `python -m mae_bench run --task … --backbone …` makes some")
    shown = _beside(cells(chosen), load_published() if published is None else published)
    if form == "csv":
        return _csv(shown)
    body = _wide(shown) if layout == "wide" else _long(shown)
    return markdown(*body) + _footnotes([*_marks(shown), *_sources(shown), *left_out])


def comparison(runs: pd.DataFrame, first: str, second: str, *, form: Form = "markdown") -> str:
    """Whether initialisation ``first`` differs from ``second`` by more than twice the spread, per column and size.

    Raises:
        UserError: unknown initialisation, or no column that has runs of both.
    """
    for init in (first, second):
        if init not in INITS:
            raise UserError(f"unknown initialisation '{init}'{nearest(init, INITS)}; known: {', '.join(INITS)}")
    pairs = compare(runs, first, second)
    if pairs.empty:
        raise UserError(f"nothing to compare: no task has runs of both '{first}' and '{second}' at one size")
    if form == "csv":
        return _csv_text(list(pairs.columns), pairs.itertuples(index=False))
    words = {"above": f"{first} above", "below": f"{first} below", "within": "within noise", "no spread": "n = 1"}
    head = [*COLUMN, first, second, "difference", "2·√(s₁² + s₂²)", "verdict"]
    rows = [
        [
            *(_name(pair[key]) for key in COLUMN),
            *(f"{_label(pair, side)} {spread(pair, side)}" for side in ("_1", "_2")),
            _signed(pair["difference"]),
            DASH if math.isnan(pair["bound"]) else _number(pair["bound"]),
            words.get(pair["verdict"], pair["verdict"]),
        ]
        for pair in _rows(pairs)
    ]
    return markdown(head, rows, left=5) + _footnotes(select(runs)[1])


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _beside(summary: pd.DataFrame, published: Sequence[Published]) -> list[Cell]:
    """Cells with the published number of the same protocol, weights and metric; given weights have none."""
    shown = _rows(summary)
    for cell in shown:
        found = None if cell["given"] else headline(published, cell["protocol"], cell["backbone"], cell["metric"])
        cell["published"] = found
        cell["gap"] = cell["mean"] - found.value if found else math.nan
    return shown


def _wide(shown: list[Cell]) -> tuple[list[str], list[list[str]], int]:
    """Header, rows and the number of left-aligned columns."""
    columns = list(dict.fromkeys(tuple(cell[key] for key in COLUMN) for cell in shown))
    by_place = {(*(cell[key] for key in COLUMN), *(cell[key] for key in ROW)): cell for cell in shown}
    head, protocol, trivial = ["size", "backbone"], ["", "protocol"], ["", "trivial prediction"]
    wide_columns = set()
    for column in columns:
        members = [cell for cell in shown if tuple(cell[key] for key in COLUMN) == column]
        head.append(f"{_name(column[0])} {_name(column[2])}")
        protocol.append(_name(column[1]))
        trivial.append(_range([cell["trivial"] for cell in members]))
        if any(cell["published"] for cell in members):
            wide_columns.add(column)
            head += ["published", "gap"]
            protocol += ["", ""]
            trivial += ["", ""]
    rows = [protocol, trivial]
    for row in _row_order(shown):
        line = [row["size"], _label(row)]
        for column in columns:
            cell = by_place.get((*column, *(row[key] for key in ROW)))
            line.append(spread(cell) + _mark(cell) if cell else DASH)
            if column in wide_columns:
                line += [_published(cell), _signed(cell["gap"]) if cell else DASH]
        rows.append(line)
    return head, rows, 2


def _row_order(shown: list[Cell]) -> list[Cell]:
    """One cell of each row, sizes in order and baselines first."""
    first = {tuple(cell[key] for key in ROW): cell for cell in shown}
    return sorted(
        first.values(),
        key=lambda cell: (SIZES.index(cell["size"]), INITS.index(cell["init"]), cell["backbone"], cell["given"]),
    )


def _long(shown: list[Cell]) -> tuple[list[str], list[list[str]], int]:
    rows = [
        [
            *(_name(cell[key]) for key in COLUMN),
            cell["size"],
            _label(cell),
            _value(cell) + _mark(cell),
            str(cell["n"]),
            DASH if math.isnan(cell["best"]) else _number(cell["best"]),
            _range([cell["trivial"]]),
            _published(cell),
            _signed(cell["gap"]),
        ]
        for cell in shown
    ]
    return LONG, rows, 5


def _marks(shown: list[Cell]) -> list[str]:
    """What the marks beside the numbers mean, each with the cells or keys that it is about."""
    notes = []
    ours: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for cell in shown:
        if cell["ours"]:
            ours.setdefault((cell["task"], tuple(sorted(cell["ours"]))), []).append(_label(cell))
    for (task, keys), labels in ours.items():
        who, what = ", ".join(dict.fromkeys(labels)), ", ".join(text(key) for key in keys)
        notes.append(f"`{OURS}` recipe values that nobody published, in {_name(task)} ({who}): {what}")
    if any(cell["eval_only"] for cell in shown):
        notes.append(f"{EVALUATED} a trained model evaluated, not trained here")
    if any(cell["mixed"] for cell in shown):
        notes.append(f"{MIXED} the runs start from different weight files")
    if any(cell["given"] for cell in shown):
        notes.append("given …: weights that the user named, by the beginning of their sha256, not the backbone's own")
    if any(cell["n"] > 1 for cell in shown):
        notes.append("± sample standard deviation over n runs (seeds)")
    return notes


def _sources(shown: list[Cell]) -> list[str]:
    return [
        f"published {_name(cell['task'])} {_label(cell)}: {found.value:g}, "
        f"{text(found.source)}, {text(found.source_locator)}"
        for cell in shown
        if (found := cell["published"])
    ]


def _mark(cell: Cell) -> str:
    return OURS * bool(cell["ours"]) + EVALUATED * bool(cell["eval_only"]) + MIXED * bool(cell["mixed"])


def _label(cell: Cell, side: str = "") -> str:
    given = cell["given" + side]
    return _name(cell["backbone" + side]) + (f" given {_name(given)}" if given else "")


def _value(cell: Cell, side: str = "") -> str:
    mean, std = _number(cell["mean" + side]), cell["std" + side]
    return mean if math.isnan(std) else f"{mean} ± {_number(std)}"


def spread(cell: Cell, side: str = "") -> str:
    return f"{_value(cell, side)} (n={cell['n' + side]})"


def _published(cell: Cell | None) -> str:
    return f"{cell['published'].value:g}" if cell and cell["published"] else DASH


def _number(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{round(value, 2) + 0.0:.2f}"


def _signed(value: float) -> str:
    return DASH if math.isnan(value) else f"{round(value, 2) + 0.0:+.2f}"


def _range(values: Iterable[float]) -> str:
    """One number, or the lowest and the highest where they differ."""
    texts = dict.fromkeys(_number(value) for value in sorted(v for v in values if not math.isnan(v)))
    ends = list(texts)
    return DASH if not ends else ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def _name(value: object) -> str:
    """A name for a Markdown table: a code span, or escaped text where it holds anything unusual."""
    return f"`{value}`" if re.fullmatch(r"[\w.@+:/=-]{1,100}", str(value), re.ASCII) else text(value)


def text(value: object) -> str:
    """Text from a file, of one line and without meaning to Markdown or HTML."""
    special = r"[\\`*\[\]<>|~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(special, lambda match: f"&#{ord(match.group())};", one_line(value))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table, padded so that it also reads well as plain text."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = (t.ljust(w) if i < left else t.rjust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True)))
        return "| " + " | ".join(padded) + " |\n"

    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return line(head) + line(rule) + "".join(line(row) for row in rows)


def _footnotes(notes: Sequence[str]) -> str:
    return "\n" + "".join(f"- {note}\n" for note in notes) if notes else ""


def _csv(shown: list[Cell]) -> str:
    head = [*COLUMN, "size", "init", *ROW, "mean", "std", "n", "seeds", "best", "trivial", "published", "gap"]
    rows = [
        [
            *(cell[key] for key in head if key not in ("published", "gap")),
            *((found.value, cell["gap"], found.source, found.source_locator) if found else (None, None, None, None)),
            " ".join(sorted(cell["ours"])),
            cell["eval_only"],
            cell["mixed"],
        ]
        for cell in shown
        for found in [cell["published"]]
    ]
    return _csv_text([*head, "source", "source_locator", "ours", "eval_only", "mixed_weights"], rows)


def _csv_text(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([head, *([_csv_cell(value) for value in row] for row in rows)])
    return out.getvalue()


def _csv_cell(value: object) -> str:
    """Numbers with four decimals, undefined = empty; text can never be taken for a spreadsheet's formula."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{round(value, 4) + 0.0:.4f}"
    text = "" if value is None else one_line(value)
    return "'" + text if isinstance(value, str) and text[:1] in set("=+-@") else text
