"""Find records and show them as a table of runs. Imports no torch.

``runs/`` holds a user's own runs; ``results/runs/<task>/<backbone>/`` holds those that were promoted on purpose
(`transfer.promote`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mae_bench.errors import UserError
from mae_bench.reporting.record import MAX_RECORD_BYTES, Record, one_line, read_record
from mae_bench.schema import VALUES

PRIMARY = ""  # among metrics: each task's own
# A run's folder holds other JSON, too (logs, predictions); a record is recognised by its first key.
RECORD_HEAD = re.compile(rb'\s*\{\s*"schema_version"\s*:')
OBJECT_HEAD = re.compile(rb"(\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[\s\0]*\{")  # after a byte order mark, too

# One row a run and metric. `digest` is the record's content: equal digests are copies of one record.
COLUMNS = {
    "task": "str",
    "protocol": "str",
    "recipe_protocol": "str",
    "engine": "str",
    "backbone": "str",
    "size": "str",
    "init": "str",
    "seed": "int64",
    "metric": "str",
    "primary": "bool",
    "measured": "bool",
    "value": "float64",
    "best": "float64",
    "trivial": "float64",
    "smoke": "bool",
    "eval_only": "bool",
    "ours": "object",
    "overridden": "object",
    "settings": "object",
    "weights": "str",
    "given": "str",
    "untrained": "bool",
    "started_from": "str",
    "made_by": "str",
    "data": "str",
    "recipe_hash": "str",
    "code_hash": "str",
    "dirty": "bool",
    "created": "datetime64[us, UTC]",
    "seconds": "float64",
    "run_id": "str",
    "digest": "str",
    "file": "str",
}
ORDER = ["task", "protocol", "backbone", "seed", "created", "digest", "file", "metric"]


def load_records(paths: Iterable[Path | str]) -> Iterator[Record]:
    """Records one by one, from record files and from folders searched to any depth, in a fixed order.

    In a folder every ``*.json`` that begins like a record is read; links to folders are not followed. A file that is
    named outright must be a record.

    Raises:
        UserError: a path does not exist, or a record is damaged.
    """
    return (read_record(file) for file in record_files(paths))


def record_files(paths: Iterable[Path | str]) -> Iterator[Path]:
    """The files that `load_records` reads, in its order."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from (file for file in files_below(path) if is_record(file))
        else:
            yield path


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below ``folder``, in a fixed order; links to folders are not followed.

    Raises:
        UserError: a folder cannot be listed.
    """
    for parent, folders, files in os.walk(folder, onerror=_unreadable):
        folders.sort()
        for name in sorted(files):
            yield Path(parent, name)


def is_record(path: Path) -> bool:
    """Whether a file is meant as a record: ``record.json``, or JSON that begins like one.

    Raises:
        UserError: it holds a record that another program has written anew, or cannot be read.
    """
    if path.suffix != ".json" or not path.is_file():  # a pipe or socket would never answer
        return False
    if path.name == "record.json" or RECORD_HEAD.match(_start(path, 128)):
        return True
    _refuse_if_rewritten(path)
    return False


def _unreadable(error: OSError) -> None:
    raise UserError(f"cannot read folder {error.filename}: {error.strerror}") from error


def _refuse_if_rewritten(path: Path) -> None:
    """Keys in another order, or a byte order mark: such a record must not drop out of a table unsaid."""
    if not OBJECT_HEAD.match(_start(path, 128)):
        return
    content = _start(path, MAX_RECORD_BYTES).replace(b"\0", b"")  # UTF-16, as a Windows shell writes it
    if b'"schema_version"' in content and b'"recipe_hash"' in content:
        raise UserError(
            f"{path} looks like a record that another program wrote anew: it does not begin with schema_version; "
            "restore the file as the run wrote it, or move it elsewhere"
        )


def _start(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def frame(records: Iterable[Record], *metrics: str) -> pd.DataFrame:
    """A tidy table, one row a run and metric, with the columns of `COLUMNS`.

    The same for any order of the records and any number of copies of them. ``value`` is the task's primary metric
    after the last step, or each of ``metrics`` (`PRIMARY` among them is the task's), ``best`` its best over all
    evaluations and ``trivial`` that of a trivial prediction; an undefined value is nan. A run without a metric has a
    row of it that is not ``measured``: whether a run counts does not depend on the metric. ``settings`` are the
    overridden values as ``--set`` takes them. ``given`` begins the hash of weights that the user named instead of the
    backbone's; ``untrained`` runs started from random weights. ``started_from`` is the run that made the weights, where
    known, and ``made_by`` its recipe's hash where they are the backbone's own. ``data`` is the data's fingerprint,
    ``file`` the record's, or empty where it was given as an object.

    Raises:
        UserError: two runs with one id.
    """
    return _table(((record, "") for record in records), metrics)


def load_frame(paths: Iterable[Path | str], *metrics: str) -> pd.DataFrame:
    """`frame` of the records that `load_records` finds, with their files; of copies, the first file by name.

    One record at a time is held whole, so memory does not grow with the histories.
    """
    return _table(((read_record(file), str(file)) for file in record_files(paths)), metrics)


def _table(records: Iterable[tuple[Record, str]], metrics: Sequence[str]) -> pd.DataFrame:
    rows = (
        _row(record, metric, file)
        for record, file in records
        for metric in dict.fromkeys(name or record.metric for name in metrics or [PRIMARY])
    )
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table["created"] = pd.to_datetime(table["created"], utc=True, format="ISO8601")
    table = table.astype(COLUMNS).sort_values(ORDER).drop_duplicates(["digest", "metric"], ignore_index=True)
    _refuse_two_contents(table.drop_duplicates("digest"))
    return table


def _refuse_two_contents(runs: pd.DataFrame) -> None:
    """Nothing says which of them is the run; a table would take one and a card the other."""
    twice = runs[runs.duplicated("run_id", keep=False)].sort_values(["run_id", "file"])
    if not twice.empty:
        run_id, *files = twice["run_id"].iloc[0], *twice["file"].iloc[:2]
        where = " and ".join(file or "a record in memory" for file in files)
        raise UserError(one_line(f"two different records have the run id '{run_id}': {where}; keep the true one", 1000))


def _row(record: Record, metric: str, file: str) -> dict[str, object]:
    weights = record.weights
    maker, recipe = weights.maker.get("run_id"), weights.maker.get("recipe_hash")
    return {
        **{key: getattr(record, key) for key in _PLAIN},
        "metric": metric,
        "primary": metric == record.metric,
        "measured": metric in record.metrics,
        "value": record.metrics.get(metric),
        "best": record.best.get(metric),
        "trivial": record.baseline.get(metric),
        "ours": tuple(record.ours),
        "overridden": tuple(record.overridden),
        "settings": _settings(record),
        "weights": weights.sha256,
        "given": weights.sha256[:8] if weights.kind == "given" else "",
        "untrained": weights.kind == "none",
        "started_from": maker if isinstance(maker, str) else "",
        "made_by": recipe if isinstance(recipe, str) and weights.kind == "made" else "",
        "data": record.data.fingerprint,
        "dirty": record.git.dirty,
        "seconds": record.times.seconds,
        "digest": digest(record),
        "file": file,
    }


_PLAIN = [key for key in COLUMNS if key in Record.model_fields.keys() - {"ours", "overridden", "weights", "data"}]


def digest(record: Record) -> str:
    """sha256 of a record's content, whatever the layout or the schema version of its file."""
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()


def overridden_values(record: Record) -> dict[str, Any]:
    """The values that ``--set`` changed. One that was set to the schema's default may be missing from the recipe."""
    values, fields = record.recipe.get("values"), VALUES[record.engine].model_fields
    stated = values if isinstance(values, dict) else {}
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in record.overridden if key in fields}
    return {key: value for key in record.overridden for value in [stated.get(key, defaults.get(key))]}


def _settings(record: Record) -> tuple[str, ...]:
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in overridden_values(record).items())
