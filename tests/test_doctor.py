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


def _private(folder: Path, data: str) -> str:
    values = 'mode = "linear"\nimage_size = 16\npool = "cls"\nhead_init_std = 0.01\nbatch = 8\nbase_lr = 1e-3\n'
    (folder / "private").mkdir()
    (folder / "private/task.toml").write_text(
        'name = "private"\nengine = "classification"\nprotocol = "private@1"\nmetric = "top1"\nsummary = "-"\n'
        f'reference = "ours"\n[data]\n{data}\n[[layer]]\nsource = "ours"\n[layer.values]\n{values}'
        "weight_decay = 0.0\nepochs = 1\n"
    )
    return str(folder / "private/task.toml")


FOLDERS = 'folder = "mine"\ntrain = "train"\nval = "val"\n'
ANNOTATED = FOLDERS + 'train_annotations = "t.json"\nval_annotations = "v.json"\n'
SHARDS = 'format = "tar"\nfolder = "mine"\ntrain = "train/*.tar"\nval = "val.tar"\n'
# format -> recipe, folders and files that make it complete
DATA: dict[str, tuple[str, list[str], list[str]]] = {
    "image_folder": (f'format = "image_folder"\n{FOLDERS}', ["train", "val"], []),
    "tar": (SHARDS, ["train"], ["train/0.tar", "val.tar"]),
    "hf": (f'format = "hf"\nrepository = "./rows"\n{FOLDERS}', ["rows"], []),
    "coco": (f'format = "coco"\n{ANNOTATED}', ["train", "val"], ["t.json", "v.json"]),
    "ade20k": (f'format = "ade20k"\n{ANNOTATED}', ["train", "val", "t.json", "v.json"], []),
}


@pytest.mark.parametrize("form", DATA)
def test_data_are_there_when_everything_is_that_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """A file in the place of a folder, or a folder in the place of a file, is not it."""
    recipe, folders, files = DATA[form]
    if form == "hf":
        pytest.importorskip("datasets")
    task = _private(tmp_path, recipe)
    monkeypatch.setenv("MAE_BENCH_DATA", str(tmp_path))

    def mark() -> str:
        cli.main(["doctor", "--task", task])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "data of private" in line]
        return line.split()[0]

    assert mark() == "absent"
    places = [tmp_path / "mine" / name for name in (*folders, *files)]
    for place in places:
        place.mkdir(parents=True) if place.name in folders else place.touch()
    assert mark() == "ok"
    for place in reversed(places):
        if any(other != place and other.is_relative_to(place) for other in places):
            continue  # the folder of a shard, which need be none of its own
        place.rmdir() if place.is_dir() else place.unlink()
        place.touch() if place.name in folders else place.mkdir()
        assert mark() == "absent"
        place.rmdir() if place.is_dir() else place.unlink()
        place.mkdir() if place.name in folders else place.touch()
        assert mark() == "ok"


def test_shards_by_no_pattern_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = _private(tmp_path, SHARDS.replace("train/*.tar", "train/**.tar"))
    (tmp_path / "mine/train").mkdir(parents=True)
    for name in ("train/0.tar", "val.tar"):
        (tmp_path / "mine" / name).touch()
    monkeypatch.setenv("MAE_BENCH_DATA", str(tmp_path))
    cli.main(["doctor", "--task", task])
    assert "absent  data of private" in capsys.readouterr().out


def test_unknown_task() -> None:
    assert cli.main(["doctor", "--task", "cocoo"]) == 2


def test_task_model_is_what_the_engines_cover() -> None:
    engines = Task.model_fields["engine"].annotation
    assert set(doctor.ENGINES) == set(engines.__args__)  # type: ignore[union-attr]
