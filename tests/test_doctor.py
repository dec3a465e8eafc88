"""`doctor` tells the truth about this environment, and the command for what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mae_bench import cli, doctor
from mae_bench.schema import Task


def test_this_environment_can_run_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "everything needed is installed" in text
    for name in ("detectron2", "onedl-mmsegmentation", "torch", "weights of vit_b_mae", "data of coco"):
        assert name in text
    assert "python -m mae_bench fetch vit_b_mae" in text  # weights are absent here: the command is given


def test_only_what_the_task_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--task", "imagenet_linear"]) == 0
    text = capsys.readouterr().out
    assert "detectron2" not in text and "mmsegmentation" not in text
    assert "data of imagenet_linear" in text


def test_missing_parts_fail_with_their_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Software that really is absent: a distribution that no one has, and an import path without detectron2."""
    engines = doctor.ENGINES | {"detection": ("coco", {"no-such-distribution": "no_such_module"})}
    monkeypatch.setattr(doctor, "ENGINES", engines)
    assert cli.main(["doctor", "--task", "coco"]) == 1
    text = capsys.readouterr().out
    assert "MISSING no-such-distribution" in text
    assert "pip install 'mae_bench[coco]'" in text
    assert "1 missing" in text


def test_found_weights_and_data_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mae_pretrain_vit_base.pth").write_bytes(b"x")
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    (tmp_path / "imagenet" / "val").mkdir()
    monkeypatch.setenv("MAE_BENCH_WEIGHTS", str(tmp_path))
    monkeypatch.setenv("MAE_BENCH_DATA", str(tmp_path))
    cli.main(["doctor", "--task", "imagenet_linear"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok") and "weights of vit_b_mae" in line for line in lines)
    assert any(line.startswith("ok") and "data of imagenet_linear" in line for line in lines)


def test_unknown_task() -> None:
    assert cli.main(["doctor", "--task", "cocoo"]) == 2


def test_task_model_is_what_the_engines_cover() -> None:
    engines = Task.model_fields["engine"].annotation
    assert set(doctor.ENGINES) == set(engines.__args__)  # type: ignore[union-attr]
