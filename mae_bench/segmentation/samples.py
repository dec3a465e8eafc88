"""Validation pictures beside what they are labelled and what a segmenter predicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from mmengine.dataset import pseudo_collate
from numpy.typing import NDArray
from PIL import Image

from mae_bench.data import drawing
from mae_bench.data.images import read_rgb
from mae_bench.segmentation.adapter import IGNORE, Segmenter
from mae_bench.segmentation.evaluate import Evaluator

SHOWN = 4
NAMED = 48  # classes in the legend, those with most pixels first
HEADS = ("picture", "ground truth", "prediction")

Labels = NDArray[np.uint8]


@torch.no_grad()
def draw(model: Segmenter, evaluator: Evaluator) -> Image.Image:
    """Pictures spread over the validation split, their labels and the predicted ones, and a legend of both.

    The model is left in the mode that it came in.
    """
    training = model.training
    model.eval()
    tiles, names, pixels_C = [], [], np.zeros(IGNORE + 1, dtype=np.int64)
    for number in drawing.spread(len(evaluator.dataset), SHOWN):
        data = pseudo_collate([evaluator.dataset[number]])
        (sample,) = data["data_samples"]
        path = Path(sample.metainfo["img_path"])
        truth_HW = sample.gt_sem_seg.data[0].numpy().astype(np.uint8)
        (predicted_HW,) = model.val_step(data)
        maps = (truth_HW, predicted_HW.cpu().numpy())
        picture = drawing.shown(read_rgb(path))
        tiles.append([drawing.Tile(picture), *(drawing.Tile(coloured(labels_HW, picture.size)) for labels_HW in maps)])
        names.append(path.name)
        for labels_HW in maps:
            pixels_C += np.bincount(labels_HW.ravel(), minlength=IGNORE + 1)
    model.train(training)
    grid = drawing.rows(tiles, HEADS, names)
    return drawing.stacked(grid, drawing.legend(_entries(pixels_C, evaluator.names), grid.width))


def coloured(labels_HW: Labels, size: tuple[int, int]) -> Image.Image:
    """A label map in the colours of its classes at ``size`` (width, height); what is ignored is grey."""
    palette = [drawing.colour(number) for number in range(IGNORE)] + [drawing.IGNORED]
    resized = Image.fromarray(labels_HW).resize(size, Image.Resampling.NEAREST)
    return Image.fromarray(np.array(palette, dtype=np.uint8)[np.asarray(resized)])


def _entries(pixels_C: NDArray[np.int64], names: tuple[str, ...]) -> list[tuple[drawing.Colour, str]]:
    """Colour and name of each class that has pixels in labels or predictions."""
    present = [number for number in np.argsort(-pixels_C[:IGNORE], kind="stable").tolist() if pixels_C[number]]
    entries = [(drawing.colour(number), names[number]) for number in sorted(present[:NAMED])]
    if pixels_C[IGNORE]:
        entries.append((drawing.IGNORED, "(ignored)"))
    if len(present) > NAMED:
        entries.append(((255, 255, 255), f"and {len(present) - NAMED} more"))
    return entries
