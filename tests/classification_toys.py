"""Tiny class folders that a probe can tell apart, and jobs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from engine_toys import make_job, make_values
from PIL import Image

from mae_bench.data import Dataset, open_dataset
from mae_bench.engine.job import Job
from mae_bench.schema import ClassificationValues, DataSpec

SPEC = DataSpec(format="image_folder", train="train", val="val")


def make_pictures(root: Path, train: int = 24, val: int = 11, classes: int = 6) -> Dataset:
    """``train`` and ``val`` pictures of 12 x 10 pixels, one hue per class with noise; class 0 is the most frequent."""
    noise = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            (root / split / f"class_{label}").mkdir(parents=True, exist_ok=True)
        for index in range(count):
            label = index % classes if index < count - 2 else 0
            color = 255 * np.array([label & 1, label >> 1 & 1, label >> 2 & 1])
            pixels = np.clip(0.7 * color + noise.uniform(0, 70, (10, 12, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / split / f"class_{label}" / f"{index:03}.png")
    return open_dataset(SPEC, root)


def linear(**changes: Any) -> ClassificationValues:
    base = {"mode": "linear", "head_norm": True, "weight_decay": 0.0, "base_lr": 0.05, "epochs": 6, "warmup_epochs": 1}
    return make_values(**(base | {"eval_every_epochs": 2, "crop_scale": [0.5, 1.0], "eval_crop": 1.0} | changes))


def finetune(**changes: Any) -> ClassificationValues:
    """With everything that draws random numbers."""
    base: dict[str, Any] = {
        "pool": "mean",
        "base_lr": 3e-3,
        "layer_decay": 0.75,
        "drop_path": 0.2,
        "randaug": "rand-m9-mstd0.5-inc1",
        "label_smoothing": 0.1,
        "mixup": 0.8,
        "cutmix": 1.0,
        "erasing": 0.25,
        "ema": 0.5,
        "eval_every_epochs": 1,
        "no_decay": ["norm", "bias", "positions", "tokens"],
    }
    return make_values(**(base | changes))


def classification_job(
    tmp_path: Path, name: str, values: ClassificationValues, dataset: Dataset, **options: Any
) -> Job:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return make_job(folder, values, dataset, **options)
