"""Records of earlier schema versions are read, and never rewritten."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from reporting_records import record, values

from mae_bench.errors import UserError
from mae_bench.reporting import migrate
from mae_bench.reporting.record import Record, read_record, write_record

RUNS = Path(__file__).resolve().parent.parent / "results" / "runs"


def _write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "record.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_chain_reaches_the_version_that_is_written() -> None:
    assert record().schema_version == migrate.CURRENT
    assert sorted(migrate.STEPS) == list(range(1, migrate.CURRENT))


def test_a_record_of_version_1_reads_as_one_without_pictures(tmp_path: Path) -> None:
    path = _write(tmp_path, {"schema_version": 1} | values(value=float("nan")))
    before = path.read_bytes()
    assert read_record(path) == record(value=float("nan"))
    assert read_record(path).images is None
    assert path.read_bytes() == before


def test_committed_records_of_version_1_read_as_before() -> None:
    """Every value as it stands in the file, whichever way it was read."""
    old = [path for path in sorted(RUNS.rglob("*.json")) if b'"schema_version": 1,' in path.read_bytes()[:40]]
    assert old
    for path in old:
        content = json.loads(path.read_bytes())
        read = read_record(path)
        assert json.loads(read.model_dump_json()) == content | {"schema_version": 2, "images": None}
        assert Record.model_validate_json(json.dumps(content | {"schema_version": 2})) == read


def test_steps_are_pure() -> None:
    old = {"schema_version": 1} | values()
    before = copy.deepcopy(old)
    new = migrate.to_current(old)
    assert old == before
    assert new["schema_version"] == migrate.CURRENT
    assert migrate.to_current(new) is new  # a current record is left alone


def test_the_first_key_is_a_help_and_no_rule(tmp_path: Path) -> None:
    """A file that another program wrote anew, with its keys in order of the alphabet."""
    path = write_record(record(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert not path.read_text().startswith('{"schema_version"')
    assert read_record(path) == record()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (7, r"written by a newer mae_bench \(schema 7, this one reads 1 to 2\): upgrade"),
        (0, "schema_version is 0; expected a whole number from 1 to 2"),
        (-1, "schema_version is -1; expected"),
        (10**18, "schema_version is 10+; expected"),
        (1.0, r"schema_version is 1\.0; expected"),
        (2.5, r"schema_version is 2\.5; expected|Input should be 2, not 2\.5"),
        ("1", "schema_version is '1'; expected"),
        (True, "schema_version is True; expected"),
        (None, "schema_version is None; expected"),
        ("\x1b[31m\n" * 99, "schema_version is '.x1b"),
        ([[1] * 9999], "schema_version is .*; expected"),
    ],
)
def test_a_version_that_is_not_known_is_named(version: Any, message: str, tmp_path: Path) -> None:
    path = _write(tmp_path, {"schema_version": version} | values())
    with pytest.raises(UserError, match=message) as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 300


def test_a_missing_version_is_named(tmp_path: Path) -> None:
    """Once read as version 1: a file of anything that has the other keys."""
    with pytest.raises(UserError, match=r"record\.json is not a record: it states no schema_version"):
        read_record(_write(tmp_path, values()))


def test_a_version_1_with_fields_of_version_2_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, {"schema_version": 1} | values() | {"images": None})
    with pytest.raises(UserError, match="unknown key 'images': a record of schema 1 has none"):
        read_record(path)


def test_faults_of_an_old_record_name_the_key(tmp_path: Path) -> None:
    path = _write(tmp_path, {"schema_version": 1} | values() | {"sed": 1})
    with pytest.raises(UserError, match=r"record\.json is not a record: unknown key 'sed' \(did you mean 'seed'"):
        read_record(path)
