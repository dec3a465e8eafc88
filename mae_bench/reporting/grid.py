"""A table without a format: what its cells say and mean. `render` writes it as Markdown, LaTeX, CSV or HTML.

All texts are plain: whatever a format takes as syntax is escaped where that format is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Mark = Literal["", "best", "second"]
DASH = "–"  # nothing to show


@dataclass(frozen=True)
class Cell:
    """One field. ``value``, ``std`` and ``n`` are what ``text`` shows, for programs; None = it shows no such number."""

    text: str = ""
    value: float | None = None
    std: float | None = None
    n: int | None = None
    mark: Mark = ""
    href: str = ""  # relative path of the record file (or folder of records) that the number comes from
    notes: str = ""  # footnote marks, one character each, e.g. "*†"
    code: bool = False  # a name that is typed, such as a recipe's


@dataclass(frozen=True)
class Column:
    """``group`` is a head above neighbouring columns that have the same one; ``code`` as in `Cell`."""

    head: str
    align: Literal["left", "right"] = "right"
    group: str = ""
    code: bool = False
    group_code: bool = False


@dataclass(frozen=True)
class Row:
    """``head``: a further line of the head (the protocol, say). ``section``: a title, the first cell alone."""

    cells: tuple[Cell, ...]
    kind: Literal["data", "head", "section"] = "data"


@dataclass(frozen=True)
class Table:
    """``name`` is an identifier, ``title`` a line of text, ``notes`` the footnotes."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            expected = 1 if row.kind == "section" else len(self.columns)
            if len(row.cells) != expected:
                raise ValueError(f"table {self.name}: a row of {len(row.cells)} cells, expected {expected}")


def ranked(cells: Sequence[Cell], *, lower: bool = False) -> list[Cell]:
    """The cells with the best and the second best marked; equal as shown is equal, and where all are, none is marked.

    Args:
        cells: comparable ones; those without a defined value are left as they are.
        lower: a smaller value is better.
    """
    numbers = [None if cell.value is None or not math.isfinite(cell.value) else round(cell.value, 2) for cell in cells]
    order = sorted({number for number in numbers if number is not None}, reverse=not lower)
    if len(order) < 2:
        return list(cells)
    marks: dict[float | None, Mark] = {order[0]: "best", order[1]: "second"}
    return [replace(cell, mark=marks.get(number, "")) for cell, number in zip(cells, numbers, strict=True)]
