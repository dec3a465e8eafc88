"""Pictures of what a Masked Autoencoder predicts, in the manner of He et al., arXiv 2111.06377, figure 2."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mae_bench.pretraining.mae import MaskedAutoencoder, patchify, unpatchify
from mae_bench.pretraining.targets import PatchStatistics

COLUMNS = ("original", "masked", "predicted", "pasted")
TILE = 112  # smallest side of a picture in the grid, in pixels; small ones are enlarged by a whole factor
GAP = 6
LINE = 14  # height of a line of text
HIDDEN = 0.5  # grey of a masked patch
FREE = "No loss looks at what is predicted for visible patches."
LEAK = (
    "Predictions are of normalised pixels; to show them, each patch was given its own true mean and variance. "
    "The pictures leak both and are no measure of quality."
)


@dataclass(frozen=True)
class Reconstruction:
    """``columns``: (4,B,3,H,W) RGB in [0, 1], in the order of ``COLUMNS``. ``loss``: mean squared error over masked
    patches, in units of the target, as in training."""

    columns: Tensor
    loss: float
    norm_pix: bool

    @property
    def caption(self) -> str:
        """What the error is measured in, and what was given away to show the prediction."""
        unit = "normalised pixels" if self.norm_pix else "standardised pixels"
        sentences = [f"Mean squared error on masked patches: {self.loss:.4f} ({unit}).", FREE]
        return " ".join([*sentences, LEAK] if self.norm_pix else sentences)

    def write(self, path: Path) -> None:
        """Write the grid, one row per picture, with headings and caption, as a PNG; the file appears complete."""
        _, B, _, H, W = self.columns.shape
        factor = max(1, -(-TILE // min(H, W)))
        height, width = H * factor, W * factor
        total = len(COLUMNS) * (width + GAP) + GAP
        font = ImageFont.load_default(size=11)
        lines = textwrap.wrap(self.caption, width=total // 6)
        top = LINE + GAP
        sheet = Image.new("RGB", (total, top + B * (height + GAP) + LINE * len(lines) + GAP), "white")
        draw = ImageDraw.Draw(sheet)
        pixels = (self.columns * 255).round().byte().permute(0, 1, 3, 4, 2).numpy()
        for column, name in enumerate(COLUMNS):
            x = GAP + column * (width + GAP)
            draw.text((x, GAP // 2), name, fill="black", font=font)
            for row in range(B):
                tile = Image.fromarray(pixels[column, row]).resize((width, height), Image.Resampling.NEAREST)
                sheet.paste(tile, (x, top + row * (height + GAP)))
        for number, line in enumerate(lines):
            draw.text((GAP, top + B * (height + GAP) + number * LINE), line, fill="black", font=font)
        part = path.with_name(f".{path.name}.part")
        sheet.save(part, format="PNG")
        part.replace(path)


@torch.no_grad()
def reconstruct(model: MaskedAutoencoder, images_BCHW: Tensor, noise_BN: Tensor) -> Reconstruction:
    """Predict the masked patches of uint8 RGB images at the model's size, under the masks that ``noise_BN`` gives.

    A prediction of normalised pixels is denormalised with each patch's true statistics, the visible ones' included.
    """
    training = model.training
    model.eval()
    data = model.data_preprocessor({"inputs": images_BCHW, "data_samples": noise_BN})
    predicted_BNP = model(**data, mode="tensor").float()
    loss = model(**data, mode="loss")["loss"].item()
    model.train(training)
    patches_BNP = patchify(data["inputs"], model.encoder.patch)
    if model.norm_pix:
        predicted_BNP = PatchStatistics.of(patches_BNP).denormalise(predicted_BNP)
    hidden_BN1 = model.masking(data["data_samples"]).mask.unsqueeze(-1) > 0
    original, predicted = _image(model, patches_BNP), _image(model, predicted_BNP)
    hidden = unpatchify(hidden_BN1.expand_as(patches_BNP), model.encoder.grid).cpu()
    masked, pasted = original.masked_fill(hidden, HIDDEN), torch.where(hidden, predicted, original)
    return Reconstruction(torch.stack([original, masked, predicted, pasted]), loss, model.norm_pix)


def _image(model: MaskedAutoencoder, patches_BNP: Tensor) -> Tensor:
    """Standardised patches -> RGB images (B,3,H,W) in [0, 1], on the CPU."""
    statistics = model.data_preprocessor
    pixels: Tensor = unpatchify(patches_BNP, model.encoder.grid) * statistics.std + statistics.mean
    return (pixels / 255).clamp(0, 1).cpu()
