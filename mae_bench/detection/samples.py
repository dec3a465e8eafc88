"""Validation pictures with their objects, annotated and detected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pycocotools.mask
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import nn

from mae_bench.data import drawing
from mae_bench.detection.data import Example, Examples

SHOWN = 4
SCORE = 0.5  # lowest score of a detection that is drawn
MOST = 20  # objects drawn in a picture
CELLS = 2  # pictures in a row of the sheet, each twice
HEADS = ("ground truth", "prediction") * CELLS
OPACITY = 0.45  # of a mask
CAPTION = (
    f"Detections with a score of {SCORE} or more, at most {MOST} a picture. The colour is the class. "
    "Crowd regions, which are not scored, are grey."
)


@dataclass(frozen=True)
class Object:
    """``box`` is in pixels of the picture as stored, and ``mask`` (H,W) has its size."""

    box: drawing.Box
    mask: NDArray[np.bool_]
    name: str
    colour: drawing.Colour


@torch.no_grad()
def draw(model: nn.Module, examples: Examples, classes: Sequence[str]) -> Image.Image:
    """Pictures spread over the validation split: the annotated objects on the left, the detected ones on the right.

    The model is left in the mode that it came in.
    """
    training = model.training
    model.eval()
    tiles: list[drawing.Tile] = []
    for number in drawing.spread(len(examples), SHOWN):
        example = examples[number]
        picture = drawing.shown(Image.fromarray(example["image"].permute(1, 2, 0).numpy()))
        scale = picture.width / example["width"], picture.height / example["height"]
        instances = model([example])[0]["instances"].to("cpu")
        truth = _annotated(examples.records[number], classes)
        found = _detected(instances, classes)
        tiles.append(drawing.Tile(drawn(picture, truth, scale), (Path(example["file_name"]).name,)))
        tiles.append(drawing.Tile(drawn(picture, found, scale), (_summary(instances, classes, len(found)),)))
    model.train(training)
    step = len(HEADS)
    grid = drawing.rows([tiles[start : start + step] for start in range(0, len(tiles), step)], HEADS)
    return drawing.stacked(grid, drawing.paragraph(CAPTION, grid.width))


def drawn(picture: Image.Image, objects: Sequence[Object], scale: tuple[float, float]) -> Image.Image:
    """A copy of the picture with masks, boxes and names; ``scale`` brings their x and y to its pixels."""
    pixels_HWC = np.array(picture, dtype=np.float32)
    for one in objects:
        mask_HW = np.asarray(Image.fromarray(one.mask).resize(picture.size, Image.Resampling.NEAREST))
        pixels_HWC[mask_HW] = (1 - OPACITY) * pixels_HWC[mask_HW] + OPACITY * np.array(one.colour, dtype=np.float32)
    result = Image.fromarray(pixels_HWC.round().astype(np.uint8))
    draw = ImageDraw.Draw(result)
    for one in objects:
        x0, y0, x1, y1 = (value * scale[side % 2] for side, value in enumerate(one.box))
        draw.rectangle((x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), outline=one.colour, width=2)
    taken: list[drawing.Box] = []
    for one in reversed(objects):  # after all boxes, so that none runs through a name; the uppermost object first
        drawing.label(draw, (one.box[0] * scale[0], one.box[1] * scale[1]), one.name, one.colour, taken)
    return result


def _annotated(record: Example, classes: Sequence[str]) -> list[Object]:
    """The objects of a picture, largest first."""
    objects = []
    for one in record["annotations"]:
        x, y, width, height = one["bbox"]
        number = one["category_id"]
        name, colour = (classes[number], drawing.colour(number))
        if one["iscrowd"]:
            name, colour = f"crowd: {name}", drawing.IGNORED
        mask_HW = _mask(one["segmentation"], record["height"], record["width"])
        objects.append(Object((x, y, x + width, y + height), mask_HW, name, colour))
    return sorted(objects, key=lambda one: -int(one.mask.sum()))[:MOST]


def _mask(outline: list[list[float]] | dict[str, Any], height: int, width: int) -> NDArray[np.bool_]:
    """(H,W) bool from polygons or a compressed run-length code."""
    code = outline
    if isinstance(outline, list):
        code = pycocotools.mask.merge(pycocotools.mask.frPyObjects(outline, height, width))
    mask_HW: NDArray[np.bool_] = np.asarray(pycocotools.mask.decode(code)).astype(bool)
    return mask_HW


def _detected(instances: Any, classes: Sequence[str]) -> list[Object]:
    """The detections that are drawn, of one picture at its stored size; the best comes last, above the others."""
    order = instances.scores.argsort(descending=True, stable=True).tolist()
    objects = []
    for number in order[:MOST][::-1]:
        label, score = int(instances.pred_classes[number]), float(instances.scores[number])
        if score >= SCORE:
            x0, y0, x1, y1 = instances.pred_boxes.tensor[number].tolist()
            name = f"{drawing.printable(classes[label], 16)} {score:.2f}"
            mask_HW = instances.pred_masks[number].numpy()
            objects.append(Object((x0, y0, x1, y1), mask_HW, name, drawing.colour(label)))
    return objects


def _summary(instances: Any, classes: Sequence[str], drawn: int) -> str:
    """What is not to be seen of one picture's detections."""
    total = len(instances)
    if drawn or not total:
        return f"{drawn} of {total} detections"
    best = int(instances.scores.argmax())
    return f"0 of {total}; best {classes[int(instances.pred_classes[best])]} {instances.scores[best]:.3f}"
