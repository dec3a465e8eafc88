"""COCO's format: the category map, counts of what evaluation must know, and every fault in the JSON named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as coco_mask

from mae_bench.data import open_dataset
from mae_bench.data.coco import decode_counts
from mae_bench.errors import UserError
from mae_bench.schema import DataSpec

SPEC = DataSpec(
    format="coco",
    train="train2017",
    val="val2017",
    train_annotations="annotations/instances_train2017.json",
    val_annotations="annotations/instances_val2017.json",
)
SQUARE = {"id": 5, "image_id": 1, "category_id": 18, "bbox": [2, 2, 8, 8], "area": 64, "iscrowd": 0}
CONTENT: dict[str, Any] = {
    "images": [
        {"id": 1, "file_name": "a.jpg", "width": 20, "height": 16},
        {"id": 7, "file_name": "sub/b.jpg", "width": 20, "height": 16},
    ],
    "annotations": [
        SQUARE | {"segmentation": [[2, 2, 10, 2, 10, 10.0, 2, 10], [3, 3, 4, 4]]},
        SQUARE | {"id": 6, "image_id": 7, "iscrowd": 1, "segmentation": {"size": [16, 20], "counts": [100, 20, 200]}},
    ],
    "categories": [{"id": 44, "name": "bottle"}, {"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
}


def write(root: Path, train: Any, val: Any = None) -> Path:
    for split, content in (("train", train), ("val", CONTENT if val is None else val)):
        for name in ("a.jpg", "sub/b.jpg"):
            path = root / f"{split}2017" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((16, 20, 3), np.uint8)).save(path)
        file = root / f"annotations/instances_{split}2017.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def test_category_ids_are_mapped_in_ascending_order(tmp_path: Path) -> None:
    dataset = open_dataset(SPEC, write(tmp_path, CONTENT))
    split = dataset.coco("train")
    assert split.ids == {1: 0, 18: 1, 44: 2}
    assert dataset.classes == split.names == ("person", "dog", "bottle")
    assert dataset.counts == {"train": 2, "val": 2}
    assert (split.objects, split.crowds, split.empty, split.short_polygons) == (1, 1, 1, 1)
    assert split.images == tmp_path / "train2017"
    assert split.annotations == tmp_path / "annotations/instances_train2017.json"
    val = dataset.source("val")
    names = [str(tmp_path / "val2017" / name) for name in ("a.jpg", "sub/b.jpg")]
    assert [val.name(index) for index in range(len(val))] == names


def test_an_annotation_changes_the_fingerprint(tmp_path: Path) -> None:
    first = open_dataset(SPEC, write(tmp_path / "1", CONTENT)).fingerprint
    content = copy.deepcopy(CONTENT)
    content["annotations"][0]["area"] = 65
    assert open_dataset(SPEC, write(tmp_path / "2", content)).fingerprint != first
    assert open_dataset(SPEC, write(tmp_path / "3", CONTENT)).fingerprint == first


def edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set ``images.0.width`` and the like."""

    def apply(content: dict[str, Any]) -> None:
        *parts, last = (int(part) if part.isdigit() else part for part in path.split("."))
        inner: Any = content
        for part in parts:
            inner = inner[part]
        inner[last] = value

    return apply


FAULTS = {
    "traversal": ("images.0.file_name", "../val2017/a.jpg", r"image 1: path '\.\./val2017/a\.jpg' leaves"),
    "absolute": ("images.0.file_name", "/etc/passwd", r"path '/etc/passwd' leaves"),
    "backslashes": ("images.0.file_name", "..\\a.jpg", r"leaves the data folder"),
    "no name": ("images.0.file_name", 3, r"image 1 has no file_name"),
    "lone surrogate": ("images.0.file_name", "\ud800.jpg", r"which is not in"),
    "absent file": ("images.0.file_name", "c.jpg", r"lists 'c\.jpg', which is not in .*train2017"),
    "a folder": ("images.0.file_name", "sub", r"train2017/sub is not a file"),
    "image id text": ("images.0.id", "1", r"image id '1' is not a whole number"),
    "image id twice": ("images.0.id", 7, r"image id 7 occurs twice"),
    "size zero": ("images.0.width", 0, r"image 1 has size 0 x 16"),
    "size huge": ("images.0.height", 10**9, r"image 1 has size 20 x 1000000000"),
    "size wrong": ("images.0.width", 19, r"a\.jpg is 20 x 16 pixels, its JSON says 19 x 16"),
    "annotation id twice": ("annotations.1.id", 5, r"annotation id 5 occurs twice"),
    "unknown image": ("annotations.0.image_id", 2, r"annotation 5 names image 2"),
    "unknown category": ("annotations.0.category_id", 2, r"annotation 5 names category 2"),
    "crowd": ("annotations.0.iscrowd", 2, r"has iscrowd 2; expected 0 or 1"),
    "no area": ("annotations.0.area", None, r"has area None"),
    "area nan": ("annotations.0.area", float("nan"), r"has area nan"),
    "corners": ("annotations.0.bbox", [12, 10, 18, 14], r"has bbox \[12, 10, 18, 14\]; expected \[x, y, width"),
    "negative side": ("annotations.0.bbox", [2, 2, -1, 8], r"has bbox"),
    "three numbers": ("annotations.0.bbox", [2, 2, 8], r"has bbox"),
    "text box": ("annotations.0.bbox", [2, 2, 8, "8"], r"has bbox"),
    "infinite box": ("annotations.0.bbox", [2, 2, 8, float("inf")], r"has bbox"),
    "huge integer": ("annotations.0.bbox", [2, 2, 8, 10**400], r"has bbox"),
    "no masks": ("annotations.0.segmentation", [], r"annotation 5 has no segmentation"),
    "odd polygon": ("annotations.0.segmentation", [[1, 2, 3, 4, 5, 6, 7]], r"not a list of x, y pairs"),
    "polygon outside": ("annotations.0.segmentation", [[1, 2, 3, 4, 30, 6]], r"pixels inside 20 x 16"),
    "polygon nan": ("annotations.0.segmentation", [[1, 2, 3, 4, float("nan"), 6]], r"pixels inside 20 x 16"),
    "rle size": ("annotations.1.segmentation.size", [10**6, 10**6], r"run lengths of size \[1000000, 1000000\]"),
    "rle sum": ("annotations.1.segmentation.counts", [100, 20], r"cover 120 pixels; expected 320"),
    "rle negative": ("annotations.1.segmentation.counts", [400, -80], r"not whole numbers from 0"),
    "rle text": ("annotations.1.segmentation.counts", "~~", r"not COCO's compressed text"),
    "rle unfinished": ("annotations.1.segmentation.counts", "P", r"end in the middle"),
    "rle endless": ("annotations.1.segmentation.counts", "o" * 99, r"not COCO's compressed text"),
    "no categories": ("categories", [], r"has no categories"),
    "category twice": ("categories.0.id", 1, r"category id 1 occurs twice"),
    "name twice": ("categories.0.name", "dog", r"category name 'dog' is not a text, or occurs 2 times"),
    "name number": ("categories.0.name", 5, r"category name '5' is not a text"),
    "other categories": ("categories.0.name", "can", r"categories differ between .*train2017\.json .*val2017\.json"),
    "no images": ("images", [], r"lists no images"),
    "no list": ("annotations", {}, r"no list 'annotations'"),
    "not objects": ("images", [1], r"an entry of 'images' is not an object"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str) -> None:
    path, value, message = FAULTS[fault]
    content = copy.deepcopy(CONTENT)
    edit(path, value)(content)
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(SPEC, write(tmp_path, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1", "[]", "null", "[" * 100_000, '{"images": []}'])
def test_what_is_not_an_instances_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"instances_train2017\.json (is not valid JSON|has no list)"):
        open_dataset(SPEC, write(tmp_path, text))


def test_normalised_boxes_are_named(tmp_path: Path) -> None:
    content = copy.deepcopy(CONTENT)
    for annotation in content["annotations"]:
        annotation["bbox"] = [0.1, 0.1, 0.4, 0.5]
    with pytest.raises(UserError, match=r"no box is larger than 1: they look normalised"):
        open_dataset(SPEC, write(tmp_path, content))


def test_no_annotations_and_empty_boxes_are_legal(tmp_path: Path) -> None:
    content = copy.deepcopy(CONTENT)
    content["annotations"][0]["bbox"] = [2, 2, 0, 8]
    assert open_dataset(SPEC, write(tmp_path, content, CONTENT | {"annotations": []})).coco("val").empty == 2


def test_the_number_of_classes_is_the_recipe_s(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 3 categories, the task recipe expects 80"):
        open_dataset(SPEC.model_copy(update={"classes": 80}), write(tmp_path, CONTENT))


def test_a_missing_json_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, CONTENT)
    (root / "annotations/instances_val2017.json").unlink()
    with pytest.raises(UserError, match=r"no coco data: .*instances_val2017\.json does not exist; .*--smoke"):
        open_dataset(SPEC, root)


@pytest.mark.parametrize(("orientation", "size"), [(1, (20, 16)), (6, (16, 20))])
def test_sizes_are_compared_after_exif(tmp_path: Path, orientation: int, size: tuple[int, int]) -> None:
    """detectron2 turns pictures by EXIF before it compares sizes, and stops in the middle of training."""
    content = copy.deepcopy(CONTENT)
    root = write(tmp_path, content)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.zeros((16, 20, 3), np.uint8)).save(root / "train2017/a.jpg", exif=exif)
    if size == (20, 16):
        assert open_dataset(SPEC, root).counts["train"] == 2
    else:
        with pytest.raises(UserError, match=r"a\.jpg is 16 x 20 pixels after EXIF rotation, its JSON says 20 x 16"):
            open_dataset(SPEC, root)


def test_an_undecodable_picture_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, CONTENT)
    (root / "train2017/a.jpg").write_bytes(b"<html>")
    with pytest.raises(UserError, match=r"cannot decode picture .*a\.jpg"):
        open_dataset(SPEC, root)


@given(st.lists(st.lists(st.booleans(), min_size=40, max_size=40), min_size=1, max_size=40))
def test_compressed_run_lengths_are_read_as_pycocotools_writes_them(rows: list[list[bool]]) -> None:
    mask = np.asfortranarray(np.array(rows, np.uint8))
    counts = decode_counts(coco_mask.encode(mask)["counts"].decode())
    values = np.repeat(np.arange(len(counts)) % 2, counts)
    assert np.array_equal(values.reshape(mask.shape, order="F"), mask)
