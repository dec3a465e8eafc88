"""Resume files: whole under every name at any time, and the newest sound one is found."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import IMAGES, Noise, make_job, make_values, same_state, train

from mae_bench.data.decode import Oddities
from mae_bench.data.images import Odd
from mae_bench.engine import loop, resume
from mae_bench.engine.job import Job
from mae_bench.errors import UserError

STATE = {"weights": torch.arange(30_000.0)}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path, make_values(), resume=True)


def names(job: Job) -> list[str]:
    return sorted(path.name for path in resume.folder(job).iterdir())


def test_the_last_two_are_kept(job: Job) -> None:
    for step in (3, 5, 8):
        resume.save(job, step, STATE)
    assert names(job) == ["step_000000005.pt", "step_000000008.pt"]
    state = resume.load(job)
    assert state is not None
    assert state["step"] == 8
    assert torch.equal(state["weights"], STATE["weights"])


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _flip(path: Path) -> None:
    """One bit, in the middle of the numbers."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut, _flip, _empty])
def test_a_damaged_file_is_named_and_passed_over(job: Job, damage: Any, capsys: pytest.CaptureFixture[str]) -> None:
    resume.save(job, 3, STATE)
    newest = resume.save(job, 5, STATE)
    damage(newest)
    state = resume.load(job)
    assert state is not None
    assert state["step"] == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{newest} is damaged (")
    assert line.endswith("; going on from the file before it")
    # The next file is the newest one then, though its number is lower.
    resume.save(job, 4, STATE)
    assert names(job) == ["step_000000003.pt", "step_000000004.pt"]


def test_a_run_goes_on_from_the_file_before_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight, whole = train(make_job(tmp_path, make_values(ema=0.5)))
    _cut(sorted((tmp_path / "checkpoints").iterdir())[-1])
    again, rest = train(make_job(tmp_path, make_values(ema=0.5), resume=True))
    assert same_state(straight, again)
    assert rest == whole
    assert "step_000000006.pt is damaged" in capsys.readouterr().err


def test_nothing_but_damaged_files_is_an_error(job: Job) -> None:
    for step in (3, 5):
        _cut(resume.save(job, step, STATE))
    with pytest.raises(UserError, match=r"every resume file in .*checkpoints is damaged; run without --resume"):
        resume.load(job)


def test_a_resume_file_runs_no_code(job: Job, tmp_path: Path) -> None:
    resume.save(job, 1, {"model": _Bomb(tmp_path / "exploded")})
    with pytest.raises(UserError, match="damaged"):
        resume.load(job)
    assert not (tmp_path / "exploded").exists()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    train(make_job(tmp_path, make_values()))
    with pytest.raises(UserError, match="is of a run with other values"):
        train(make_job(tmp_path, make_values(base_lr=0.02), resume=True))


class Grey(Noise):
    """Pictures that are all grey."""

    def __init__(self) -> None:
        super().__init__()
        self.oddities = Oddities(IMAGES)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.oddities.note(index, Odd.GREY)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_odd_pictures_met_before_the_cut_are_counted(tmp_path: Path, workers: int) -> None:
    """The record of a run of one epoch told of those after the cut alone."""
    values, counts = make_values(epochs=1), []
    for resumed in (False, True):
        data = Grey()
        train(make_job(tmp_path, values, resume=resumed, workers=workers), dataset=data, oddities=data.oddities)
        counts.append(data.oddities.counts())
        sorted((tmp_path / "checkpoints").iterdir())[-1].unlink()  # as if it had ended before its last step
    assert counts[0] == counts[1] == {"grey (repeated in three channels)": 16}  # two steps of eight


def test_a_full_disk_is_one_line_and_the_state_before_survives(job: Job) -> None:
    """The system refuses to write more than 50 kB into one file, as it would with a disk that is full."""
    before = resume.save(job, 3, {"weights": STATE["weights"][:1000].clone()})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(
            UserError, match=r"cannot write .*step_000000005\.pt: .*; free space and go on with --resume"
        ) as caught:
            resume.save(job, 5, STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert names(job) == [before.name]
    state = resume.load(job)
    assert state is not None
    assert state["step"] == 3


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_an_older_file_goes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        resume.save(job, step, STATE)
    seen: list[tuple[str, list[str]]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, names(job)))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    resume.save(job, 3, STATE)
    old, new = ["step_000000001.pt", "step_000000002.pt"], "step_000000003.pt"
    assert seen == [("unfinished.part", [*old, "unfinished.part"]), ("checkpoints", [*old, new])]
    assert names(job) == [old[1], new]


def test_an_unfinished_file_of_a_killed_run_is_replaced(job: Job) -> None:
    resume.folder(job).mkdir()
    (resume.folder(job) / "unfinished.part").write_bytes(b"half")
    assert resume.load(job) is None
    resume.save(job, 1, STATE)
    assert names(job) == ["step_000000001.pt"]


def test_a_long_run_saves_by_the_clock_and_changes_nothing_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = make_values(ema=0.5, clip_grad=0.1)
    for name in ("often", "seldom"):
        (tmp_path / name).mkdir()
    saved: list[int] = []
    real = resume.save
    monkeypatch.setattr(resume, "save", lambda job, step, state: saved.append(step) or real(job, step, state))
    monkeypatch.setattr(loop, "CHECKPOINTS", 1)
    seldom, fitted = train(make_job(tmp_path / "seldom", values), dataset=Noise())
    assert saved == [6]
    saved.clear()
    monkeypatch.setattr(resume, "SECONDS", 0.0)
    often, again = train(make_job(tmp_path / "often", values), dataset=Noise())
    assert saved == [1, 2, 3, 4, 5, 6]
    assert same_state(seldom, often)
    assert fitted == again


def test_smoke_runs_write_no_resume_files(tmp_path: Path) -> None:
    train(make_job(tmp_path, make_values(), smoke=True))
    assert not (tmp_path / "checkpoints").exists()
