"""Find records, show them as a table of runs, and promote some into the repository. Imports no torch.

``runs/`` holds a user's own runs; ``results/runs/<task>/<backbone>/`` holds those that were promoted on purpose.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from mae_bench.errors import UserError
from mae_bench.reporting.record import Record, read_record, write_record

# A run's folder holds other JSON, too (logs, predictions); a record is recognised by its first key.
RECORD_HEAD = re.compile(rb'\s*\{\s*"schema_version"\s*:')

# One row a run. `digest` is the record's content: equal digests are copies of one record.
COLUMNS = {
    "task": "str",
    "protocol": "str",
    "engine": "str",
    "backbone": "str",
    "size": "str",
    "init": "str",
    "seed": "int64",
    "metric": "str",
    "value": "float64",
    "best": "float64",
    "trivial": "float64",
    "smoke": "bool",
    "eval_only": "bool",
    "ours": "object",
    "overridden": "object",
    "weights": "str",
    "given": "str",
    "recipe_hash": "str",
    "code_hash": "str",
    "created": "datetime64[us, UTC]",
    "seconds": "float64",
    "run_id": "str",
    "digest": "str",
}


def load_records(paths: Iterable[Path | str]) -> Iterator[Record]:
    """Records one by one, from record files and from folders searched to any depth, in a fixed order.

    In a folder every ``*.json`` that begins like a record is read; links to folders are not followed. A file that is
    named outright must be a record.

    Raises:
        UserError: a path does not exist, or a record is damaged.
    """
    for path in map(Path, paths):
        if path.is_dir():
            yield from map(read_record, _record_files(path))
        else:
            yield read_record(path)


def _record_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, onerror=_unreadable):
        folders.sort()
        for name in sorted(files):
            path = Path(parent, name)
            if not path.is_file():
                continue  # a pipe or socket would never answer
            if name == "record.json" or (name.endswith(".json") and _begins_like_a_record(path)):
                yield path


def _unreadable(error: OSError) -> None:
    raise UserError(f"cannot read folder {error.filename}: {error.strerror}") from error


def _begins_like_a_record(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return RECORD_HEAD.match(file.read(128)) is not None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def frame(records: Iterable[Record], metric: str | None = None) -> pd.DataFrame:
    """A tidy table, one row a run, with the columns of `COLUMNS`.

    The same for any order of the records and any number of copies of them. ``value`` is the task's primary metric
    after the last step, or ``metric``, for the runs that have it; ``best`` is its best over all evaluations and
    ``trivial`` that of a trivial prediction; an undefined value is nan. ``given`` begins the hash of weights that the
    user named instead of the backbone's.
    """
    rows = (_row(record, metric or record.metric) for record in records if (metric or record.metric) in record.metrics)
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table["created"] = pd.to_datetime(table["created"], utc=True, format="ISO8601")
    table = table.astype(COLUMNS).drop_duplicates("digest")
    return table.sort_values(["task", "protocol", "backbone", "seed", "created", "digest"], ignore_index=True)


def _row(record: Record, metric: str) -> dict[str, object]:
    return {
        **{key: getattr(record, key) for key in COLUMNS if key in Record.model_fields},
        "metric": metric,
        "value": record.metrics[metric],
        "best": record.best.get(metric),
        "trivial": record.baseline.get(metric),
        "ours": tuple(record.ours),
        "overridden": tuple(record.overridden),
        "weights": record.weights.sha256,
        "given": record.weights.sha256[:8] if record.weights.kind == "given" and not record.eval_only else "",
        "seconds": record.times.seconds,
        "digest": hashlib.sha256(record.model_dump_json().encode()).hexdigest(),
    }


def promote(records: Iterable[Record], into: Path) -> list[Path]:
    """Copy records to ``into/<task>/<backbone>/<run_id>.json``: all of them, or none if one is refused.

    Raises:
        UserError: a smoke run, a name that cannot be a file's, or a run that is there already (the same run, or the
            same task, protocol, backbone, seed and recipe).
    """
    taken = {key: record.run_id for record in (load_records([into]) if into.is_dir() else ()) for key in _keys(record)}
    accepted: list[Record] = []
    for record in records:
        if record.smoke:
            raise UserError(f"run '{record.run_id}' is a smoke run: it measures nothing and is not promoted")
        for name in (record.task, record.backbone, record.run_id):
            if not re.fullmatch(r"\w[\w.+@=-]{0,200}", name):
                raise UserError(f"run '{record.run_id}': '{name}' cannot name a file below {into}; rename the recipe")
        for key in _keys(record):
            if key in taken:
                raise UserError(f"run '{record.run_id}' is in {into} already, as '{taken[key]}'; remove that one first")
            taken[key] = record.run_id
        accepted.append(record)
    return [write_record(run, into / run.task / run.backbone, f"{run.run_id}.json") for run in accepted]


def _keys(record: Record) -> tuple[object, ...]:
    sample = record.weights.sha256 if record.eval_only else record.seed
    return record.run_id, (record.task, record.protocol, record.backbone, record.eval_only, sample, record.recipe_hash)
