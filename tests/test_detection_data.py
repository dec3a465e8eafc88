"""Pixels and labels on their way from the file to the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from detection_cases import IDS, SPEC, annotation, backbone, job, values, write_data
from PIL import Image

from mae_bench.data import open_dataset
from mae_bench.detection.adapter import build_model, load_encoder
from mae_bench.detection.data import Examples, evaluation_batch, evaluation_examples, read_split, training_examples
from mae_bench.detection.logs import logged
from mae_bench.engine.samplers import SeededDataset
from mae_bench.errors import UserError


def test_pixels_are_rgb_and_padded_after_normalisation(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    Image.new("RGB", (40, 30), (200, 100, 10)).save(dataset.root / "val/0.png")
    example = evaluation_examples(read_split(dataset.coco("val")), values(image_size=32))[0]
    assert example["image"].shape == (3, 24, 32)  # the longer side becomes 32
    assert example["image"][:, 5, 5].tolist() == [200, 100, 10]
    assert (example["height"], example["width"], example["image_id"]) == (30, 40, 0)
    recipe = backbone()
    model = build_model(load_encoder(recipe, values(), None, 0)[0], values(), 3, recipe.input)
    images = model.preprocess_image([example])
    assert images.tensor.shape == (1, 3, 32, 32)
    expected = (np.array([200, 100, 10]) / 255 - recipe.input.mean) / recipe.input.std
    np.testing.assert_allclose(images.tensor[0, :, 5, 5].numpy(), expected, rtol=1e-5)
    assert torch.equal(images.tensor[0, :, 24:], torch.zeros(3, 8, 32))


def test_labels_are_mapped_and_crowds_left_out_of_training(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data", empty=2)
    split = read_split(dataset.coco("train"))
    assert [record["image_id"] for record in split.records] == [0, 10, 20, 30, 40]
    assert [one["iscrowd"] for one in split.records[2]["annotations"]] == [0, 0, 0, 1]
    this = job(tmp_path, values(scale=[1.0, 1.0], image_size=32), dataset)
    examples = training_examples(split, this.task.values, this)
    assert len(examples) == 3
    assert this.notes == ["2 of 5 training images have no annotated object and are not trained on"]
    assert examples[2]["instances"].gt_classes.tolist() == [0, 1, 2]
    assert list(dataset.coco("train").ids.items()) == [(id, k) for k, id in enumerate(IDS)]


def test_jitter_flips_scales_and_crops_but_pads_nothing(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    this = job(tmp_path, values(scale=[0.5, 2.0], image_size=32), dataset)
    examples = SeededDataset(training_examples(read_split(dataset.coco("train")), this.task.values, this), seed=0)
    seen = [examples[epoch, 1] for epoch in range(40)]
    assert torch.equal(examples[3, 1]["image"], seen[3]["image"]), "a sample is a function of seed, epoch and index"
    sizes = [tuple(example["image"].shape[1:]) for example in seen]
    assert max(max(size) for size in sizes) == 32
    assert min(max(size) for size in sizes) < 24
    red_left = []
    for example in seen:
        truth = example["instances"]
        assert truth.gt_boxes.tensor.min() >= 0
        assert truth.gt_boxes.tensor.max() <= 32
        for box, kind in zip(truth.gt_boxes.tensor, truth.gt_classes, strict=True):
            if kind == 0 and (box[2:] - box[:2]).min() > 4:  # its middle is red, wherever it went
                x, y = ((box[:2] + box[2:]) / 2).int().tolist()
                assert example["image"][:, y, x].argmax() == 0
                red_left.append(x < example["image"].shape[2] / 2)
    assert any(red_left)
    assert not all(red_left)


def test_run_length_objects_are_trained_on_as_bitmaps(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    file = dataset.coco("train").annotations
    content = json.loads(file.read_text())
    content["annotations"][0]["segmentation"] = {"size": [30, 40], "counts": [60, 240, 900]}
    file.write_text(json.dumps(content))
    dataset = open_dataset(SPEC, dataset.root)
    this = job(tmp_path, values(scale=[1.0, 1.0]), dataset)
    with logged(tmp_path / "log.txt"):
        example = training_examples(read_split(dataset.coco("train")), this.task.values, this)[0]
    assert example["instances"].gt_masks.tensor.shape == (1, 24, 32)
    assert any("bitmaps" in note for note in this.notes)


def test_outlines_without_an_inside_are_counted_not_trained_on(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    file = dataset.coco("train").annotations
    content = json.loads(file.read_text())
    flat = annotation(99, 30, IDS[0], 2, 2, 5, 5) | {"segmentation": [[2, 2, 7, 7]]}
    content["annotations"].append(flat)
    file.write_text(json.dumps(content))
    dataset = open_dataset(SPEC, dataset.root)
    this = job(tmp_path, values(), dataset)
    assert len(training_examples(read_split(dataset.coco("train")), this.task.values, this)) == 3
    assert "1 training annotations have no polygon of three corners and are not trained on" in this.notes


def test_no_object_at_all_is_an_error(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    this = job(tmp_path, values(), dataset)
    split = read_split(dataset.coco("train"))
    for record in split.records:
        record["annotations"] = []
    with pytest.raises(UserError, match="no image of the training split"):
        training_examples(split, this.task.values, this)


def test_bad_pictures_are_named(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    examples: Examples = evaluation_examples(read_split(dataset.coco("val")), values())
    Image.new("RGB", (30, 40)).save(dataset.root / "val/1.png")
    with pytest.raises(UserError, match=r"val/1\.png is not the 40 x 30 pixels"):
        examples[1]
    (dataset.root / "val/2.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(UserError, match=r"cannot decode or resize picture .*val/2\.png"):
        examples[2]


@pytest.mark.parametrize(("size", "batch"), [(1024, 1), (512, 4), (64, 8), (1280, 1)])
def test_evaluation_batch_is_bounded_by_pixels(size: int, batch: int) -> None:
    assert evaluation_batch(values(image_size=size)) == batch
