"""Small backbones, values, pictures and jobs that the detection tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.structures import Boxes, Instances
from PIL import Image, ImageDraw
from torch import nn

from mae_bench.data import CocoSplit, Dataset, open_dataset
from mae_bench.engine.job import Job, Options
from mae_bench.recipes import ResolvedTask
from mae_bench.schema import Backbone, DataSpec, DetectionValues, Task

IDS = [3, 7, 40]  # category ids with gaps
COLOURS = [(220, 30, 30), (30, 200, 40), (40, 60, 230)]
SPEC = DataSpec(
    format="coco",
    train="train",
    val="val",
    train_annotations="annotations/train.json",
    val_annotations="annotations/val.json",
)


def backbone(**architecture: Any) -> Backbone:
    """A from-scratch encoder of width 32, depth 2 and 4-pixel patches."""
    shape = {"patch": 4, "width": 32, "depth": 2, "heads": 2, "image_size": 16} | architecture
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


def values(**changes: Any) -> DetectionValues:
    """Three steps of two pictures of 32 x 32, all parts of the model on."""
    base: dict[str, Any] = {
        "steps": 3,
        "batch": 2,
        "base_lr": 1e-3,
        "weight_decay": 0.05,
        "image_size": 32,
        "window": 3,
        "global_blocks": [1],
        "rel_pos": True,
        "pyramid_width": 8,
        "box_fc": 8,
        "head_convs": 8,
        "scale": [0.8, 1.25],
        "rpn_batch": 16,
        "rpn_topk_train": 20,
        "rpn_topk_test": 20,
        "proposals_train": 10,
        "proposals_test": 10,
        "roi_batch": 8,
        "detections": 10,
    }
    return DetectionValues.model_validate(base | changes)


def write_data(root: Path, *, empty: int = 1) -> Dataset:
    """Three pictures of 40 x 30 with a rectangle per class and ``empty`` without, the same in both splits.

    Picture k has rectangles of k + 1 classes, the last picture also a crowd region.
    """
    for split in ("train", "val"):
        content: dict[str, Any] = {
            "images": [],
            "annotations": [],
            "categories": [{"id": id, "name": f"colour {id}"} for id in reversed(IDS)],
        }
        (root / split).mkdir(parents=True)
        for number in range(3 + empty):
            picture = Image.new("RGB", (40, 30), (90, 90, 90))
            boxes = [(2 + 12 * k, 4 + 3 * k, 9 + 2 * k, 10 + k) for k in range(number + 1 if number < 3 else 0)]
            for k, (x, y, w, h) in enumerate(boxes):
                ImageDraw.Draw(picture).rectangle((x, y, x + w - 1, y + h - 1), fill=COLOURS[k])
                content["annotations"].append(
                    annotation(len(content["annotations"]) + 1, 10 * number, IDS[k], x, y, w, h)
                )
            picture.save(root / split / f"{number}.png")
            content["images"].append({"id": 10 * number, "file_name": f"{number}.png", "width": 40, "height": 30})
        content["annotations"].append(crowd(len(content["annotations"]) + 1, 20))
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"{split}.json").write_text(json.dumps(content))
    return open_dataset(SPEC, root)


def annotation(id: int, image: int, category: int, x: float, y: float, w: float, h: float) -> dict[str, Any]:
    """A rectangle with itself as polygon."""
    return {
        "id": id,
        "image_id": image,
        "category_id": category,
        "bbox": [x, y, w, h],
        "area": w * h,
        "iscrowd": 0,
        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
    }


def crowd(id: int, image: int) -> dict[str, Any]:
    """The left four columns of a 40 x 30 picture, as run lengths."""
    return {
        "id": id,
        "image_id": image,
        "category_id": IDS[0],
        "bbox": [0, 0, 4, 30],
        "area": 120,
        "iscrowd": 1,
        "segmentation": {"size": [30, 40], "counts": [0, 120, 1080]},
    }


def task(spec: DataSpec = SPEC) -> Task:
    """A detection task on any data."""
    return Task.model_validate(
        {
            "name": "test_task",
            "engine": "detection",
            "protocol": "test@1",
            "metric": "box_AP",
            "summary": "a test",
            "reference": "ours",
            "data": spec.model_dump(),
            "layer": [{"source": "ours", "values": {}}],
        }
    )


def job(folder: Path, settings: DetectionValues, dataset: Dataset, *, seed: int = 0, **options: Any) -> Job:
    """A job that writes to ``folder`` and shows nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    choice = Options(**({"workers": 0, "quiet": True, "device": "cpu"} | options))
    return Job(ResolvedTask(task(dataset.spec), settings, {}), backbone(), seed, choice, folder, dataset, None)


class Oracle(nn.Module):
    """A model that answers with the annotations themselves, changed by ``change(rows)``.

    Rows are (x, y, w, h, contiguous class, score), one per object of the picture that is not a crowd.
    """

    def __init__(self, split: CocoSplit, change: Callable[[Any], Any] = lambda rows: rows) -> None:
        super().__init__()
        self.change = change
        self.rows: dict[int, list[Sequence[float]]] = {}
        for one in json.loads(split.annotations.read_text())["annotations"]:
            if not one["iscrowd"]:
                row = [*one["bbox"], split.ids[one["category_id"]], 0.9]
                self.rows.setdefault(one["image_id"], []).append(row)

    def forward(self, inputs: list[dict[str, Any]]) -> list[dict[str, Instances]]:
        return [{"instances": self._answer(one)} for one in inputs]

    def _answer(self, one: dict[str, Any]) -> Instances:
        rows = self.change(torch.tensor(self.rows.get(one["image_id"], []), dtype=torch.float64).reshape(-1, 6))
        boxes = torch.cat([rows[:, :2], rows[:, :2] + rows[:, 2:4]], dim=1).float()
        masks = torch.zeros(len(rows), one["height"], one["width"], dtype=torch.bool)
        for mask, (x0, y0, x1, y1) in zip(masks, boxes.round().int().clamp(min=0).tolist(), strict=True):
            mask[y0:y1, x0:x1] = True
        return Instances(
            (one["height"], one["width"]),
            pred_boxes=Boxes(boxes),
            pred_classes=rows[:, 4].long(),
            scores=rows[:, 5].float(),
            pred_masks=masks,
        )
