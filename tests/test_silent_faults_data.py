"""Silent faults of data sets (as in `test_silent_faults`): runs that would have ended with a wrong number."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from test_data_formats import write_task
from test_data_sources import jpeg, pack

import mae_bench
from mae_bench import UserError, recipes
from mae_bench.data import open_dataset
from mae_bench.engine.job import Options
from mae_bench.schema import DataSpec

QUIET = Options(quiet=True, workers=0)
TAR = DataSpec(format="tar", train="train.tar", val="val.tar")


def _shards(root: Path, *members: tuple[str, bytes]) -> Path:
    for split in ("train", "val"):
        pack(
            root / f"{split}.tar", members or [("0.jpg", jpeg(0)), ("0.cls", b"0"), ("1.jpg", jpeg(1)), ("1.cls", b"1")]
        )
    return root


@pytest.mark.parametrize("label", [-100, -2])
def test_a_picture_is_not_left_out_of_the_loss_by_its_class(tmp_path: Path, label: int) -> None:
    """-100 is the class that torch's cross entropy ignores: trained on fewer pictures than the record counts."""
    pytest.importorskip("datasets")
    from test_data_huggingface import write_rows

    write_rows(tmp_path / "rows", [{"bytes": jpeg(shade), "path": None} for shade in range(3)], [0, 1, label])
    data = 'format = "hf"\nrepository = "./rows"\ntrain = "train"\nval = "test"'
    task = write_task(tmp_path / "private", "classification", data)
    options = dataclasses.replace(QUIET, data=tmp_path, out=tmp_path)
    with pytest.raises(UserError, match=rf"rows\[train\]\[2\] has class {label}; expected 0 or above"):
        mae_bench.run(task, "vit_t_scratch", options=options)


def test_of_two_classes_of_one_picture_none_is_chosen(tmp_path: Path) -> None:
    """The last one won."""
    _shards(tmp_path, ("0.jpg", jpeg(0)), ("0.cls", b"0"), ("0.CLS", b"1"))
    with pytest.raises(UserError, match=r"train\.tar: sample '0' has two classes \('0\.CLS'\); keep one"):
        open_dataset(TAR, tmp_path)


def test_a_shard_whose_labels_were_corrected_is_read_again(tmp_path: Path) -> None:
    """Labels of one digit change no size, and a copy that keeps times no time: the old labels, under their name."""
    before = open_dataset(TAR, _shards(tmp_path))
    shard = tmp_path / "train.tar"
    old = shard.stat()
    while shard.stat().st_ctime_ns == old.st_ctime_ns:  # the clock of a file system is coarse
        pack(shard, [("0.jpg", jpeg(0)), ("0.cls", b"1"), ("1.jpg", jpeg(1)), ("1.cls", b"0")])
        os.utime(shard, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    with pytest.raises(UserError, match=r"train\.tar has changed since the run began"):
        before.source("train").read(0)
    after = open_dataset(TAR, tmp_path)
    assert after.source("train").labels.tolist() == [1, 0]
    assert after.fingerprint != before.fingerprint


def test_a_folder_that_is_not_read_is_not_taken(tmp_path: Path) -> None:
    """`--data FOLDER` with a data set of the Hub: the number of other pictures than the ones that were named."""
    pytest.importorskip("datasets")
    data = 'format = "hf"\nrepository = "owner/photos"\ntrain = "train"\nval = "val"'
    task = write_task(tmp_path / "private", "classification", data)
    options = dataclasses.replace(QUIET, data=tmp_path, out=tmp_path)
    with pytest.raises(UserError, match=r"the task's data are 'owner/photos' of the Hugging Face Hub, .*leave out"):
        mae_bench.run(task, "vit_t_scratch", options=options)


@pytest.mark.parametrize("repository", ["imagefolder", "parquet", "photos"])
def test_a_module_of_the_datasets_package_is_no_data_set(tmp_path: Path, repository: str) -> None:
    """`imagefolder` read whatever pictures lay in the current folder."""
    data = f'format = "hf"\nrepository = "{repository}"\ntrain = "train"\nval = "val"'
    task = write_task(tmp_path / "private", "classification", data)
    with pytest.raises(UserError, match=rf"needs repository, owner/name .* not '{repository}'"):
        mae_bench.run(task, "vit_t_scratch", options=dataclasses.replace(QUIET, out=tmp_path))


@pytest.mark.parametrize(
    "data",
    [
        'format = "image_folder"\ntrain = "train"\nval = "train"',
        'format = "hf"\nrepository = "owner/photos"\ntrain = "train"\nval = "train"',
        'format = "ade20k"\ntrain = "train"\nval = "./train"\ntrain_annotations = "a"\nval_annotations = "b"',
        'format = "coco"\ntrain = "train"\nval = "val"\ntrain_annotations = "a"\nval_annotations = "a"',
    ],
)
def test_nothing_is_validated_on_what_it_was_trained_on(tmp_path: Path, data: str) -> None:
    """A slip of the keyboard, and the best number of the table."""
    task = write_task(tmp_path / "private", "classification", data)
    with pytest.raises(UserError, match=r"are both .*; training and validation must differ"):
        recipes.load_task(task)


def test_no_picture_of_a_shared_folder_is_in_both_splits(tmp_path: Path) -> None:
    from test_data_coco import CONTENT, SPEC, write

    shared = SPEC.model_copy(update={"val": "./train2017"})
    first, second = (_only(CONTENT, image) for image in CONTENT["images"])
    assert open_dataset(shared, write(tmp_path, first, second)).counts == {"train": 1, "val": 1}
    with pytest.raises(UserError, match=r"train2017/sub/b\.jpg is in both annotations/instances_train2017\.json and "):
        open_dataset(shared, write(tmp_path, CONTENT, second))


def _only(content: dict[str, Any], image: dict[str, Any]) -> dict[str, Any]:
    kept = [entry for entry in content["annotations"] if entry["image_id"] == image["id"]]
    return content | {"images": [image], "annotations": kept}
