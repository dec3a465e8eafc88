"""`check`: copies, edits, leftovers and what does not belong in a folder of records."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reporting_records import record, sound, sound_values, values

from mae_bench import commands, places
from mae_bench.errors import UserError
from mae_bench.recipes import digest
from mae_bench.reporting.check import Finding, check, committed, failed, report
from mae_bench.reporting.record import Record, record_from, write_record

ROOT = Path(__file__).resolve().parent.parent


def promoted(folder: Path, run: Record) -> Path:
    return write_record(run, folder / run.task / run.backbone, f"{run.run_id}.json")


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_sound_records_have_no_findings(tmp_path: Path) -> None:
    for seed in range(3):
        promoted(tmp_path, sound(seed=seed))
    promoted(tmp_path, sound(seed=3, overridden={"epochs": 3.0, "base_lr": 0.2}))
    promoted(tmp_path, sound("tiny_coco"))
    write_record(sound("coco"), tmp_path.parent / "runs")
    assert check([tmp_path, tmp_path.parent / "runs"]) == []
    assert report([]) == "nothing found"


def test_the_committed_records_contradict_nothing() -> None:
    folders = committed(ROOT / "results")
    assert ROOT / "results" / "runs" in folders
    findings = check(folders)
    assert [str(finding) for finding in findings if finding.severity == "error"] == []


Edit = Callable[[dict[str, Any]], object]
CLASSES = {"a": {"top1": 40.0}, "b": {"top1": 60.0}}
EDITS: dict[str, tuple[Edit, str]] = {
    "the number": (
        lambda r: r["metrics"].update(top1=90.0),
        "metrics.top1 is 90.0, and the last point of history says",
    ),
    "the best": (lambda r: r["best"].update(top1=10.0), "best.top1 is 10.0, and 50.0 was reached"),
    "a value": (lambda r: r["recipe"]["values"].update(epochs=100.0), "recipe_hash is not the hash of recipe"),
    "the hash": (lambda r: r.update(recipe_hash="9" * 64), "recipe_hash is not the hash of recipe"),
    "the task": (lambda r: r.update(task="tiny_finetune"), "task is 'tiny_finetune', and its recipe says"),
    "the backbone": (lambda r: r.update(backbone="vit_l_mae"), "backbone is 'vit_l_mae', and its recipe says"),
    "the size": (lambda r: r.update(size="l"), "size is 'l', and its recipe says 't'"),
    "the id": (lambda r: r.update(run_id="another"), "run_id does not begin with"),
    "the seed": (lambda r: r.update(seed=5), "seed is 5, and run_id says 0"),
    "the time": (lambda r: r.update(created="2026-01-01T00:00:30+00:00"), "and run_id says 20260101T000000Z"),
    "sources": (lambda r: r["recipe"]["origins"]["epochs"].update(source="ours"), "origins differ in epochs"),
    "ours": (lambda r: r.update(ours=["base_lr"]), "origins differ in base_lr"),
    "the suffix": (lambda r: r.update(protocol="tiny-linear@1+set:deadbeef"), "makes 'tiny-linear@1'"),
    "the data": (
        lambda r: (r["data"].update(matches=False), r.update(protocol="tiny-linear@1+x")),
        "makes 'tiny-linear@1+data:44444444'",
    ),
    "a class": (
        lambda r: r.update(baseline={"top1": 50.0}, per_class=CLASSES | {"b": {"top1": 61.0}}),
        "metrics.top1 is 50.0, and the mean of per_class top1 is 50.5",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found(edit: str, tmp_path: Path) -> None:
    change, expected = EDITS[edit]
    edited = sound_values()
    change(edited)
    write_record(record_from(edited), tmp_path)
    findings = check([tmp_path])
    assert any(expected in finding.what for finding in findings), report(findings)
    assert failed(findings)


def test_means_over_classes(tmp_path: Path) -> None:
    """By construction for mIoU and AP; for top1 where every class has as many pictures, which the baseline tells."""
    for seed, changes in enumerate(
        [
            {"per_class": CLASSES, "baseline": {"top1": 50.0}},
            {"per_class": {"a": {"top1": 1.0}, "b": {"top1": 99.0}}, "baseline": {"top1": 70.0}, "value": 30.0},
            {"task": "tiny_coco", "per_class": {"a": {"box_AP": 100.0}, "b": {"box_AP": None}, "c": {"box_AP": 0.0}}},
        ]
    ):
        promoted(tmp_path, sound(seed=seed, **changes))
    assert check([tmp_path]) == []
    path = promoted(tmp_path, sound("tiny_coco", seed=9, per_class={"a": {"box_AP": 49.0}}))
    assert only(check([tmp_path])) == Finding(
        "error",
        path,
        "metrics.box_AP is 50.0, and the mean of per_class box_AP is 49.0",
        "restore the file from its copy (git checkout), or delete it and run again",
    )


def test_copies(tmp_path: Path) -> None:
    first = write_record(sound(), tmp_path / "a")
    write_record(sound(), tmp_path / "b")
    copy = only(check([tmp_path]))
    assert (copy.severity, copy.what) == ("warning", f"a copy of {first}")


def test_one_run_id_with_two_contents(tmp_path: Path) -> None:
    write_record(sound(), tmp_path / "a")
    write_record(sound(notes=["edited"]), tmp_path / "b")
    finding = only(check([tmp_path]))
    assert finding.severity == "error" and "with other content" in finding.what


def test_one_cell_seed_and_recipe_with_two_numbers(tmp_path: Path) -> None:
    """By the same code and computer one of both is wrong; by other code it is a repetition."""
    again = sound_values(created="2026-01-02T00:00:00+00:00", value=51.0)
    write_record(sound(), tmp_path / "a")
    write_record(record_from(again), tmp_path / "b")
    finding = only(check([tmp_path]))
    assert finding.severity == "error" and "with other numbers by the same code" in finding.what
    (tmp_path / "b" / "record.json").unlink()
    write_record(record_from(again | {"code_hash": "8" * 64}), tmp_path / "b")
    finding = only(check([tmp_path]))
    assert finding.severity == "warning" and "with other numbers" in finding.what
    (tmp_path / "b" / "record.json").unlink()
    write_record(sound(created="2026-01-02T00:00:00+00:00"), tmp_path / "b")  # reproduced
    assert check([tmp_path]) == []


def test_what_is_wrong_with_a_place(tmp_path: Path) -> None:
    path = write_record(sound(), tmp_path / "elsewhere", "renamed.json")
    first, second = check([tmp_path])
    assert (first.severity, first.what) == ("error", f"its run_id is '{sound().run_id}'")
    assert (second.severity, second.what) == ("warning", "belongs below tiny_linear/vit_t_mae")
    assert first.file == second.file == path


def test_doubtful_runs(tmp_path: Path) -> None:
    smoke = sound_values() | {"smoke": True, "protocol": "tiny-linear@1+smoke"}
    write_record(record_from(smoke), tmp_path / "runs")
    assert only(check([tmp_path / "runs"])).severity == "warning"
    promoted(tmp_path / "results", record_from(smoke))
    assert only(check([tmp_path / "results"])).severity == "error"
    write_record(sound(git={"dirty": True}), tmp_path / "dirty")
    assert "no commit holds" in only(check([tmp_path / "dirty"])).what
    late = sound_values() | {"times": {"started": "2025-12-31T23:00:00+00:00", "seconds": 1.0}}
    write_record(record_from(late), tmp_path / "late")
    assert "created is 3600 s after times.started" in only(check([tmp_path / "late"])).what
    for number, started in enumerate(("yesterday", "2026-01-01T00:00:00")):
        odd = sound_values() | {"times": {"started": started, "seconds": 1.0}}
        write_record(record_from(odd), tmp_path / str(number))
        assert "is no time in UTC" in only(check([tmp_path / str(number)])).what


def test_earlier_schema_and_unknown_keys(tmp_path: Path) -> None:
    path = promoted(tmp_path, sound())
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"metric_": "top1"}))
    assert "unknown key 'metric_' (did you mean 'metric'?)" in only(check([tmp_path])).what
    del content["images"]
    path.write_text(json.dumps(content | {"schema_version": 1}))
    finding = only(check([tmp_path]))
    assert (finding.severity, finding.what) == ("warning", "schema 1, read as 2")


def test_leftovers_damage_and_foreign_files(tmp_path: Path) -> None:
    kept = promoted(tmp_path, sound())
    folder = kept.parent
    (folder / ".record-abc.tmp").write_text('{"schema')
    (folder / "empty.json").touch()
    (folder / "cut.json").write_text('{"schema_version": 2, "run')
    (folder / "notes.txt").write_text("hello")
    (folder / "orphan.png").write_bytes(b"")
    kept.with_suffix(".png").write_bytes(b"no picture")
    (folder / "link.json").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.json")
    found = {finding.file.name: (finding.severity, finding.what) for finding in check([tmp_path])}
    assert found.pop("cut.json")[0] == "error"
    assert found.pop("link.json") == found.pop("pipe.json") == found["empty.json"]
    assert found == {
        ".record-abc.tmp": ("warning", "left by a write that was cut off"),
        "empty.json": ("error", "no record, or its beginning is damaged"),
        "notes.txt": ("warning", "not a record and no record's picture"),
        "orphan.png": ("warning", "not a record and no record's picture"),
        f"{kept.stem}.png": ("warning", "no PNG"),
    }


def test_a_run_folder_may_hold_other_files(tmp_path: Path) -> None:
    write_record(sound(), tmp_path)
    (tmp_path / "log.jsonl").write_text("{}")
    (tmp_path / "predictions.json").write_text("[]")
    (tmp_path / "samples.png").write_bytes(b"x")
    assert check([tmp_path]) == []
    (tmp_path / "more.json").touch()
    assert only(check([tmp_path])).severity == "error"


def test_one_stray_record_does_not_loosen_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "results" / "runs"
    kept = promoted(root, sound())
    lonely = promoted(root, sound("tiny_coco"))
    lonely.write_bytes(b"\0" * 100)
    stray = write_record(sound(seed=1), root)
    (kept.parent / "renamed.json").write_bytes(kept.read_bytes())
    (kept.parent / "cut.json").write_text("[")
    found = {(finding.file.name, finding.severity) for finding in check([root])}
    assert {("renamed.json", "error"), ("cut.json", "error")} <= found  # beside promoted records, anywhere
    assert (lonely.name, "error") not in found
    monkeypatch.setattr(places, "checkout", lambda: tmp_path)
    found = {(finding.file.name, finding.severity) for finding in check([root])}
    assert {("renamed.json", "error"), ("cut.json", "error"), (lonely.name, "error"), (stray.name, "error")} <= found


def test_every_folder_of_committed_records_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "checkout", lambda: tmp_path)
    nothing = argparse.Namespace(paths=[])
    (tmp_path / "results" / "tables").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no records below .*results: name"):
        commands.check_results(nothing)
    for folder in ("runs", "suites/toy", "others", "tables"):
        promoted(tmp_path / "results" / folder, sound(notes=[folder]) if folder != "tables" else record())
    assert commands.check_results(nothing) == 1
    said = capsys.readouterr().out
    assert "suites/toy" in said and "others" in said and "tables" not in said


def test_a_record_that_another_program_wrote_anew_is_an_error(tmp_path: Path) -> None:
    path = promoted(tmp_path, sound())
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    finding = only(check([tmp_path]))
    assert finding.severity == "error" and "another program wrote anew" in finding.what


def test_named_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no records below .*empty: name"):
        check([tmp_path / "empty"])
    with pytest.raises(UserError, match="no such file or folder"):
        check([tmp_path / "none"])
    path = promoted(tmp_path, sound())
    assert check([path]) == check([tmp_path, tmp_path]) == []
    path.write_text("{}")
    assert failed(check([path]))


def test_the_report_is_one_line_a_finding(tmp_path: Path) -> None:
    hostile = values() | {"run_id": "x\n\x1b[2Jerror: none", "recipe_hash": digest({"values": {"epochs": 1.0}})}
    write_record(record_from(hostile), tmp_path, "a\nb.json")
    findings = check([tmp_path])
    lines = report(findings).splitlines()
    assert len(lines) == len(findings) + 1
    assert "\x1b" not in report(findings)
    errors = sum(finding.severity == "error" for finding in findings)
    assert lines[-1] == f"{errors} errors, {len(findings) - errors} warnings"


def test_a_plain_record_of_the_other_tests_is_found_inconsistent(tmp_path: Path) -> None:
    write_record(record(), tmp_path)
    assert failed(check([tmp_path]))
