"""Pictures of what a Masked Autoencoder predicts, in the manner of He et al., arXiv 2111.06377, figure 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mae_bench.checkpoints.save import atomic
from mae_bench.data import drawing
from mae_bench.pretraining.mae import MaskedAutoencoder, patchify, unpatchify
from mae_bench.pretraining.targets import PatchStatistics, Pixels

COLUMNS = ("original", "masked", "predicted", "pasted")
HIDDEN = 0.5  # grey of a masked patch
FREE = "No loss looks at what is predicted for visible patches."
LEAK = (
    "Predictions are of normalised pixels; to show them, each patch was given its own true mean and variance. "
    "The pictures leak both and are no measure of quality."
)


@dataclass(frozen=True)
class Reconstruction:
    """``columns``: (4,B,3,H,W) RGB in [0, 1], in the order of ``COLUMNS``. ``errors``: mean squared error of each
    picture over its masked patches (over all, where none is masked), in units of the target."""

    columns: Tensor
    errors: tuple[float, ...]
    norm_pix: bool
    masked: bool = True
    free: bool = True  # no loss looked at the visible patches

    @property
    def error(self) -> float:
        """Mean over the pictures, which is the mean over patches: all pictures hide the same number."""
        return sum(self.errors) / len(self.errors)

    @property
    def unit(self) -> str:
        """Of the errors."""
        return "normalised pixels" if self.norm_pix else "standardised pixels"

    @property
    def caption(self) -> str:
        """What the error is measured in, and what was given away to show the prediction."""
        where = "masked" if self.masked else "all"
        sentences = [f"Mean squared error on {where} patches: {self.error:.4f} ({self.unit})."]
        return " ".join(sentences + [FREE] * self.free + [LEAK] * self.norm_pix)

    def sheet(self, names: Sequence[str] = (), most: int | None = None) -> Image.Image:
        """The grid, one row per picture, with headings and caption; pictures are at most ``most`` pixels long.

        ``names`` stand above the rows, with the picture's error; they may hold anything, and may be long.
        """
        pixels = (self.columns * 255).round().byte().permute(1, 0, 3, 4, 2).numpy()
        tiles = [[drawing.Tile(drawing.shown(Image.fromarray(tile), most)) for tile in row] for row in pixels]
        labels = [f"{name}  {self.errors[number]:.4f}" for number, name in enumerate(names)]
        grid = drawing.rows(tiles, COLUMNS, labels)
        return drawing.stacked(grid, drawing.paragraph(self.caption, grid.width))

    def write(self, path: Path, names: Sequence[str] = ()) -> None:
        """Write the ``sheet``, exact to the pixel, as a PNG; the file appears complete."""
        with atomic(path) as part:
            self.sheet(names).save(part, format="PNG")


@torch.no_grad()
def reconstruct(model: MaskedAutoencoder, images_BCHW: Tensor, noise_BN: Tensor) -> Reconstruction:
    """Predict the masked patches of uint8 RGB images at the model's size, under the masks that ``noise_BN`` gives.

    A prediction of normalised pixels is denormalised with each patch's true statistics, the visible ones' included.

    Raises:
        ValueError: the model predicts something else than pixels.
    """
    target, training = model.target, model.training
    if type(target) is not Pixels:
        raise ValueError(f"{type(target).__name__} are no pixels to look at")
    model.eval()
    data = model.data_preprocessor({"inputs": images_BCHW, "data_samples": noise_BN})
    predicted_BNP = model(**data, mode="tensor").float()
    model.train(training)
    patches_BNP = patchify(data["inputs"], model.encoder.patch)
    hidden_BN = model.masking(data["data_samples"]).mask > 0
    masked = bool(hidden_BN.any())
    error_BN = (predicted_BNP - target.of(patches_BNP)).square().mean(dim=-1)
    looked_at = hidden_BN if masked else torch.ones_like(hidden_BN)
    errors_B = (error_BN * looked_at).sum(dim=1) / looked_at.sum(dim=1)
    if model.norm_pix:
        predicted_BNP = PatchStatistics.of(patches_BNP).denormalise(predicted_BNP)
    original, predicted = _image(model, patches_BNP), _image(model, predicted_BNP)
    hidden = unpatchify(hidden_BN.unsqueeze(-1).expand_as(patches_BNP), model.encoder.grid).cpu()
    columns = original, original.masked_fill(hidden, HIDDEN), predicted, torch.where(hidden, predicted, original)
    free = masked and not model.loss_on_all
    return Reconstruction(torch.stack(columns), tuple(errors_B.tolist()), model.norm_pix, masked, free)


def _image(model: MaskedAutoencoder, patches_BNP: Tensor) -> Tensor:
    """Standardised patches -> RGB images (B,3,H,W) in [0, 1], on the CPU."""
    statistics = model.data_preprocessor
    pixels: Tensor = unpatchify(patches_BNP, model.encoder.grid) * statistics.std + statistics.mean
    return (pixels / 255).clamp(0, 1).cpu()
