"""Pictures and label maps for mmsegmentation: its data set class and transforms, fed with our list of pairs.

Zero reduction (0 -> 255, k -> k-1, 255 stays) happens in mmseg's ``LoadAnnotations`` and nowhere else. What mmseg would
pass on silently is refused by name: an undecodable picture, a colour label map (mmseg takes one channel of it, or fails
much later), a label map of another size than its picture, and a label that no class has (out of bounds in the loss).
``mae_bench.data`` has already checked a sample of every split; here every item is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmcv.transforms import BaseTransform, RandomResize
from mmseg.datasets import BaseSegDataset
from mmseg.datasets.transforms import (
    LoadAnnotations,
    PackSegInputs,
    PhotoMetricDistortion,
    RandomCrop,
    RandomFlip,
    Resize,
)
from PIL import Image

from mae_bench.data.images import BROKEN, read_rgb
from mae_bench.errors import UserError
from mae_bench.schema import SegmentationValues
from mae_bench.segmentation.adapter import IGNORE

Pairs = Sequence[tuple[Path, Path]]
_INDEX_MODES = ("1", "L", "P")  # Pillow's modes whose array is the index itself, one byte a pixel


class ReadPicture(BaseTransform):
    """``img_path`` -> ``img`` (H,W,3) uint8 BGR, as mmcv's ``LoadImageFromFile`` gives it, but by our one decode
    policy: the stored raster, which is what label maps are drawn on, and no guess at a broken file."""

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        image_HWC = np.asarray(read_rgb(Path(results["img_path"])))[..., ::-1]
        results["img"] = np.ascontiguousarray(image_HWC)
        results["img_shape"] = results["ori_shape"] = image_HWC.shape[:2]
        return results


class ReadLabels(LoadAnnotations):
    """mmseg's ``LoadAnnotations`` between two checks: of the file before, of size and values after.

    Raises UserError naming the file. Expects ``ori_shape`` of the picture in the results.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        path = results["seg_map_path"]
        try:
            with Image.open(path) as image:
                if image.mode not in _INDEX_MODES:
                    raise UserError(
                        f"label map {path} has mode {image.mode}; expected one byte per pixel, the class (a grey "
                        "or palette PNG): `python -m mae_bench.data.masks FOLDER OUT` converts colours"
                    )
            super().transform(results)
        except BROKEN as error:
            raise UserError(f"label map {path} cannot be read: {error}; expected a PNG of class numbers") from error
        labels_HW: np.ndarray[Any, np.dtype[np.uint8]] = results["gt_seg_map"]
        if labels_HW.shape != results["ori_shape"]:
            raise UserError(
                f"label map {path} is {labels_HW.shape[1]} x {labels_HW.shape[0]} but its picture is "
                f"{results['ori_shape'][1]} x {results['ori_shape'][0]} as stored; they must be equal"
            )
        outside = labels_HW[(labels_HW >= self.classes) & (labels_HW != IGNORE)]
        if outside.size:
            first = int(results["reduce_zero_label"])
            raise UserError(
                f"label map {path} holds value {int(outside.max()) + first}, but the data set has {self.classes} "
                f"classes: expected {first} to {self.classes - 1 + first}, {'0 for other, ' if first else ''}and "
                f"{IGNORE} for ignored pixels; correct the labels, or the task recipe's classes and zero_is_other"
            )
        return results


class PairDataset(BaseSegDataset):
    """mmseg's data set on a list of (picture, label map) pairs instead of a folder and two suffixes."""

    def __init__(
        self, pairs: Pairs, classes: Sequence[str], zero_is_other: bool, pipeline: list[BaseTransform], test_mode: bool
    ) -> None:
        self._pairs = pairs
        super().__init__(
            metainfo={"classes": tuple(classes)},
            reduce_zero_label=zero_is_other,
            ignore_index=IGNORE,
            pipeline=pipeline,
            test_mode=test_mode,
        )

    def load_data_list(self) -> list[dict[str, Any]]:
        """One entry per pair, in the given order."""
        return [entry(pair, self.reduce_zero_label) for pair in self._pairs]


def entry(pair: tuple[Path, Path], zero_is_other: bool) -> dict[str, Any]:
    """What mmseg's transforms expect to start from."""
    return {
        "img_path": str(pair[0]),
        "seg_map_path": str(pair[1]),
        "label_map": None,
        "reduce_zero_label": zero_is_other,
        "seg_fields": [],
    }


def train_set(pairs: Pairs, classes: Sequence[str], zero_is_other: bool, values: SegmentationValues) -> PairDataset:
    """Training pictures: keep-ratio resize within ``resize`` x a random ratio, crop, flip, photometric distortion."""
    pipeline: list[BaseTransform] = [
        ReadPicture(),
        ReadLabels(len(classes)),
        RandomResize(values.resize, values.resize_ratio, resize_type=Resize, keep_ratio=True),
        RandomCrop((values.image_size, values.image_size), cat_max_ratio=values.max_class_share, ignore_index=IGNORE),
        RandomFlip(prob=0.5),
        *([PhotoMetricDistortion()] if values.photometric else []),
        PackSegInputs(),
    ]
    return PairDataset(pairs, classes, zero_is_other, pipeline, test_mode=False)


def eval_set(pairs: Pairs, classes: Sequence[str], zero_is_other: bool, values: SegmentationValues) -> PairDataset:
    """Evaluation pictures: resized within ``resize``; the label map keeps its native size."""
    pipeline = [
        ReadPicture(),
        Resize(values.resize, keep_ratio=True),
        ReadLabels(len(classes)),
        PackSegInputs(),
    ]
    return PairDataset(pairs, classes, zero_is_other, pipeline, test_mode=True)
