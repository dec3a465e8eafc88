"""Tasks of format `tar` and `hf`, through the public functions: the numbers of class folders, to the bit."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from classification_toys import make_pictures
from safetensors.torch import load_file
from test_data_sources import jpeg, pack

import mae_bench
from mae_bench import doctor
from mae_bench.data import Dataset, open_dataset
from mae_bench.data.synthetic import _write_rows
from mae_bench.engine.job import Options
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

TAR = DataSpec(format="tar", train="train-*.tar", val="val.tar")
FORMATS = {
    "image_folder": 'format = "image_folder"\ntrain = "train"\nval = "val"',
    "tar": 'format = "tar"\ntrain = "train-*.tar"\nval = "val.tar"',
    "hf": 'format = "hf"\nrepository = "./rows"\nimage_column = "photo"\ntrain = "train"\nval = "val"',
}
needs_datasets = pytest.param(
    "hf", marks=pytest.mark.skipif(find_spec("datasets") is None, reason="the datasets package is not installed")
)
CLASSIFICATION = """
mode = "finetune"
image_size = 16
pool = "mean"
head_init_std = 0.02
randaug = "rand-m9-mstd0.5-inc1"
batch = 8
base_lr = 1e-3
weight_decay = 0.05
epochs = 2
"""
PRETRAINING = """
mask_ratio = 0.75
norm_pix = true
decoder_depth = 1
decoder_width = 16
decoder_heads = 2
batch = 8
base_lr = 1e-3
weight_decay = 0.05
epochs = 2
"""


def packed(dataset: Dataset, root: Path) -> None:
    """The same pictures in the same order: two shards and one, and Parquet where `datasets` is installed."""
    names = "".join(f"{name}\n" for name in dataset.classes)
    (root / "classes.txt").write_text(names)
    for split in ("train", "val"):
        source = dataset.source(split)  # type: ignore[arg-type]
        members: list[tuple[str, bytes]] = []
        for index in range(len(source)):
            members += [(f"{index}.png", source.read(index)), (f"{index}.cls", b"%d" % source.labels[index])]
        if split == "train":
            pack(root / "train-0.tar", members[:20])
            pack(root / "train-1.tar", members[20:])
        else:
            pack(root / "val.tar", members)
        if find_spec("datasets") is not None:
            spec = DataSpec(format="hf", repository="./rows", image_column="photo", train="train", val="val")
            file = root / f"rows/data/{split}-00000-of-00001.parquet"
            (root / "rows").mkdir(exist_ok=True)
            files = [source.read(index) for index in range(len(source))]
            _write_rows(spec, file, files, source.labels.tolist(), dataset.classes)


def write_task(folder: Path, engine: str, data: str) -> str:
    values, metric = (CLASSIFICATION, "top1") if engine == "classification" else (PRETRAINING, "val_loss")
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(
        f'name = "{folder.name}"\nengine = "{engine}"\nprotocol = "private@1"\nmetric = "{metric}"\n'
        f'summary = "-"\nreference = "ours"\n[data]\n{data}\n[[layer]]\nsource = "ours"\n[layer.values]{values}'
    )
    return str(folder / "task.toml")


def result(tmp_path: Path, engine: str, form: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Record and trained tensors of a run on the pictures in one of the formats."""
    task = write_task(tmp_path / form / "private", engine, FORMATS[form])
    how = Options(data=tmp_path / "data", out=tmp_path / f"runs-{form}", device="cpu", quiet=True, **options)
    if engine == "classification":
        (one,) = mae_bench.run(task, "vit_t_scratch", options=how)
    else:
        (one,) = mae_bench.pretrain("vit_t_mae", task=task, options=how)
    (weights,) = [*one.folder.glob("model.safetensors"), *one.folder.glob("mae.safetensors")]
    return json.loads(one.record_file.read_text()), load_file(weights)


@pytest.mark.parametrize("form", ["tar", needs_datasets])
@pytest.mark.parametrize("engine", ["classification", "pretraining"])
def test_the_same_pictures_give_the_same_numbers(tmp_path: Path, engine: str, form: str) -> None:
    packed(make_pictures(tmp_path / "data"), tmp_path / "data")
    folders, expected = result(tmp_path, engine, "image_folder", workers=0)
    record, tensors = result(tmp_path, engine, form, workers=1 if engine == "classification" else 0)
    for key in ("metrics", "history", "per_class", "baseline"):
        assert record[key] == folders[key]
    assert all((tensors[key] == expected[key]).all() for key in expected | tensors)
    assert record["data"]["counts"] == {"train": 24, "val": 11}
    assert record["protocol"] != folders["protocol"]  # any data: the fingerprint is part of it
    assert not record["data"]["synthetic"]


@pytest.mark.parametrize("engine", ["classification", "pretraining"])
def test_odd_pictures_are_counted_in_both_splits(tmp_path: Path, engine: str) -> None:
    members = [("0.png", jpeg(0)), ("0.cls", b"0"), ("1.jpg", jpeg(1)), ("1.cls", b"1")]  # a JPEG that says PNG
    (tmp_path / "data").mkdir()
    for name in ("train-0.tar", "train-1.tar", "train-2.tar", "train-3.tar", "val.tar"):
        pack(tmp_path / "data" / name, members)
    record, _ = result(tmp_path, engine, "tar", workers=0)
    assert "odd training pictures: 4 whose suffix names another format" in record["notes"]
    assert "odd validation pictures: 1 whose suffix names another format" in record["notes"]


@pytest.mark.parametrize("form", ["tar", needs_datasets])
@pytest.mark.parametrize("engine", ["classification", "pretraining"])
def test_a_smoke_run(tmp_path: Path, engine: str, form: str) -> None:
    task = write_task(tmp_path / "private", engine, FORMATS[form])
    how = Options(out=tmp_path, smoke=True, quiet=True, workers=0)
    if engine == "classification":
        (one,) = mae_bench.run(task, "vit_t_scratch", options=how)
    else:
        (one,) = mae_bench.pretrain("vit_t_mae", task=task, options=how)
    assert one.record.data.synthetic
    assert one.record.protocol == "private@1+smoke"


def shards(root: Path, labels: list[bytes | None], val: list[bytes | None] | None = None) -> Path:
    for name, given in (("train-0.tar", labels), ("val.tar", [b"0"] if val is None else val)):
        pack(
            root / name,
            [
                member
                for index, label in enumerate(given)
                for member in [(f"{index}.jpg", jpeg(index)), *([(f"{index}.cls", label)] if label else [])]
            ],
        )
    return root


def test_classes_of_shards(tmp_path: Path) -> None:
    shards(tmp_path, [b"2", b"0"])
    assert open_dataset(TAR, tmp_path).classes == ("0", "1", "2")
    assert open_dataset(TAR.model_copy(update={"classes": 4}), tmp_path).classes == ("0", "1", "2", "3")
    (tmp_path / "classes.txt").write_text("0 ape\n1 bee\n2 cat\n")
    dataset = open_dataset(TAR, tmp_path)
    assert dataset.classes == ("ape", "bee", "cat")
    assert dataset.labelled("train").labels.tolist() == [2, 0]
    with pytest.raises(UserError, match="holds tar data, but this pipeline reads coco"):
        dataset.coco("train")


FAULTS: dict[str, tuple[list[bytes | None], str, dict[str, Any], str]] = {
    "beyond the recipe": ([b"0", b"7"], "", {"classes": 3}, r"train-0\.tar/1\.jpg has class 7, but .* 0 to 2;"),
    "beyond the names": ([b"0", b"2"], "ape\nbee\n", {}, r"train-0\.tar/1\.jpg has class 2, but .* 0 to 1;"),
    "too few names": ([b"0"], "ape\n", {"classes": 3}, r"classes\.txt names 1 classes, the task recipe expects 3"),
    "one name twice": ([b"0"], "ape\nape\n", {}, r"classes\.txt gives two classes one name"),
    "a huge number": ([b"999999999"], "", {}, "a label says class 999999999; set classes"),
    "one shard in both": ([b"0"], "", {"train": "*.tar"}, r"val\.tar is in both splits"),
    "no shards": ([b"0"], "", {"val": "test.tar"}, "nothing below .* matches 'test.tar'.*--data FOLDER"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_shards_are_named(tmp_path: Path, fault: str) -> None:
    labels, names, change, message = FAULTS[fault]
    shards(tmp_path, labels)
    if names:
        (tmp_path / "classes.txt").write_text(names)
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(TAR.model_copy(update=change), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_picture_without_a_class_stops_a_classification_alone(tmp_path: Path) -> None:
    dataset = open_dataset(TAR, shards(tmp_path, [b"0", None]))
    assert len(dataset.source("train")) == 2
    with pytest.raises(
        UserError, match=r"1\.jpg has no class \(1 of 2 pictures of 'train'\); .*key\.cls beside key\.jpg"
    ):
        dataset.labelled("train")


def test_the_fingerprint_of_shards(tmp_path: Path) -> None:
    """It is of pictures, order and classes: how many shards they lie in says nothing."""
    found = [open_dataset(TAR, shards(tmp_path, [b"0", b"1"])).fingerprint]
    pack(tmp_path / "train-0.tar", [("0.jpg", jpeg(0)), ("0.cls", b"0")])
    pack(tmp_path / "train-1.tar", [("1.jpg", jpeg(1)), ("1.cls", b"1")])
    assert open_dataset(TAR, tmp_path).fingerprint == found[0]
    pack(tmp_path / "train-1.tar", [("1.jpg", jpeg(1)), ("1.cls", b"0")])
    found.append(open_dataset(TAR, tmp_path).fingerprint)
    pack(tmp_path / "train-1.tar", [("1.jpg", jpeg(1) + b"\0"), ("1.cls", b"1")])
    found.append(open_dataset(TAR, tmp_path).fingerprint)
    pack(tmp_path / "train-1.tar", [("2.jpg", jpeg(1)), ("2.cls", b"1")])
    found.append(open_dataset(TAR, tmp_path).fingerprint)
    assert len(set(found)) == 4


@pytest.mark.parametrize(("train", "matches"), [(2, True), (3, False)])
def test_expected_counts(tmp_path: Path, train: int, matches: bool) -> None:
    spec = TAR.model_copy(update={"expected": {"train": train, "val": 1}})
    assert open_dataset(spec, shards(tmp_path, [b"0", b"1"])).matches is matches


def test_the_doctor_finds_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path / "private", "classification", f'{FORMATS["tar"]}\nfolder = "photos"')
    monkeypatch.setenv("MAE_BENCH_DATA", str(tmp_path))
    doctor.report(task)
    assert "absent  data of private" in capsys.readouterr().out
    (tmp_path / "photos").mkdir()
    shards(tmp_path / "photos", [b"0"])
    doctor.report(task)
    assert "ok      data of private" in capsys.readouterr().out
