"""Tables from runs: our numbers, their spread over seeds, a trivial prediction and the published number beside them.

Everything here is a function of the runs alone: any order and any number of copies of the records give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd

from mae_bench.errors import UserError, nearest
from mae_bench.reporting import shown, verdicts
from mae_bench.reporting.cells import COLUMN, INITS, MARKED, ROW, cells, compare, rows, select
from mae_bench.reporting.grid import DASH, Cell, Column, Row, Table
from mae_bench.reporting.pivot import pivot
from mae_bench.reporting.published import Published, load_published
from mae_bench.reporting.shown import Shown
from mae_bench.reporting.statistics import bootstrap

Layout = Literal["wide", "long", "full"]
WORDS = {"within": "within noise", "one run": "n = 1", "no spread": "no spread", "other data": "other data",
         "undefined": "undefined"}  # fmt: skip
MOST_FLAGS = 20  # in the notes of a table
LONG = ["task", "protocol", "metric", "size", "backbone", "mean ± std", "n", "best", "trivial", "published", "gap",
        "verdict"]  # fmt: skip
TYPED = 5  # columns of names at the beginning of `LONG` and of a comparison


def results(
    runs: pd.DataFrame,
    *,
    layout: Layout = "wide",
    by: tuple[Sequence[str], Sequence[str]] | None = None,
    stale: bool = False,
    published: Sequence[Published] | None = None,
    links: Path | None = None,
) -> Table:
    """The default table of `store.frame`'s runs.

    ``wide``: one row a backbone and one column a task's metric and protocol, the published number, the gap and the
    verdict beside it where protocol and weights are the same. ``long``: one row a cell. ``full``: that with every
    number in a column of its own, for programs.

    Args:
        runs: from `store.frame`, best judged by `staleness.judge`; rows may have been filtered.
        by: properties that name rows and columns of the wide layout, instead of size and backbone by task, protocol
            and metric.
        stale: take in runs whose recipe or protocol has changed since.
        published: instead of the rows in ``results/published``.
        links: the folder in which the table will lie; numbers then link to their records.

    Raises:
        UserError: no run counts (none at all, or smoke runs only), or ``by`` is no possible table (see `pivot`).
    """
    chosen, left_out = select(runs, stale=stale)
    if chosen.empty:
        why = "; ".join(left_out) or "no records"
        raise UserError(f"no results to show: {why}; `python -m mae_bench run --task … --backbone …` makes some")
    left_out += _flags(chosen)
    numbers = load_published() if published is None else published
    if layout == "wide":
        row_names, column_names = by or (("size", "backbone"), ("task", "protocol", "metric"))
        made = pivot(chosen, row_names, column_names, published=numbers, links=links)
        return Table(made.name, made.title, made.columns, made.rows, (*made.notes, *left_out))
    found = shown.beside(cells(chosen), numbers)
    if layout == "full":
        return _full(found, left_out)
    head = [Column(text, "left" if i < TYPED else "right") for i, text in enumerate(LONG)]
    lines = tuple(_long_row(cell, links) for cell in found)
    return Table("results", "Results", tuple(head), lines, (*shown.footnotes(found), *shown.sources(found), *left_out))


def _flags(runs: pd.DataFrame) -> list[str]:
    """What `verdicts.flags` asks a reader to look at, one note each."""
    found = [f"look at this ({flag.kind}): {flag.text}" for flag in verdicts.flags(runs)]
    more = len(found) - MOST_FLAGS
    return found[:MOST_FLAGS] + ([f"look at this: {more} more, which `report` lists"] if more > 0 else [])


def _long_row(cell: Shown, links: Path | None) -> Row:
    return Row((
        *(Cell(cell[key], code=True) for key in COLUMN),
        Cell(cell["size"]),
        shown.name(cell),
        shown.ours(cell, links, count=False),
        Cell(str(cell["n"])),
        Cell(DASH if math.isnan(cell["best"]) else shown.number(cell["best"]), cell["best"]),
        Cell(shown.span([cell["trivial"]]), cell["trivial"]),
        shown.published(cell),
        shown.gap(cell),
        shown.verdict(cell),
    ))  # fmt: skip


def _full(found: Sequence[Shown], left_out: Sequence[str]) -> Table:
    """Every number in a column of its own; nothing is rounded to two decimals and nothing is marked."""
    names = [*COLUMN, "size", "init", "backbone", "given"]
    numbers = ["mean", "std", "low", "high", "best", "trivial"]
    head = [*names, "n", "seeds", *numbers, "bootstrap_low", "bootstrap_high", "published", "gap", "verdict", "source",
            "source_locator", "ours", "eval_only", "mixed_weights", "mixed_data", "other_code", "stale"]  # fmt: skip
    lines = []
    for cell in found:
        one: Published | None = cell["published"]
        words = [cell["verdict"], one.source if one else "", one.source_locator if one else ""]
        marks = (cell["eval_only"], cell["mixed"], len(cell["data"]) > 1, cell["other_code"])
        flags = [" ".join(sorted(cell["ours"])), *(str(bool(mark)) for mark in marks)]
        lines.append(Row((
            *(Cell(cell[key]) for key in names),
            Cell(str(cell["n"])),
            Cell(cell["seeds"]),
            *(Cell(value=cell[key]) for key in numbers),
            *(Cell(value=end) for end in bootstrap(list(cell["values"].values()))),
            *((Cell(value=one.value), Cell(value=cell["gap"])) if one else (Cell(), Cell())),
            *map(Cell, (*words, *flags, "; ".join(cell["stale"]))),
        )))  # fmt: skip
    return Table("results", "Results", tuple(Column(text, "left") for text in head), tuple(lines), tuple(left_out))


def compared(runs: pd.DataFrame, first: str, second: str, *, stale: bool = False, links: Path | None = None) -> Table:
    """Whether initialisation ``first`` differs from ``second``, per column, size and pair of backbones.

    Raises:
        UserError: unknown initialisation, or no column that has runs of both.
    """
    for init in (first, second):
        if init not in INITS:
            raise UserError(f"unknown initialisation '{init}'{nearest(init, INITS)}; known: {', '.join(INITS)}")
    if first == second:
        raise UserError(f"--compare {first} {second}: give two different initialisations")
    pairs = rows(compare(runs, first, second, stale=stale))
    if not pairs:
        raise UserError(f"nothing to compare: no task has runs of both '{first}' and '{second}' at one size")
    words = {"above": f"{first} above", "below": f"{first} below"} | WORDS
    decided = {"above", "below", "within"}
    bounded = any(math.isnan(pair["p"]) and pair["verdict"] in decided for pair in pairs)
    head = [
        *(Column(name, "left") for name in COLUMN),
        *(Column("backbone", "left", first), Column("mean", "right", first)),
        *(Column("backbone", "left", second), Column("mean", "right", second)),
        Column("difference"),
        *(Column(end, "right", "95 % interval") for end in ("from", "to")),
        *map(Column, (*(["2·√(s₁² + s₂²)"] if bounded else []), "p", "seed pairs", "verdict")),
    ]
    lines = tuple(_compared_row(pair, words, bounded) for pair in pairs)
    tests = sum(not math.isnan(pair["p"]) for pair in pairs)
    notes = [
        "difference, 95 % interval and p: paired t test over the seeds that both sides have"
        + (f"; p by Holm's method over the {tests} rows that have one" if tests > 1 else ""),
        "verdict: above or below where p < 0.05"
        + bounded * "; without two seed pairs, where the difference exceeds 2·√(s₁² + s₂²)",
    ]
    notes += shown.footnotes([side for pair in pairs for side in _sides(pair)])
    left_out = select(runs, stale=stale)[1]
    return Table(f"{first}_against_{second}", f"{first} against {second}", tuple(head), lines, (*notes, *left_out))


def _compared_row(pair: Shown, words: dict[str, str], bounded: bool) -> Row:
    sides = [
        cell
        for one in _sides(pair)
        for cell in (
            shown.name(one),
            Cell(shown.spread(one), one["mean"], one["std"], one["n"], notes=shown.marks(one)),
        )
    ]
    signed = [Cell(shown.signed(pair[key]), pair[key]) for key in ("difference", "low", "high")]
    bound = [Cell(DASH if math.isnan(pair["bound"]) else shown.number(pair["bound"]), pair["bound"])] * bounded
    rest = [Cell(_p(pair["adjusted"]), pair["adjusted"]), Cell(str(pair["pairs"])), Cell(words[pair["verdict"]])]
    return Row((*(Cell(pair[key], code=True) for key in COLUMN), *sides, *signed, *bound, *rest))


def _sides(pair: Shown) -> list[Shown]:
    """The two cells of a comparison. Both have the same recipe values, so those that are ours are not marked."""
    keys = (*ROW, "n", "mean", "std", *MARKED)
    return [{key: pair[f"{key}_{side}"] for key in keys} | {"ours": (), "task": pair["task"]} for side in (1, 2)]


def _p(p: float) -> str:
    return DASH if math.isnan(p) else "<0.0001" if p < 0.0001 else f"{p:.2g}"
