"""Tables of papers, published numbers beside ours: ``results/published/*.toml`` says which number stands where.

A definition holds selectors alone; every number comes from the rows of results/published.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import Field, ValidationError

from mae_bench import places
from mae_bench.errors import UserError, nearest
from mae_bench.recipes import explain, read_toml
from mae_bench.reporting import grid, shown
from mae_bench.reporting.cells import cells, select
from mae_bench.reporting.grid import DASH, Cell, ranked
from mae_bench.reporting.published import Published, with_spread
from mae_bench.reporting.record import one_line
from mae_bench.reporting.shown import Shown
from mae_bench.schema import Strict

LETTERS = "ᵃᵇᶜᵈᵉᶠᵍʰ"  # footnotes of a published number
DOUBTFUL = "?"


class Select(Strict):
    """What a published number must have; what is left out may be anything. ``protocol``: these of its ``;`` parts."""

    method: str = ""
    backbone: str = ""
    task: str = ""
    metric: str = ""
    protocol: list[str] = Field(default_factory=list)
    pretrain_data: str = ""
    pretrain_epochs: int | None = None

    def holds(self, row: Published) -> bool:
        parts = [part.strip() for part in row.protocol.split(";")]
        texts = ("method", "backbone", "task", "metric", "pretrain_data")
        return (
            all(getattr(self, name) in ("", getattr(row, name)) for name in texts)
            and self.pretrain_epochs in (None, row.pretrain_epochs)
            and all(part in parts for part in self.protocol)
        )


class Line(Select):
    """A row: ``labels`` for the first columns. ``section`` is a title above it, until another one."""

    labels: list[str] = Field(min_length=1)
    section: str = ""


class Head(Select):
    """A column. ``best`` says which numbers are marked; neighbours with one ``group`` share a head."""

    head: str = Field(min_length=1)
    group: str = ""
    best: Literal["high", "low", "none"] = "high"


class Definition(Strict):
    """One table or figure. ``locator``: what the `source_locator` of its numbers begins with."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    title: str = Field(min_length=1)
    locator: str = Field(min_length=1)
    labels: list[str] = Field(min_length=1)  # heads of the rows' labels
    row: list[Line] = Field(min_length=1)
    column: list[Head] = Field(min_length=1)
    notes: list[str] = Field(default_factory=list)


class Paper(Strict):
    """The tables of one source, as ``Published.source`` names it."""

    source: str = Field(min_length=1)
    table: list[Definition] = Field(min_length=1)


def load() -> dict[str, tuple[str, Definition]]:
    """Name -> (source, definition) of every table on the recipe search path, in the order of the files.

    Raises:
        UserError: a file that is no such definition, or a name that two tables have.
    """
    found: dict[str, tuple[str, Definition]] = {}
    for path in [path for root in places.recipe_roots() for path in sorted(root.glob("results/published/*.toml"))]:
        try:
            paper = Paper.model_validate(read_toml(path))
        except ValidationError as error:
            raise UserError(one_line(explain(error, Paper, str(path)))) from error
        for table in paper.table:
            if table.name in found:
                raise UserError(f"{path}: a table '{table.name}' is defined already; rename one of the two")
            if wrong := [line.labels for line in table.row if len(line.labels) != len(table.labels)]:
                raise UserError(
                    f"{path}: table '{table.name}' has {len(table.labels)} label heads but a row {wrong[0]}"
                )
            found[table.name] = paper.source, table
    return found


def find(name: str, others: Iterable[str] = ()) -> tuple[str, Definition]:
    """A definition by name; ``others`` are the names of tables that are made elsewhere, for the message.

    Raises:
        UserError: unknown name; the message lists all, the nearest first.
    """
    known = load()
    if name not in known:
        every = [*known, *others]
        raise UserError(f"unknown table '{name}'{nearest(name, every)}; known: {', '.join(every)}")
    return known[name]


def members(source: str, table: Definition, published: Iterable[Published]) -> list[Published]:
    """The published numbers that stand in a table or figure."""
    return [row for row in published if row.source == source and _place(row)[0] == table.locator]


def _place(row: Published) -> tuple[str, str]:
    """Locator -> (table or figure, what else is said there)."""
    place, rest = re.split(r" *[(;] *|$", row.source_locator, maxsplit=1)
    return place, rest.replace(") (", "; ").rstrip(")") if rest.count("(") < rest.count(")") else rest


def metrics(source: str, table: Definition, published: Iterable[Published]) -> list[str]:
    """The metrics in which ours can stand beside a number of the table."""
    return sorted({row.metric for row in members(source, table, published) if _mapped(row)})


def paper_table(
    source: str,
    table: Definition,
    runs: pd.DataFrame,
    published: Sequence[Published],
    *,
    stale: bool = False,
    links: Path | None = None,
) -> grid.Table:
    """A paper's table; ours, the gap and the verdict where protocol, weights and metric are those of a cell of ours.

    Best and second best are marked among the verified numbers of a column.

    Raises:
        UserError: a selector that fits two numbers, or none of a whole row or column.
    """
    return _Table(source, table, published).lay_out(*_mine(runs, stale), links)


def _mine(runs: pd.DataFrame, stale: bool) -> tuple[dict[tuple[str, str, str], Shown], list[str]]:
    """Cells with their backbones' own weights by (protocol, backbone, metric), and what was left out of them.

    ``runs`` has every run with every metric of the papers; of each task those count that some run of it has.
    """
    known = runs.groupby(["task", "metric"])["measured"].transform("any").astype(bool)
    chosen, left_out = select(runs[known], stale=stale)
    found = shown.beside(cells(chosen), ())
    own = {(cell["protocol"], cell["backbone"], cell["metric"]): cell for cell in found if not cell["given"]}
    return own, [note for note in left_out if "(stale" in note or "(no metric" in note]


class _Table:
    """Where each published number stands, its footnote, and what of ours is beside it."""

    def __init__(self, source: str, table: Definition, published: Sequence[Published]) -> None:
        self.source, self.table, self.published = source, table, published
        self.found = members(source, table, published)
        self.fields = [[self._one(line, head) for head in table.column] for line in table.row]
        self._check()
        remarks = Counter(_place(row)[1] for row in self.found)
        usual, count = remarks.most_common(1)[0]
        self.usual = usual if not remarks[""] and 2 * count > len(self.found) else ""  # said once, not at every number
        placed = [row for line in self.fields for row in line if row]
        others = dict.fromkeys(remark for row in placed if (remark := _place(row)[1]) and remark != self.usual)
        if len(others) > len(LETTERS):
            raise UserError(f"table '{table.name}': more than {len(LETTERS)} different remarks in source_locator")
        self.letters = dict(zip(others, LETTERS[: len(others)], strict=True))

    def _one(self, line: Line, head: Head) -> Published | None:
        fits = [row for row in self.found if line.holds(row) and head.holds(row)]
        if len(fits) > 1:
            where = f"table '{self.table.name}', row {line.labels}, column '{head.head}'"
            raise UserError(f"{where}: {len(fits)} published numbers fit; name what tells them apart")
        return fits[0] if fits else None

    def _check(self) -> None:
        for line, row in zip(self.table.row, self.fields, strict=True):
            if not any(row):
                raise UserError(f"table '{self.table.name}', row {line.labels}: no published number fits")
        for head, *column in zip(self.table.column, *self.fields, strict=True):
            if not any(column):
                raise UserError(f"table '{self.table.name}', column '{head.head}': no published number fits")

    def lay_out(
        self, mine: dict[tuple[str, str, str], Shown], left_out: Sequence[str], links: Path | None
    ) -> grid.Table:
        table = self.table
        heads = [grid.Column(label, "left") for label in table.labels]
        blocks: list[list[list[Cell]]] = []  # of each column of the definition, the cells of each row
        beside: list[Shown] = []
        for i, head in enumerate(table.column):
            column = [row[i] for row in self.fields]
            cells_of = [self._ours(row, mine) for row in column]
            beside += [cell for cell in cells_of if cell]
            extra = self._extra(column, cells_of)
            blocks.append(self._block(head, column, cells_of, extra, links))
            heads += self._heads(head, extra)
        lines: list[grid.Row] = []
        section = ""
        for number, line in enumerate(table.row):
            if line.section and line.section != section:
                lines.append(grid.Row((Cell(line.section),), "section"))
            section = line.section or section
            labels = [Cell(label) for label in line.labels]
            lines.append(grid.Row((*labels, *(cell for block in blocks for cell in block[number]))))
        notes = (*self._notes(), *shown.footnotes(beside), *shown.spreads(beside), *left_out)
        return grid.Table(
            table.name, f"{table.locator}: {table.title} ({self.source})", tuple(heads), tuple(lines), notes
        )

    def _ours(self, row: Published | None, mine: dict[tuple[str, str, str], Shown]) -> Shown | None:
        """A copy of our cell with this number beside it: one cell may stand beside several published ones."""
        cell = mine.get((row.protocol_id, row.ours, row.metric)) if row and _mapped(row) else None
        if row is None or cell is None:
            return None
        copy = dict(cell)
        shown.attach(copy, with_spread(row, self.published))
        return copy

    @staticmethod
    def _extra(column: Sequence[Published | None], cells_of: Sequence[Shown | None]) -> list[str]:
        """Columns beside a published one: none where ours could never stand, a place for ours where it could."""
        if any(cells_of):
            return ["ours", "gap", "verdict"]
        return ["ours"] if any(row and _mapped(row) for row in column) else []

    def _block(
        self,
        head: Head,
        column: Sequence[Published | None],
        cells_of: Sequence[Shown | None],
        extra: Sequence[str],
        links: Path | None,
    ) -> list[list[Cell]]:
        numbers = [self._number(row) for row in column]
        own = [shown.ours(cell, links) for cell in cells_of]
        if head.best != "none":
            sure = [i for i, row in enumerate(column) if row and row.verified]
            for i, cell in zip(sure, ranked([numbers[i] for i in sure], lower=head.best == "low"), strict=True):
                numbers[i] = cell
            own = ranked(own, lower=head.best == "low")
        more = [
            {"ours": mine, "gap": shown.gap(cell), "verdict": shown.verdict(cell)}
            for mine, cell in zip(own, cells_of, strict=True)
        ]
        return [[number, *(beside[name] for name in extra)] for number, beside in zip(numbers, more, strict=True)]

    def _number(self, row: Published | None) -> Cell:
        if row is None:
            return Cell(DASH)
        marks = self.letters.get(_place(row)[1], "") + DOUBTFUL * (not row.verified)
        return Cell(shown.printed(row.value), row.value, notes=marks)

    @staticmethod
    def _heads(head: Head, extra: Sequence[str]) -> list[grid.Column]:
        if not extra:
            return [grid.Column(head.head, "right", head.group)]
        group = " ".join(filter(None, (head.group, head.head)))
        return [grid.Column(name, "right", group) for name in ("published", *extra)]

    def _notes(self) -> list[str]:
        notes = [*self.table.notes]
        if any(head.best != "none" for head in self.table.column):
            notes.append("best: among the verified numbers of a column, ours among ours")
        if self.usual:
            notes.append(f"published numbers without a letter: {self.usual}")
        notes += [f"{letter} {remark}" for remark, letter in self.letters.items()]
        if any(row and not row.verified for line in self.fields for row in line):
            notes.append(f"{DOUBTFUL} not wholly verified in the primary source; never compared with ours")
        return notes


def _mapped(row: Published) -> bool:
    """A cell of ours can stand beside it."""
    return row.verified and row.protocol_id != "none" and bool(row.ours)
