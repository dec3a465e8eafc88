"""The table of a suite: per table of the paper, each cell's own numbers beside the published ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mae_bench.reporting import shown
from mae_bench.reporting.grid import DASH, Cell, Table, ranked
from mae_bench.reporting.grid import Column as Head
from mae_bench.reporting.grid import Row as Line
from mae_bench.reporting.published import Published, load_published
from mae_bench.reporting.record import Record
from mae_bench.reporting.statistics import summarise

FOREIGN = (
    "Not comparable: the numbers of this form come from a small model on made pictures, the published ones from the "
    "paper's model on ImageNet-1K. They stand side by side to show which cells belong together."
)


@dataclass(frozen=True)
class Column:
    """A transfer: its task, and the head word of ``protocol`` that its published numbers have."""

    task: str
    published: str


@dataclass(frozen=True)
class Row:
    """A cell: what it changes, the qualifier of its published numbers, and the recipes that measure it."""

    table: str
    cell: str
    changed: str  # in words
    published: str
    published_epochs: int  # 0 = any
    pretraining: str  # recipe hash; empty = the cell has no run in this form
    transfers: tuple[str, ...]  # recipe hashes, one a column


def suite_table(
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    records: Iterable[Record],
    *,
    source: str,
    comparable: bool,
    name: str = "suite",
    published: Sequence[Published] | None = None,
    code_hash: Callable[[str], str] | None = None,
    any_data: Collection[str] = (),
) -> Table:
    """Mean ± sample standard deviation over seeds (n) of each cell and column, and the published number.

    A transfer belongs to a cell by the recipe of the run that made its weights. Of a seed the newest run counts; smoke
    runs and evaluations of trained models never do, nor does a run on other data than its recipe names, or on weights
    that were. Best and second best are marked within each table of the paper.

    Args:
        any_data: hashes of recipes that name no data, so that none is another.
        comparable: this form of the suite is the paper's setting; otherwise title and notes say that it is not.
        published: instead of the rows of results/published, of which those of ``source`` are taken.
        code_hash: hash of an engine's code today; numbers of other code are marked.
    """
    found = [row for row in load_published() if row.source == source] if published is None else published
    runs, left_out = _runs(list(records), rows, columns, any_data)
    heads = [Head("cell", "left"), Head("changed", "left")]
    for column in columns:
        heads += [Head(column.task)] + ([Head("published", "right", column.task)] if column.published else [])
    lines: list[Line] = []
    for table, group in groupby(rows, key=lambda row: row.table):
        members = list(group)
        blocks: list[list[Cell]] = []
        for i, column in enumerate(columns):
            own = [runs.get((row.pretraining, row.transfers[i]), {}) if row.transfers else {} for row in members]
            blocks.append(ranked([_own(list(one.values()), code_hash) for one in own]))
            if column.published:
                blocks.append(ranked([_beside(row, column, found) for row in members]))
        lines += [Line((Cell(table),), "section")] if table else []
        for row, *numbers in zip(members, *blocks, strict=True):
            lines.append(Line((Cell(row.cell), Cell(row.changed or DASH), *numbers)))
    title += "" if comparable else " (not comparable with the published numbers)"
    notes = [] if comparable else [FOREIGN]
    notes += _notes(rows, runs, left_out, lines, source)
    return Table(name, title, tuple(heads), tuple(lines), tuple(notes))


Runs = dict[tuple[str, str], dict[int, Record]]  # recipes of pre-training and transfer -> seed -> the newest run


def _runs(
    records: Sequence[Record], rows: Sequence[Row], columns: Sequence[Column], any_data: Collection[str]
) -> tuple[Runs, Counter[str]]:
    """The runs of the suite's cells, seeds in order, and how many of its tasks are left out, by the reason."""
    known = {(row.pretraining, transfer) for row in rows for transfer in row.transfers}
    tasks = {column.task for column in columns}
    pretraining = [record for record in records if record.engine == "pretraining"]
    foreign = {record.run_id for record in pretraining if not _on_its_data(record, any_data)}
    runs: Runs = {}
    left_out: Counter[str] = Counter()
    for record in sorted(records, key=lambda record: (record.created, record.model_dump_json())):
        maker = record.weights.maker.get("recipe_hash")
        if not isinstance(maker, str) or record.smoke or record.eval_only:
            continue
        if (maker, record.recipe_hash) not in known:
            left_out["of a recipe that is no cell of this suite, or no longer"] += record.task in tasks
        elif not _on_its_data(record, any_data):
            left_out["on other data than the recipe names"] += 1
        elif record.weights.maker.get("run_id") in foreign:
            left_out["of weights that were pre-trained on other data than the recipe names"] += 1
        else:
            runs.setdefault((maker, record.recipe_hash), {})[record.seed] = record
    return {key: dict(sorted(of_seed.items())) for key, of_seed in runs.items()}, left_out


def _on_its_data(record: Record, any_data: Collection[str]) -> bool:
    """Whether nothing but values of the recipe (``+set:…``, which its hash covers) sets the run apart."""
    apart = record.protocol.removeprefix(record.recipe_protocol).split("+")[1:]
    if record.recipe_hash in any_data:
        return not record.smoke
    return record.data.matches and all(part.startswith("set:") for part in apart)


def _own(runs: Sequence[Record], code_hash: Callable[[str], str] | None) -> Cell:
    if not runs:
        return Cell(DASH)
    found = summarise([math.nan if run.value is None else run.value for run in runs])
    text = shown.spread({"mean": found.mean, "std": found.std, "n": found.n})
    other = code_hash is not None and any(run.code_hash != code_hash(run.engine) for run in runs)
    return Cell(text, found.mean, found.std, found.n, notes=shown.OTHER_CODE * other)


def _beside(row: Row, column: Column, published: Sequence[Published]) -> Cell:
    """The published number of a cell and column; several that disagree are all shown."""
    values = dict.fromkeys(
        one.value
        for one in published
        if one.verified
        and row.published
        and one.source_locator.partition(" (")[0] == row.table
        and one.protocol.split(";") == [column.published, row.published]
        and row.published_epochs in (0, one.pretrain_epochs)
    )
    text = " / ".join(map(shown.printed, values)) or DASH
    return Cell(text, next(iter(values))) if len(values) == 1 else Cell(text)


def _notes(
    rows: Sequence[Row], runs: Runs, left_out: Counter[str], lines: Sequence[Line], source: str
) -> Iterator[str]:
    missing = sum((row.pretraining, transfer) not in runs for row in rows for transfer in row.transfers)
    yield "± sample standard deviation over n seeds"
    if source:
        yield f"published: {source}"
    if any(cell.notes for line in lines for cell in line.cells):
        yield f"{shown.OTHER_CODE} made by other code than this tree's"
    if missing:
        yield f"{missing} numbers are still to be run"
    for reason, count in sorted(left_out.items()):
        if count:
            yield f"{count} run{'s' if count > 1 else ''} left out ({reason})"
