"""The readers on real photographs, where the archives lie beside the checkout."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED_DATA

from mae_bench.data import open_dataset
from mae_bench.data.ade20k import read_label
from mae_bench.data.images import read_rgb
from mae_bench.schema import DataSpec

SPECS = {
    "coco_open": DataSpec(
        format="coco",
        train="train2017",
        val="val2017",
        train_annotations="annotations/instances_train2017.json",
        val_annotations="annotations/instances_val2017.json",
        classes=80,
        expected={"train": 118287, "val": 5000},
    ),
    "camvid": DataSpec(
        format="ade20k",
        train="images/training",
        val="images/validation",
        train_annotations="annotations/training",
        val_annotations="annotations/validation",
        classes=11,
        zero_is_other=True,
    ),
    "cifar10": DataSpec(format="image_folder", train="train", val="val", expected={"train": 50000, "val": 10000}),
}


def extract(name: str, folder: Path, wanted: str = "") -> Path:
    """Unpack the members of an archive whose name matches a pattern."""
    archive = SHARED_DATA / f"{name}.tar.gz"
    if not archive.is_file():
        pytest.skip(f"no {archive}")
    with tarfile.open(archive) as tar:
        members = [member for member in tar if re.search(wanted, member.name)]
        tar.extractall(folder, members, filter="data")
    return folder / name


def test_coco_photographs(tmp_path: Path) -> None:
    dataset = open_dataset(SPECS["coco_open"], extract("coco_open", tmp_path))
    train, val = dataset.coco("train"), dataset.coco("val")
    assert dataset.counts == {"train": 59, "val": 66}
    assert not dataset.matches
    assert dataset.classes[:3] == ("person", "bicycle", "car")
    assert (train.ids[1], train.ids[90]) == (0, 79)
    assert train.crowds + val.crowds == 14
    assert train.empty + val.empty > 0
    val = dataset.source("val")
    assert all(read_rgb(Path(val.name(index))).mode == "RGB" for index in range(5))


def test_camvid_streets(tmp_path: Path) -> None:
    dataset = open_dataset(SPECS["camvid"], extract("camvid", tmp_path))
    assert dataset.counts == {"train": 367, "val": 101}
    assert dataset.classes[0] == "sky"
    assert dataset.classes[-1] == "bicyclist"
    image, label = dataset.masks("train")[0]
    assert read_rgb(image).size == read_label(label).shape[::-1]
    assert np.unique(read_label(label)).max() <= 11


def test_cifar_folders(tmp_path: Path) -> None:
    """A part of them: sixty thousand files take a minute to unpack."""
    dataset = open_dataset(SPECS["cifar10"], extract("cifar10", tmp_path, r"/00[0-4]\d\.jpg$"))
    assert dataset.counts == {"train": 500, "val": 500}
    assert not dataset.matches
    assert dataset.classes[0] == "airplane"
    assert len(dataset.classes) == 10
