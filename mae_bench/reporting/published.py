"""Published numbers: ``results/published/*.csv``, each row with its table and with our protocol id where it has one."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from mae_bench import places
from mae_bench.errors import UserError
from mae_bench.recipes import explain
from mae_bench.reporting.record import one_line
from mae_bench.schema import Strict

MAX_BYTES = 4 << 20
EMPTY_TEXT = (
    "pretrain_data",
    "ours",
    "spread",
)  # columns whose empty cell is an empty text; elsewhere it is a missing value


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
    # What the source says about its spread; a file without any may leave the four columns out.
    std: float | None = Field(None, gt=0)  # sample standard deviation (n - 1) of single runs
    std_n: int | None = Field(None, ge=2)  # of how many runs
    n: int | None = Field(None, ge=1)  # runs whose mean `value` is; empty = the source does not say
    spread: str = ""  # what `std` is of, in words

    @model_validator(mode="after")
    def _whole_spread(self) -> Published:
        if len({self.std is None, self.std_n is None, not self.spread}) > 1:
            raise ValueError("std, std_n and spread are given together or not at all")
        return self


SPREAD = ["std", "std_n", "n", "spread"]
COLUMNS = [name for name in Published.model_fields if name not in SPREAD]


def read_published(path: Path) -> list[Published]:
    """Rows of one file. Raises `UserError` that names the file, the line and the column."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES} bytes: not a table of published numbers")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if reader.fieldnames not in (COLUMNS, COLUMNS + SPREAD):
                raise UserError(f"{path}: expected the columns {','.join(COLUMNS)}, or these and {','.join(SPREAD)}")
            return [_parse(row, f"{path} line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error


def _parse(row: dict[str | None, object], where: str) -> Published:
    if None in row or None in row.values():
        raise UserError(f"{where}: expected {len([key for key in row if key])} cells")
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
    """The published number that stands beside a cell of ours: the first verified one, a paper's before a re-run's.

    It comes `with_spread`.
    """
    key = (protocol_id, backbone, metric)
    matches = [row for row in rows if row.verified and _key(row) == key]
    found = min(matches, key=lambda row: "arXiv" not in row.source, default=None)
    return with_spread(found, matches) if found else None


def with_spread(row: Published, rows: Iterable[Published]) -> Published:
    """``row`` with the spread that its verdict needs, so that one number has one verdict wherever it stands.

    Where its source states none and another verified one of ``rows`` does for the same protocol, weights and metric,
    it comes with that one's ``std``; ``spread`` then names that source.
    """
    if row.std is not None:
        return row
    stated = next((one for one in rows if one.verified and one.std is not None and _key(one) == _key(row)), None)
    if stated is None:
        return row
    spread = f"{stated.source}, {stated.source_locator}: {stated.spread}"
    return row.model_copy(update={"std": stated.std, "std_n": stated.std_n, "spread": spread})


def _key(row: Published) -> tuple[str, str, str]:
    return row.protocol_id, row.ours, row.metric
