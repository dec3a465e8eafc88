"""The record of a run: its schema, and writing that loses nothing and overwrites nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reporting_records import record, values

from mae_bench.errors import UserError
from mae_bench.reporting.record import MAX_RECORD_BYTES, Record, one_line, read_record, record_from, write_record


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = record(history=[{"step": 1, "loss": 2.5}], per_class={"cat|*": {"AP": 1.0}}, notes=["bf16 → fp32"])
    path = write_record(written, tmp_path / "new" / "folder")
    assert path.name == "record.json"
    assert read_record(path) == written
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.read_text(encoding="utf-8").startswith('{\n "schema_version": 1,')


def test_undefined_values_are_null(tmp_path: Path) -> None:
    path = write_record(record(value=float("nan"), best={"top1": float("inf")}), tmp_path)
    assert json.loads(path.read_text())["metrics"]["top1"] is None
    assert read_record(path).value is None
    assert read_record(path).best == {"top1": None}


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    path = write_record(record(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"record\.json exists and records are never overwritten"):
        write_record(record(seed=1), tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def _write_many(folder: Path, writer: int) -> int:
    """Every writer writes its own files and tries for the one that all want; returns how often it got that one."""
    won = 0
    for number in range(10):
        write_record(record(seed=100 * writer + number), folder, f"{writer}-{number}.json")
        try:
            write_record(record(seed=writer), folder, f"wanted-{number}.json")
            won += 1
        except UserError:
            pass
    return won


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        won = list(pool.map(_write_many, [tmp_path] * 4, range(4)))
    assert sum(won) == 10
    assert len(list(tmp_path.iterdir())) == 50
    for writer in range(4):
        for number in range(10):
            assert read_record(tmp_path / f"{writer}-{number}.json").seed == 100 * writer + number
    assert all(read_record(tmp_path / f"wanted-{number}.json").seed < 4 for number in range(10))


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    path = write_record(record(), tmp_path)
    assert read_record(path) == record()
    with pytest.raises(UserError, match="never overwritten"):
        write_record(record(seed=1), tmp_path)
    assert read_record(path) == record()
    assert list(tmp_path.iterdir()) == [path]


FAULTS = {
    # A full disk, as far as a process can make one for itself: no file may grow beyond 100 bytes.
    "full": "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))",
    "killed": "import os, signal; os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_half_written_record(fault: str, tmp_path: Path) -> None:
    code = f"""
import sys; from pathlib import Path
from reporting_records import record
from mae_bench.errors import UserError
from mae_bench.reporting.record import write_record
whole = record()
{FAULTS[fault]}
try:
    write_record(whole, Path({str(tmp_path)!r}))
except UserError as error:
    sys.exit(str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "record.json").exists()
    if fault == "killed":
        assert done.returncode == -signal.SIGKILL
    else:
        assert done.stderr.startswith(f"cannot write {tmp_path}/record.json: File too large")
        assert list(tmp_path.iterdir()) == []
    assert write_record(record(), tmp_path).is_file()


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write .*file/record\.json"):
        write_record(record(), tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version: Input should be 1, not 2"),
        ({"sed": 1}, r"unknown key 'sed' \(did you mean 'seed'\?\)"),
        ({"seed": "0"}, "seed: Input should be a valid integer, not '0'"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"metrics": {"top1": True}}, "metrics.top1"),
        ({"metrics": {"loss": 1.0}}, "metrics lacks the primary metric 'top1'"),
        (
            {"init": "random"},
            "init: Input should be 'mae', 'supervised', 'scratch', .*, not 'random'",
        ),
        ({"created": "2026-01-01T00:00:00+02:00"}, "created: expected a time in UTC"),
        ({"created": "yesterday"}, "created"),
        ({"recipe_hash": "abc"}, "recipe_hash"),
        ({"protocol": "other@1"}, "does not start with recipe_protocol"),
        ({"overridden": ["epochs"]}, r"must say what sets the run apart from it \(overridden values\)"),
        ({"smoke": True}, r"must say what sets the run apart from it \(smoke\)"),
    ],
)
def test_faults_are_one_line_that_names_file_and_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"schema_version": 1} | values() | change))
    with pytest.raises(UserError, match=message) as caught:
        read_record(path)
    assert str(caught.value).startswith(f"{path} is not a record: ")
    assert "\n" not in str(caught.value)


def test_data_of_another_kind_leave_the_protocol() -> None:
    other = values()["data"] | {"matches": False}
    with pytest.raises(UserError, match="other data"):
        record(data=other)
    assert record(data=other, protocol="tiny-linear@1+data:44444444").recipe_protocol == "tiny-linear@1"


def test_missing_key(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({key: value for key, value in values().items() if key != "seed"}))
    with pytest.raises(UserError, match="key 'seed' is missing"):
        read_record(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[1]", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": 1}', b'{"\\u001b[31m\\n": 1}']
)
def test_hostile_content_is_one_short_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_record(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 300


def test_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(MAX_RECORD_BYTES + 1)
    with pytest.raises(UserError, match="larger than"):
        read_record(path)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        read_record(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot read"):
        read_record(tmp_path)


def test_new_values_are_checked() -> None:
    with pytest.raises(UserError, match="record: unknown key 'metricks'"):
        record_from(values() | {"metricks": {}})


def test_the_record_has_the_fields_it_promises() -> None:
    """A field that goes or comes is a new schema version: old records must still be read."""
    assert Record.model_fields.keys() == values().keys() | {
        "schema_version", "smoke", "eval_only", "best", "baseline", "per_class", "history", "ours", "overridden",
        "effective", "parameters", "notes",
    }  # fmt: skip


def test_one_line() -> None:
    assert one_line("a\n\x1b[31mb\tc\u2028d") == "a [31mb c d"
    assert one_line("x" * 1000, limit=10) == "x" * 9 + "…"


def test_reporting_imports_no_torch() -> None:
    modules = "record, store, cells, published, tables"
    code = f"import sys; from mae_bench.reporting import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
