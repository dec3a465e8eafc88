"""The record of a run: its schema, and writing that loses nothing and overwrites nothing."""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from reporting_records import record, values

from mae_bench.errors import UserError
from mae_bench.reporting import store
from mae_bench.reporting.record import (
    MAX_RECORD_BYTES,
    DataUsed,
    Git,
    Hardware,
    PerImage,
    Record,
    Times,
    WeightsUsed,
    one_line,
    read_record,
    record_from,
    write_record,
)
from mae_bench.schema import Strict

NAMES = "a" * 64
DOCS = Path(__file__).resolve().parent.parent / "docs" / "records.md"


def seen(right: int, count: int, **changes: Any) -> dict[str, Any]:
    """What a record says of ``count`` validation pictures of which the first ``right`` were right."""
    data = values()["data"] | {"counts": {"train": 8, "val": count}}
    images = PerImage.of(NAMES, [index < right for index in range(count)])
    return {"images": images, "data": data, "value": 100 * right / count} | changes


def test_what_is_written_is_read(tmp_path: Path) -> None:
    more = {"history": [{"step": 1, "loss": 2.5}], "per_class": {"cat|*": {"AP": 1.0}}, "notes": ["bf16 → fp32"]}
    written = record(**seen(3, 11), **more)
    path = write_record(written, tmp_path / "new" / "folder")
    assert path.name == "record.json"
    assert read_record(path) == written
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.read_text(encoding="utf-8").startswith('{\n "schema_version": 2,')


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
        ({"images": {"names": NAMES, "count": 8}}, "key 'images.correct' is missing"),
        ({"images": {"names": "x", "count": 8, "correct": "AA=="}}, "images.names: String should match pattern"),
        ({"images": {"names": NAMES, "count": 8, "corect": "AA=="}}, r"'images.corect' \(did you mean 'correct'\?\)"),
        ({"images": {"names": NAMES, "count": 8, "correct": "\x1b[31m"}}, "images: correct is not base64"),
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
    path.write_text(json.dumps({"schema_version": 2} | values() | change))
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
    path.write_text(json.dumps({"schema_version": 2} | {k: v for k, v in values().items() if k != "seed"}))
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


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("version", [1, 2])
def test_numbers_that_json_does_not_have_are_refused(number: str, version: int, tmp_path: Path) -> None:
    """Python's parser takes them, and nothing after it: no hash can be made of a recipe with one."""
    for key, place in (("recipe", {"a": ["X"]}), ("effective", {"lr": "X"}), ("weights", {"load": {"a": "X"}})):
        made = {"schema_version": version} | values()
        made[key] = made.get(key, {}) | place
        path = tmp_path / "record.json"
        path.write_text(json.dumps(made).replace('"X"', number))
        with pytest.raises(UserError, match=f"is not a record: {key}.* finite"):
            read_record(path)


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00Z", "9999-12-31T00:00:00Z", "2026-01-01T00:00:00.1234567Z"])
def test_times_that_no_table_takes_are_refused(time: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"schema_version": 2} | values() | {"created": time}))
    with pytest.raises(UserError, match="created: expected a time in UTC from 1970 on"):
        read_record(tmp_path / "record.json")


@pytest.mark.parametrize("time", ["1970-01-01T00:00:00Z", "2199-12-31T23:59:59.123456+00:00"])
def test_times_at_the_ends_go_into_a_table(time: str) -> None:
    assert f"{store.frame([record(created=time)])['created'][0]:%Y}" == time[:4]


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
        "schema_version", "smoke", "eval_only", "best", "baseline", "per_class", "images", "history", "ours",
        "overridden", "effective", "parameters", "notes",
    }  # fmt: skip


def test_every_field_is_described() -> None:
    text = DOCS.read_text(encoding="utf-8")
    parts: dict[str, type[Strict]] = {
        "images": PerImage, "weights": WeightsUsed, "data": DataUsed, "git": Git, "hardware": Hardware, "times": Times,
    }  # fmt: skip
    fields = [*Record.model_fields.keys() - parts.keys()]
    fields += [f"{name}.{field}" for name, part in parts.items() for field in part.model_fields]
    assert [field for field in fields if f"`{field}`" not in text] == []


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_pictures_come_back_as_they_went_in(correct: list[bool]) -> None:
    images = PerImage.of(NAMES, correct)
    assert images.array().tolist() == correct == PerImage.of(NAMES, images.array()).array().tolist()
    assert (images.count, images.hits) == (len(correct), sum(correct))
    assert base64.b64decode(images.correct) == np.packbits(correct).tobytes()


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_no_other_text_stands_for_the_same_pictures(correct: list[bool], data: st.DataObject) -> None:
    """A changed character is another result or an error: copies of a record are found by their content."""
    text = PerImage.of(NAMES, correct).correct
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(max_codepoint=255).filter(lambda char: char != text[place]))
    with suppress(ValidationError):
        changed = PerImage(names=NAMES, count=len(correct), correct=text[:place] + other + text[place + 1 :])
        assert changed.array().tolist() != correct


@pytest.mark.parametrize(
    ("count", "correct", "message"),
    [
        (9, "AA==", "correct holds 1 bytes, and 9 pictures take 2"),
        (8, "AAA=", "correct holds 2 bytes, and 8 pictures take 1"),
        (10**30, "AA==", "correct holds 1 bytes"),
        (7, "AQ==", "correct has bits set after the last of 7 pictures"),
        (8, "AR==", "stray bits"),
        (8, "AA", "correct is not base64"),
        (8, "A A==", "correct is not base64"),
        (8, "AÄ==", "correct is not base64"),
        (8, "", "correct holds 0 bytes"),
        (0, "", "count: Input should be greater than 0"),
        (True, "AA==", "count: Input should be a valid integer"),
    ],
)
def test_damaged_pictures_are_named(count: int, correct: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"record: images.*{message}"):
        record(images={"names": NAMES, "count": count, "correct": correct})


@pytest.mark.parametrize("correct", [[], [0, 1], [[True]], ["yes"], [0.5]])
def test_only_flags_are_packed(correct: list[Any]) -> None:
    with pytest.raises(UserError, match=r"images: correct must be \(n,\) bool"):
        PerImage.of(NAMES, correct)
    with pytest.raises(UserError, match="images: names: String should match"):
        PerImage.of("names", [True])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": 100 * 4 / 11}, r"metrics.top1 is 36.36.*, but of images 27.27"),
        ({"value": 27.27}, "one of them was changed"),
        ({"value": float("nan")}, "metrics.top1 is None"),
        ({"images": PerImage.of(NAMES, [True] * 3 + [False] * 9)}, "images.count is 12, data.counts.val 11"),
        ({"task": "coco"}, "images are a classifier's, and engine is 'detection'"),
    ],
)
def test_the_pictures_give_the_number(change: dict[str, Any], message: str) -> None:
    """A number that was edited by hand, or counted over fewer pictures than the split holds."""
    assert record(**seen(3, 11)).images is not None
    with pytest.raises(UserError, match=message):
        record(**seen(3, 11, **change))


def test_pictures_of_imagenet_take_little_room(tmp_path: Path) -> None:
    one = record(**seen(41_234, 50_000))
    size = write_record(one, tmp_path).stat().st_size
    assert size - len(record().model_dump_json(indent=1)) < 9000


def test_one_line() -> None:
    assert one_line("a\n\x1b[31mb\tc\u2028d") == "a [31mb c d"
    assert one_line("x" * 1000, limit=10) == "x" * 9 + "…"


def test_reporting_imports_no_torch() -> None:
    modules = "record, migrate, store, cells, published, tables"
    code = f"import sys; from mae_bench.reporting import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
