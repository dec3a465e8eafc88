"""Promotion into the repository, and import of records from elsewhere: all or nothing, and nothing hostile."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from reporting_records import record as contradicting
from reporting_records import sound as record
from reporting_records import sound_values as values

from mae_bench import places
from mae_bench.errors import UserError
from mae_bench.recipes import digest
from mae_bench.reporting import transfer
from mae_bench.reporting.record import Record, read_record, record_from, write_record
from mae_bench.reporting.store import load_records
from mae_bench.reporting.transfer import import_records, png_fault, promote

LATER = "2026-02-01T00:00:00+00:00"


def changed(**changes: Any) -> Record:
    return record_from(values(seed=5) | changes)


def runs(folder: Path, *records) -> Path:  # type: ignore[no-untyped-def]
    """A user's runs folder."""
    for number, run in enumerate(records):
        write_record(run, folder / f"run{number}")
    return folder


def png(width: int = 6, height: int = 4) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(stream, "png")
    return stream.getvalue()


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_promotion(tmp_path: Path) -> None:
    copied = promote([runs(tmp_path / "runs", record(seed=0), record(seed=1))], tmp_path / "into")
    name = "tiny_linear.vit_t_mae.seed0-0a1b2c3d.20260101T000000Z.json"
    assert copied.files[0] == tmp_path / "into" / "tiny_linear" / "vit_t_mae" / name
    assert [read_record(path) for path in copied.files] == [record(seed=0), record(seed=1)]
    assert list(load_records([tmp_path / "into"])) == [record(seed=0), record(seed=1)]
    assert copied.pictures == [] and copied.notes == []


def test_promotion_is_refused_as_a_whole(tmp_path: Path) -> None:
    into = tmp_path / "into"
    promote([runs(tmp_path / "first", record(seed=0))], into)
    smoke = changed(smoke=True, protocol="tiny-linear@1+smoke")
    again = record(seed=0, created=LATER, value=60.0)
    for number, (refused, message) in enumerate(
        [
            (smoke, "is a smoke run"),
            (record(seed=0), r"'tiny_linear\.vit_t_mae\.seed0-.*' is there already, in .*seed0-.*\.json; remove one"),
            (record(seed=0, value=1.0), "is there already with other content, in"),
            (again, r"20260201T000000Z' is there already as 'tiny_linear\.vit_t_mae\.seed0-.*' with other"),
            (changed(run_id="../../outside"), "cannot name a file"),
            (changed(run_id="a\x1b[31m\nb"), r"run 'a \[31m b': .* cannot name a file"),
            (changed(backbone=".."), "cannot name a file"),
            (changed(metrics={"top1": 99.9}), r"record\.json: best.top1 is 50.0, and 99.9 was reached; take the file"),
            (contradicting(seed=5), "recipe_hash is not the hash of recipe"),
        ]
    ):
        with pytest.raises(UserError, match=message):
            promote([runs(tmp_path / str(number), record(seed=7), refused)], into)
    with pytest.raises(UserError, match=r"already, in .*run0/record\.json"):
        promote([runs(tmp_path / "twice", record(seed=7), record(seed=7))], into)
    assert [read_record(path) for path in into.rglob("*.json")] == [record(seed=0)]


def test_another_recipe_of_the_same_seed_may_be_promoted(tmp_path: Path) -> None:
    promote([runs(tmp_path / "a", record())], tmp_path / "into")
    other = values(created=LATER)
    other["recipe"]["values"]["epochs"] = 2.0
    other["recipe_hash"] = digest({key: value for key, value in other["recipe"].items() if key != "origins"})
    promote([runs(tmp_path / "b", record_from(other))], tmp_path / "into")
    assert len(files_below(tmp_path / "into")) == 2


def test_runs_of_other_given_weights_may_be_promoted(tmp_path: Path) -> None:
    """As the transfers of a suite are: one task, backbone and seed, and an encoder each."""
    times = [f"2026-02-0{day}T00:00:00+00:00" for day in range(1, 4)]
    given = [{"kind": "given", "sha256": letter * 64} for letter in "abb"]
    first, second, again = (record(created=time, weights=one) for time, one in zip(times, given, strict=True))
    promote([runs(tmp_path / "a", record(), first, second)], tmp_path / "into")
    assert len(files_below(tmp_path / "into")) == 3
    with pytest.raises(UserError, match=r"20260203T000000Z' is there already as .*20260202T000000Z'"):
        promote([runs(tmp_path / "b", again)], tmp_path / "into")


def test_a_failure_midway_takes_everything_back(tmp_path: Path) -> None:
    """The third record's folder cannot be made: a file is in its place."""
    into = tmp_path / "into"
    folder = runs(tmp_path / "runs", record(seed=0), record(seed=1), record("tiny_coco"))
    (folder / "run0" / "samples.png").write_bytes(png())
    into.mkdir()
    (into / "tiny_coco").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*tiny_coco.*; nothing was copied$"):
        promote([folder], into)
    assert files_below(into) == {"tiny_coco"}


def test_a_break_of_the_user_takes_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, notes: list[str]) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(transfer, "_picture", broken)
    with pytest.raises(KeyboardInterrupt):
        promote([runs(tmp_path / "runs", record())], tmp_path / "into")
    assert files_below(tmp_path / "into") == set()


def test_what_cannot_be_taken_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, into = runs(tmp_path / "runs", record(seed=0), record("tiny_coco")), tmp_path / "into"
    into.mkdir()
    (into / "tiny_coco").write_text("in the way")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".json":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        os.unlink(path)  # noqa: PTH108  # pathlib's own is what is replaced here

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match=r"cannot take back .*seed0-.*\.json: Read-only file system; delete it"):
        promote([folder], into)


def test_pictures_go_along(tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", record())
    (folder / "run0" / "samples.png").write_bytes(png())
    copied = promote([folder], tmp_path / "into")
    assert copied.pictures == [copied.files[0].with_suffix(".png")]
    assert copied.pictures[0].read_bytes() == png()
    # from there they go along under their new name
    again = import_records([tmp_path / "into"], tmp_path / "other")
    assert [path.read_bytes() for path in again.pictures] == [png()]
    assert files_below(tmp_path / "other") == files_below(tmp_path / "into")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


BAD_PICTURES = {
    "no PNG": b"<svg onload=alert(1)>",
    "larger than": png() + b"\0" * transfer.MAX_PICTURE_BYTES,
    "cut off": png()[:-5],
    "damaged": png().replace(b"IDAT", b"IDAX"),
    "behind its end": png() + b"<script>",
    "pixels a side": png()[:8] + _chunk(b"IHDR", struct.pack(">IIBBBBB", 1 << 20, 1 << 20, 8, 2, 0, 0, 0)) + png()[33:],
}


@pytest.mark.parametrize("fault", BAD_PICTURES)
def test_a_bad_picture_is_left_with_a_note(fault: str, tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", record())
    (folder / "run0" / "samples.png").write_bytes(BAD_PICTURES[fault])
    copied = promote([folder], tmp_path / "into")
    assert len(copied.files) == 1 and copied.pictures == []
    (note,) = copied.notes
    assert fault in note and "samples.png" in note


def test_a_picture_that_is_a_link_is_left(tmp_path: Path) -> None:
    folder = runs(tmp_path / "runs", record())
    (tmp_path / "secret.png").write_bytes(png())
    (folder / "run0" / "samples.png").symlink_to(tmp_path / "secret.png")
    copied = promote([folder], tmp_path / "into")
    assert copied.pictures == [] and "no plain file" in copied.notes[0]


def test_every_cut_of_a_png_is_found() -> None:
    whole = png()
    assert png_fault(whole) == ""
    assert all(png_fault(whole[:end]) for end in range(len(whole)))


def test_import_skips_what_is_there_and_counts_it(tmp_path: Path) -> None:
    into = tmp_path / "into"
    import_records([runs(tmp_path / "first", record(seed=0))], into)
    copied = import_records([runs(tmp_path / "second", record(seed=0), record(seed=1), record(seed=1))], into)
    assert (len(copied.files), copied.identical) == (1, 2)
    assert list(load_records([into])) == [record(seed=0), record(seed=1)]


def test_import_refuses_other_content_of_a_known_run_as_a_whole(tmp_path: Path) -> None:
    into = tmp_path / "into"
    import_records([runs(tmp_path / "first", record(seed=0))], into)
    changed = runs(tmp_path / "second", record(seed=1), record(seed=0, value=99.0))
    with pytest.raises(
        UserError, match=r"run 'tiny_linear\.vit_t_mae\.seed0-.*' is there already with other content, in .*json"
    ):
        import_records([changed], into)
    assert list(load_records([into])) == [record(seed=0)]


def test_import_of_an_earlier_schema(tmp_path: Path) -> None:
    old = {key: value for key, value in values().items() if key != "images"}
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "record.json").write_text(json.dumps({"schema_version": 1} | old))
    (written,) = import_records([tmp_path / "old"], tmp_path / "into").files
    assert read_record(written) == record()
    assert import_records([tmp_path / "old"], tmp_path / "into").identical == 1


def test_import_follows_no_links(tmp_path: Path) -> None:
    outside = runs(tmp_path / "outside", record(seed=1))
    folder = runs(tmp_path / "folder", record(seed=0))
    (folder / "link.json").symlink_to(outside / "run0" / "record.json")
    (folder / "folder").symlink_to(outside)
    copied = import_records([folder], tmp_path / "into")
    assert list(load_records([tmp_path / "into"])) == [record(seed=0)]
    assert copied.notes == [f"{folder / 'link.json'}: a link, not followed"]
    for link in (folder / "link.json", folder / "folder"):
        with pytest.raises(UserError, match="is a link; name what it leads to"):
            import_records([link], tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    for nothing in ("pipe", "none"):
        with pytest.raises(UserError, match="no such file or folder"):
            import_records([tmp_path / nothing], tmp_path / "other")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": 2', "is not a record"),
        ('{"schema_version": 99}', "newer mae_bench"),
        ('{"schema_version": ' + "[" * 10_000, "not a record"),
        (b'{"schema_version": 2, "run_id": "\xff"}', "not a record"),
        ('{"schema_version": 2,' + " " * (17 << 20), "larger than"),
    ],
)
def test_import_of_hostile_files(content: str | bytes, message: str, tmp_path: Path) -> None:
    folder = runs(tmp_path / "folder", record(seed=0))
    (folder / "x.json").write_bytes(content.encode() if isinstance(content, str) else content)
    os.mkfifo(folder / "pipe.json")
    with pytest.raises(UserError, match=message) as refused:
        import_records([folder], tmp_path / "into")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "into").exists()


def test_results_folders_lie_below_the_checkouts_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "checkout", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    assert transfer.results_folder() == tmp_path / "results" / "runs"
    assert transfer.results_folder(Path("results/suites/x")) == tmp_path / "results" / "suites" / "x"
    for outside in ("results", "results/../runs", "/tmp", "elsewhere"):
        with pytest.raises(UserError, match="give a folder below"):
            transfer.results_folder(Path(outside))
    monkeypatch.setattr(places, "checkout", lambda: None)
    with pytest.raises(UserError, match="installed wheel"):
        transfer.results_folder()
