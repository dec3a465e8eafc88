"""Small backbones, values, pictures and jobs that the segmentation tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mae_bench.data import open_dataset
from mae_bench.engine.job import Job, Options
from mae_bench.recipes import ResolvedTask
from mae_bench.schema import Backbone, SegmentationValues, Task

PATCH = 4


def backbone(**architecture: Any) -> Backbone:
    """A from-scratch encoder of width 32 and depth 4."""
    shape = {"patch": PATCH, "width": 32, "depth": 4, "heads": 2, "image_size": 32} | architecture
    return Backbone.model_validate(
        {
            "name": "vit_test",
            "size": "t",
            "init": "scratch",
            "summary": "a test",
            "architecture": shape,
            "input": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
            "weights": {"kind": "none"},
        }
    )


def values(**changes: Any) -> SegmentationValues:
    base: dict[str, Any] = {
        "steps": 4,
        "batch": 4,
        "base_lr": 1e-3,
        "weight_decay": 0.05,
        "schedule": "poly",
        "image_size": 32,
        "resize": [64, 32],
        "taps": [0, 1, 2, 3],
        "rel_pos": True,
        "layer_scale": 1.0,
        "head_width": 16,
        "auxiliary_width": 8,
        "test_mode": "slide",
        "stride": 20,
    }
    return SegmentationValues.model_validate(base | changes)


def job(folder: Path, settings: SegmentationValues, *, seed: int = 0, val: str = "val", **options: Any) -> Job:
    """A job on eight made training and four validation pictures, 96 x 80, 8 classes. ``val="train"`` evaluates on the
    training pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"format": "ade20k", "classes": 8, "zero_is_other": True}
    data |= {"train": "images/train", "train_annotations": "labels/train"}
    data |= {"val": "images/val", "val_annotations": "labels/val"}
    task = Task.model_validate(
        {
            "name": "test_task",
            "engine": "segmentation",
            "protocol": "test@1",
            "metric": "mIoU",
            "summary": "a test",
            "reference": "ours",
            "data": data,
            "layer": [{"source": "ours", "values": {}}],
        }
    )
    dataset = open_dataset(task.data, smoke=True)
    if val == "train":
        same = task.data.model_copy(update={"val": "images/train", "val_annotations": "labels/train"})
        dataset = open_dataset(same, dataset.root)
    choice = Options(**({"workers": 0, "quiet": True, "device": "cpu"} | options))
    return Job(ResolvedTask(task, settings, {}), backbone(), seed, choice, folder, dataset, None)


def write_pair(folder: Path, labels_HW: np.ndarray[Any, Any], mode: str = "L", name: str = "a") -> tuple[Path, Path]:
    """A label map and a picture whose colour is a function of the label, so that their alignment can be checked."""
    picture, label = folder / f"{name}.png", folder / f"{name}_label.png"
    Image.fromarray(colour_of(labels_HW)).save(picture)
    image = Image.fromarray(labels_HW.astype(np.uint8))
    if mode == "P":  # colours that have nothing to do with the indices
        image = image.copy()
        image.putpalette([(37 * value) % 256 for value in range(768)])
    image.save(label)
    return picture, label


def colour_of(labels_HW: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(H,W) labels -> (H,W,3) RGB, injective on labels below 64 and on 255."""
    scaled = labels_HW.astype(np.uint8)
    return np.stack([scaled, 255 - scaled, np.full_like(scaled, 7)], axis=-1)
