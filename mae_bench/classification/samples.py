"""A sheet of validation pictures with what a classifier says of them."""

from __future__ import annotations

import torch
from PIL import Image, ImageDraw

from mae_bench.classification.adapter import Classifier
from mae_bench.classification.data import collate
from mae_bench.classification.evaluate import Evaluation
from mae_bench.data import drawing
from mae_bench.engine.precision import autocast

SHOWN = 12
IN_A_ROW = 6
LONGEST = 176  # side of a picture in the sheet, in pixels
CROSS = 20  # side of the mark of a wrong prediction
WRONG = (200, 0, 0)
CAPTION = (
    "Validation pictures as the model sees them. A cross marks a wrong prediction, of which the true class follows."
)


@torch.no_grad()
def draw(model: Classifier, evaluation: Evaluation) -> Image.Image:
    """Pictures spread over the validation split, each with the predicted class and its probability.

    ``model`` is on the evaluation's device, and is left in the mode that it came in.
    """
    numbers = drawing.spread(len(evaluation.pictures), SHOWN)
    batch = collate([evaluation.pictures[number] for number in numbers])
    training = model.training
    model.eval()
    with autocast(evaluation.device, evaluation.precision):
        logits_BK = model(model.data_preprocessor(batch)["inputs"])
    model.train(training)
    best = logits_BK.float().softmax(dim=1).max(dim=1)
    tiles = [
        _tile(Image.fromarray(pixels), evaluation.classes, truth, predicted, share)
        for pixels, truth, predicted, share in zip(
            batch["inputs"].permute(0, 2, 3, 1).numpy(),
            batch["data_samples"].tolist(),
            best.indices.tolist(),
            best.values.tolist(),
            strict=True,
        )
    ]
    grid = drawing.rows([tiles[start : start + IN_A_ROW] for start in range(0, len(tiles), IN_A_ROW)])
    return drawing.stacked(grid, drawing.paragraph(CAPTION, grid.width))


def _tile(
    picture: Image.Image, classes: tuple[str, ...], truth: int, predicted: int, probability: float
) -> drawing.Tile:
    picture = drawing.shown(picture, LONGEST)
    said = f"{classes[predicted]}  {100 * probability:.0f} %"
    if predicted == truth:
        return drawing.Tile(picture, (said, ""))
    mark = ImageDraw.Draw(picture)
    mark.rectangle((0, 0, picture.width - 1, picture.height - 1), outline=WRONG, width=2)
    mark.rectangle((0, 0, CROSS, CROSS), fill=WRONG)
    for ends in ((5, 5, CROSS - 5, CROSS - 5), (5, CROSS - 5, CROSS - 5, 5)):
        mark.line(ends, fill="white", width=3)
    return drawing.Tile(picture, (said, f"is {classes[truth]}"))
