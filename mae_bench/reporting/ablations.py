"""The table of a suite: per table of the paper, each cell's own numbers beside the published ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev

from mae_bench.reporting.published import Published, load_published
from mae_bench.reporting.record import Record
from mae_bench.reporting.tables import DASH, markdown, spread, text

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
    published: Sequence[Published] | None = None,
) -> str:
    """Markdown: mean ± sample standard deviation over seeds (n) of each cell and column, and the published number.

    A transfer belongs to a cell by the recipe of the run that made its weights. Of a seed the newest run counts, smoke
    runs and evaluations of trained models never do. ``published`` replaces the rows of results/published whose
    ``source`` is the given one.
    """
    found = published if published is not None else [row for row in load_published() if row.source == source]
    values = _values(records)
    head = ["cell", "changed"]
    for column in columns:
        head += [text(column.task), "published"] if column.published else [text(column.task)]
    parts = [f"# {text(title)}\n", "" if comparable else f"\n{FOREIGN}\n"]
    missing = 0
    for table, members in groupby(rows, key=lambda row: row.table):
        lines = []
        for row in members:
            line = [text(row.cell), text(row.changed) or DASH]
            hashes = row.transfers or ("",) * len(columns)
            for column, recipe in zip(columns, hashes, strict=True):
                mine = values.get((row.pretraining, recipe), {})
                missing += bool(row.pretraining) and not mine
                line += [_own(list(mine.values()))] + [_beside(row, column, found)] * bool(column.published)
            lines.append(line)
        parts.append(f"\n## {text(table or 'cells')}\n\n" + markdown(head, lines, left=2))
    notes = ["± sample standard deviation over n seeds"] + ([f"published: {text(source)}"] if source else [])
    if missing:
        notes.append(f"{missing} numbers are still to be run")
    return "".join(parts) + "\n" + "".join(f"- {note}\n" for note in notes)


def _values(records: Iterable[Record]) -> dict[tuple[str, str], dict[int, float | None]]:
    """(recipe of the pre-training, recipe of the transfer) -> seed -> primary metric."""
    values: dict[tuple[str, str], dict[int, float | None]] = {}
    for record in sorted(records, key=lambda record: record.created):
        maker = record.weights.maker.get("recipe_hash")
        if isinstance(maker, str) and not record.smoke and not record.eval_only:
            values.setdefault((maker, record.recipe_hash), {})[record.seed] = record.value
    return values


def _own(values: list[float | None]) -> str:
    if not values:
        return DASH
    numbers = [math.nan if value is None else value for value in values]
    std = stdev(numbers) if len(numbers) > 1 else math.nan
    return spread({"mean": fmean(numbers), "std": std, "n": len(numbers)})


def _beside(row: Row, column: Column, published: Sequence[Published]) -> str:
    """The published number of a cell and column; several that disagree are all shown."""
    values = [
        f"{one.value:g}"
        for one in published
        if one.verified
        and row.published
        and one.source_locator.partition(" (")[0] == row.table
        and one.protocol.split(";") == [column.published, row.published]
        and row.published_epochs in (0, one.pretrain_epochs)
    ]
    return " / ".join(dict.fromkeys(values)) or DASH
