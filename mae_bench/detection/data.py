"""COCO annotations as detectron2's dicts, read through its own ``DatasetMapper`` and augmentations.

Large-scale jitter in ViTDet's order (detectron2 ``projects/ViTDet/configs/common/coco_loader_lsj.py``): flip, resize,
crop; nothing is padded here, since the model pads after normalisation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import detectron2.data.transforms as T
import pycocotools.mask
from detectron2.data import DatasetFromList, DatasetMapper
from detectron2.data.detection_utils import SizeMismatchError
from detectron2.structures import BoxMode
from torch.utils.data import Dataset as TorchDataset

from mae_bench.data import CocoSplit
from mae_bench.data.images import BROKEN, POLICY
from mae_bench.engine.job import Job
from mae_bench.errors import UserError
from mae_bench.schema import DetectionValues

Example = dict[str, Any]


@dataclass(frozen=True)
class Annotated:
    """A split in detectron2's standard form: a dict per image, sorted by image id, classes in [0, classes)."""

    records: list[Example]
    unusable: int  # annotations whose polygons have fewer than three corners, which nothing can be learnt from

    @property
    def has_run_lengths(self) -> bool:
        """Whether any object that is trained on is outlined by a run-length code rather than by polygons."""
        return any(
            isinstance(one["segmentation"], dict)
            for record in self.records
            for one in record["annotations"]
            if not one["iscrowd"]
        )

    def trainable(self) -> list[Example]:
        """The images that show at least one object that is not a crowd: detectron2 trains on no others."""
        return [record for record in self.records if any(not one["iscrowd"] for one in record["annotations"])]


def read_split(split: CocoSplit) -> Annotated:
    """Every image of a checked split with its annotations, category ids mapped by ``split.ids``."""
    content = json.loads(split.annotations.read_bytes())
    by_image: dict[int, list[Example]] = {image["id"]: [] for image in content["images"]}
    unusable = 0
    for annotation in content["annotations"]:
        outline = _outline(annotation["segmentation"])
        unusable += not outline
        if outline:
            by_image[annotation["image_id"]].append(
                {
                    "bbox": annotation["bbox"],
                    "bbox_mode": BoxMode.XYWH_ABS,
                    "category_id": split.ids[annotation["category_id"]],
                    "iscrowd": annotation.get("iscrowd", 0),
                    "segmentation": outline,
                }
            )
    records = [
        {
            "file_name": str(split.images / image["file_name"]),
            "height": image["height"],
            "width": image["width"],
            "image_id": image["id"],
            "annotations": by_image[image["id"]],
        }
        for image in sorted(content["images"], key=lambda image: int(image["id"]))
    ]
    return Annotated(records, unusable)


def _outline(segmentation: list[list[float]] | dict[str, Any]) -> list[list[float]] | dict[str, Any]:
    """Polygons that have an inside (empty where none has), or a compressed run-length code."""
    if isinstance(segmentation, list):
        return [polygon for polygon in segmentation if len(polygon) >= 6]
    if isinstance(segmentation["counts"], list):
        return dict(pycocotools.mask.frPyObjects(segmentation, *segmentation["size"]))
    return segmentation


class Examples(TorchDataset[Example]):
    """Index -> one image in the form that detectron2's models take, made by ``DatasetMapper``.

    Records are kept serialised (detectron2's ``DatasetFromList``): worker processes then share their memory.
    """

    def __init__(self, records: list[Example], mapper: DatasetMapper) -> None:
        self.records = DatasetFromList(records, copy=False, serialize=True)
        self.mapper = mapper

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:
        record = self.records[index]
        try:
            example: Example = self.mapper(record)
        except SizeMismatchError as error:
            raise UserError(
                f"{record['file_name']} is not the {record['width']} x {record['height']} pixels that its annotations "
                f"say (EXIF rotation applied); correct the file or its width and height"
            ) from error
        except BROKEN as error:
            raise UserError(f"cannot decode or resize picture {record['file_name']}: {error}; {POLICY}") from error
        return example


def training_examples(split: Annotated, values: DetectionValues, job: Job) -> Examples:
    """Images with objects, under large-scale jitter. Notes what is left out."""
    records = split.trainable()
    if not records:
        raise UserError(f"no image of the training split of '{job.dataset.root}' has an annotated object")
    if left_out := len(split.records) - len(records):
        job.note(f"{left_out} of {len(split.records)} training images have no annotated object and are not trained on")
    if split.unusable:
        job.note(f"{split.unusable} training annotations have no polygon of three corners and are not trained on")
    if split.has_run_lengths:
        job.note("some training objects are outlined by run-length codes, so mask targets are cut from bitmaps")
    size = values.image_size
    return Examples(
        records,
        DatasetMapper(
            is_train=True,
            augmentations=[
                T.RandomFlip(horizontal=True),
                T.ResizeScale(*values.scale, target_height=size, target_width=size),
                T.FixedSizeCrop(crop_size=(size, size), pad=False),
            ],
            image_format="RGB",
            use_instance_mask=True,
            # As in ViTDet's loader: a box cut by the crop becomes the tight box of what is left of its mask.
            recompute_boxes=True,
            instance_mask_format="bitmask" if split.has_run_lengths else "polygon",
        ),
    )


def evaluation_examples(split: Annotated, values: DetectionValues) -> Examples:
    """All images, resized so that the longer side is ``image_size``; the model pads them to the square."""
    size = values.image_size
    resize = T.ResizeShortestEdge(short_edge_length=size, max_size=size)
    return Examples(split.records, DatasetMapper(is_train=False, augmentations=[resize], image_format="RGB"))


def together(examples: Sequence[Example]) -> list[Example]:
    """Collate: detectron2's models take a list of dicts."""
    return list(examples)


def evaluation_batch(values: DetectionValues) -> int:
    """Images per forward pass in evaluation: about the pixels of one 1024 x 1024 image, at most 8."""
    return max(1, min(8, math.floor((1024 / values.image_size) ** 2)))
