"""Tables with any of a run's properties as rows and as columns, never mixing what must not be mixed.

Every number stands under its protocol and its metric: where rows and columns do not name them, further lines of the
head or further columns do. A field that would hold two cells is refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pandas as pd

from mae_bench.errors import UserError, nearest
from mae_bench.reporting import shown
from mae_bench.reporting.cells import ENGINES, INITS, SIZES, cells
from mae_bench.reporting.grid import DASH, Cell, Column, Mark, Row, Table, ranked
from mae_bench.reporting.published import Published
from mae_bench.reporting.shown import Shown
from mae_bench.reporting.statistics import lower_is_better

DIMENSIONS = ("task", "protocol", "metric", "backbone", "init", "size", "seed")
NAMED = ("protocol", "metric")  # what every number must stand under
LONG = ("protocol",)  # too long for the head's first line
TYPED = ("task", "protocol", "metric", "backbone")  # names that are typed
TRIVIAL = "trivial prediction"
Key = tuple[str, ...]


def pivot(
    runs: pd.DataFrame,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    published: Sequence[Published],
    links: Path | None = None,
) -> Table:
    """Runs that `cells.select` chose, by the `DIMENSIONS` that name rows and columns; baselines first.

    Beside a column in which published numbers of the same protocol and weights exist stand these, the gap and the
    verdict. Best and second best are marked among the rows of one column, protocol, size and data.

    Raises:
        UserError: an unknown or repeated dimension, or a field that would mix cells.
    """
    _check(rows, columns)
    found = shown.beside(cells(runs, each_run="seed" in (*rows, *columns)), published)
    plan = _Plan(found, rows, columns)
    lines = [plan.head_line(which) for which in (*plan.long, *plan.above)]
    if any(not math.isnan(cell["trivial"]) for cell in found):
        lines.append(plan.trivial_line())
    marks = plan.marks()
    lines += [plan.line(row, marks, links) for row in plan.rows]
    title = f"Results: rows by {' and '.join(rows)}, columns by {' and '.join(columns)}"
    among = ["best: among the rows of one column, protocol and size"] if any(map(bool, marks.values())) else []
    return Table("results", title, plan.heads(), tuple(lines), (*among, *shown.footnotes(found), *shown.sources(found)))


def _check(rows: Sequence[str], columns: Sequence[str]) -> None:
    for option, names in (("--rows", rows), ("--cols", columns)):
        for which in names:
            if which not in DIMENSIONS:
                raise UserError(f"{option} {which}: no such property{nearest(which, DIMENSIONS)}; known: "
                                f"{', '.join(DIMENSIONS)}")  # fmt: skip
        if not names:
            raise UserError(f"{option} is missing: name one or more of {', '.join(DIMENSIONS)}, separated by commas")
    for which in (*rows, *columns):
        if (*rows, *columns).count(which) > 1:
            raise UserError(f"'{which}' is named twice: give it to --rows or to --cols, once")


def _word(which: str, cell: Shown) -> str:
    if which == "backbone":
        return shown.label(cell)
    return str(cell["seeds"] if which == "seed" else cell[which])


def _rank(which: str, cell: Shown) -> tuple[int, str]:
    """Sorts the values of a property: sizes and initialisations in their order, tasks by their pipeline."""
    order = {
        "size": SIZES.index(cell["size"]),
        "init": INITS.index(cell["init"]),
        "backbone": INITS.index(cell["init"]),
        "task": ENGINES.index(cell["engine"]),
        "seed": int(cell["seeds"]) if which == "seed" else 0,
    }
    return order.get(which, 0), _word(which, cell)


def _ordered(found: Sequence[Shown], names: Sequence[str]) -> list[Key]:
    ranks = {_key(cell, names): tuple(_rank(which, cell) for which in names) for cell in found}
    return sorted(ranks, key=ranks.__getitem__)


def _key(cell: Shown, names: Sequence[str]) -> Key:
    return tuple(_word(which, cell) for which in names)


class _Plan:
    """Which cell stands where, and which further heads say what rows and columns leave open."""

    def __init__(self, found: Sequence[Shown], rows: Sequence[str], columns: Sequence[str]) -> None:
        self.row_names, self.column_names = rows, columns
        self.rows, self.columns = _ordered(found, rows), _ordered(found, columns)
        self.fields: dict[tuple[Key, Key], Shown] = {}
        self.of_row: dict[Key, list[Shown]] = defaultdict(list)
        self.of_column: dict[Key, list[Shown]] = defaultdict(list)
        for cell in found:
            place = _key(cell, rows), _key(cell, columns)
            if place in self.fields:
                self._refuse(self.fields[place], cell)
            self.fields[place] = cell
            self.of_row[place[0]].append(cell)
            self.of_column[place[1]].append(cell)
        self.compared = {key: any(cell["published"] for cell in self.of_column[key]) for key in self.columns}
        self.long = [which for which in columns if which in LONG and len(columns) > 1]
        hidden = [which for which in NAMED if which not in (*rows, *columns)]
        self.above = [which for which in hidden if _single(which, self.of_column.values())]
        self.beside = [which for which in hidden if which not in self.above]
        for which in self.beside:
            if not _single(which, self.of_row.values()):
                raise UserError(
                    f"rows '{','.join(rows)}' and columns '{','.join(columns)}' do not tell the {which}s apart: "
                    f"add '{which}' to --rows or --cols"
                )

    def _refuse(self, one: Shown, other: Shown) -> None:
        """Two cells in one field: name the property that tells them apart."""
        for which in ("task", "protocol", "metric", "size", "backbone"):  # named ones are equal in a field
            first, second = sorted((_word(which, one), _word(which, other)))
            if first != second:
                raise UserError(
                    f"a field of rows '{','.join(self.row_names)}' and columns '{','.join(self.column_names)}' would "
                    f"mix the {which}s '{first}' and '{second}': add '{which}' to --rows or --cols"
                )
        raise UserError(
            f"a field would mix two evaluations of {shown.label(one)} on {one['task']} with one seed: "
            "leave 'seed' out of --rows and --cols"
        )

    def heads(self) -> tuple[Column, ...]:
        heads = [Column(which, "left") for which in (*self.row_names, *self.beside)]
        kept = [i for i, which in enumerate(self.column_names) if which not in self.long]
        for key in self.columns:
            words = [key[i] for i in kept]
            typed = all(self.column_names[i] in TYPED for i in kept)
            group = " ".join(words[:-1]) or (words[-1] if self.compared[key] else "")
            own = words[-1] if group != words[-1] else "ours"
            heads.append(Column(own, "right", group, code=typed and own == words[-1], group_code=typed))
            if self.compared[key]:
                heads += [Column(head, "right", group, group_code=typed) for head in ("published", "gap", "verdict")]
        return tuple(heads)

    def head_line(self, which: str) -> Row:
        words = {key: _word(which, self.of_column[key][0]) for key in self.columns}
        return self._above(which, {key: Cell(word, code=which in TYPED) for key, word in words.items()})

    def trivial_line(self) -> Row:
        return self._above(TRIVIAL, {
            key: Cell(shown.span(cell["trivial"] for cell in self.of_column[key])) for key in self.columns
        })  # fmt: skip

    def _above(self, title: str, cells: dict[Key, Cell]) -> Row:
        empty = [Cell()] * (len(self.row_names) + len(self.beside) - 1)
        body = chain.from_iterable([cells[key], *[Cell()] * 3 * self.compared[key]] for key in self.columns)
        return Row((*empty, Cell(title), *body), "head")

    def line(self, row: Key, marks: dict[tuple[Key, Key], Mark], links: Path | None) -> Row:
        names = [*zip(self.row_names, row, strict=True)]
        names += [(which, _word(which, self.of_row[row][0])) for which in self.beside]
        line = [Cell(word, code=which in TYPED) for which, word in names]
        for key in self.columns:
            cell = self.fields.get((row, key))
            line.append(replace(shown.ours(cell, links), mark=marks[row, key]) if cell else Cell(DASH))
            if self.compared[key]:
                line += [shown.published(cell), shown.gap(cell), shown.verdict(cell)]
        return Row(tuple(line))

    def marks(self) -> dict[tuple[Key, Key], Mark]:
        """Best and second best among the cells of one column, protocol, metric, size and data; never a stale one."""
        groups: dict[tuple[object, ...], list[tuple[Key, Key]]] = defaultdict(list)
        for place, cell in self.fields.items():
            if not cell["stale"]:
                groups[place[1], cell["task"], cell["protocol"], cell["metric"], cell["size"], cell["data"]].append(
                    place
                )
        marks: dict[tuple[Key, Key], Mark] = dict.fromkeys(self.fields, "")
        for places in groups.values():
            metric = self.fields[places[0]]["metric"]
            values = ranked([Cell(value=self.fields[place]["mean"]) for place in places], lower=lower_is_better(metric))
            marks |= {place: value.mark for place, value in zip(places, values, strict=True)}
        return marks


def _single(which: str, groups: Iterable[Sequence[Shown]]) -> bool:
    return all(len({_word(which, cell) for cell in group}) == 1 for group in groups)
