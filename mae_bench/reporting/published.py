"""Published numbers: ``results/published/*.csv``, each row with its table and with our protocol id where it has one."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from mae_bench import places
from mae_bench.errors import UserError
from mae_bench.recipes import explain
from mae_bench.reporting.record import one_line
from mae_bench.schema import Strict

MAX_BYTES = 4 << 20
EMPTY_TEXT = ("pretrain_data", "ours")  # columns whose empty cell is an empty text; elsewhere it is a missing value


class Published(Strict):
    """One published number. Equal ``protocol_id``, ``ours`` and ``metric`` make it comparable with a cell of ours."""

    method: str = Field(min_length=1)
    backbone: str = Field(min_length=1)
    task: str = Field(min_length=1)
    protocol: str = Field(min_length=1)  # in the source's words
    protocol_id: str = Field(pattern=r"^(none|[a-z0-9.-]+@[0-9]+)$")
    metric: str = Field(min_length=1)
    value: float
    pretrain_data: str
    pretrain_epochs: int | None = Field(None, ge=0)  # 0 = no pre-training; empty = the source does not say
    source: str = Field(min_length=1)
    source_locator: str = Field(min_length=1)  # table, figure or file
    verified: bool  # read in the primary source
    ours: str  # our backbone with these weights; empty = we have none


def read_published(path: Path) -> list[Published]:
    """Rows of one file. Raises `UserError` that names the file, the line and the column."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES} bytes: not a table of published numbers")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if reader.fieldnames != list(Published.model_fields):
                raise UserError(f"{path}: expected the columns {','.join(Published.model_fields)}")
            return [_parse(row, f"{path} line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error


def _parse(row: dict[str | None, object], where: str) -> Published:
    if None in row or None in row.values():
        raise UserError(f"{where}: expected {len(Published.model_fields)} cells")
    try:
        return Published.model_validate_strings(
            {key: value for key, value in row.items() if value or key in EMPTY_TEXT}
        )
    except ValidationError as error:
        raise UserError(one_line(explain(error, Published, where))) from error


def load_published() -> list[Published]:
    """All published numbers on the recipe search path, files in the order of their names."""
    files = [path for root in places.recipe_roots() for path in sorted(root.glob("results/published/*.csv"))]
    return [row for path in files for row in read_published(path)]


def headline(rows: Iterable[Published], protocol_id: str, backbone: str, metric: str) -> Published | None:
    """The published number that stands beside a cell of ours: the first verified one, a paper's before a re-run's."""
    key = (protocol_id, backbone, metric)
    matches = [row for row in rows if row.verified and (row.protocol_id, row.ours, row.metric) == key]
    return min(matches, key=lambda row: "arXiv" not in row.source, default=None)
