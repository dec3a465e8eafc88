"""Reconstructions: what is shown, what it cost, and what the caption admits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mae_bench.encoders.vit import Encoder
from mae_bench.pretraining.mae import MaskedAutoencoder, patchify
from mae_bench.pretraining.objectives import build_model
from mae_bench.pretraining.pictures import COLUMNS, Reconstruction, reconstruct
from mae_bench.schema import Architecture, Input, PretrainingValues

ARCHITECTURE = Architecture(patch=8, width=16, depth=1, heads=2, image_size=32)


def model(norm_pix: bool, **changes: object) -> MaskedAutoencoder:
    given = {
        "steps": 1,
        "batch": 1,
        "base_lr": 1e-3,
        "weight_decay": 0.0,
        "mask_ratio": 0.75,
        "norm_pix": norm_pix,
        "decoder_depth": 1,
        "decoder_width": 16,
        "decoder_heads": 2,
    }
    values = PretrainingValues.model_validate(given | changes)
    encoder = Encoder(ARCHITECTURE, frozen_positions=True)
    encoder.initialise(0)
    return build_model(encoder, Input(mean=[0.5, 0.4, 0.3], std=[0.2, 0.25, 0.3]), values, 0)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.rand(3, 16, generator=generator)


@pytest.mark.parametrize("norm_pix", [False, True])
def test_columns(norm_pix: bool, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    mae = model(norm_pix)
    images, noise = batch
    result = reconstruct(mae, images, noise)
    original, masked, predicted, pasted = (patchify(column, 8) for column in result.columns)
    torch.testing.assert_close(result.columns[0], images / 255)
    hidden = mae.masking(noise).mask > 0
    assert (masked[hidden] == 0.5).all()
    assert torch.equal(masked[~hidden], original[~hidden])
    assert torch.equal(pasted[~hidden], original[~hidden])
    assert torch.equal(pasted[hidden], predicted[hidden])
    assert mae.training


@pytest.mark.parametrize("changes", [{}, {"mask_tokens": "encoder"}, {"decoder": "cross"}])
@pytest.mark.parametrize("norm_pix", [False, True])
def test_the_error_is_the_training_objective(
    norm_pix: bool, changes: dict[str, object], batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    mae = model(norm_pix, **changes)
    data = mae.data_preprocessor({"inputs": batch[0], "data_samples": batch[1]})
    shown = reconstruct(mae, *batch)
    assert shown.error == pytest.approx(mae(**data, mode="loss")["loss"].item())
    for number, error in enumerate(shown.errors):
        one = {key: value[number : number + 1] for key, value in data.items()}
        assert error == pytest.approx(mae(**one, mode="loss")["loss"].item())


def test_without_masks_the_error_is_on_all_patches(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    autoencoder = model(True, objective="autoencoder", mask_ratio=0.0, loss_on="all")
    data = autoencoder.data_preprocessor({"inputs": batch[0], "data_samples": batch[1]})
    shown = reconstruct(autoencoder, *batch)
    assert shown.error == pytest.approx(autoencoder(**data, mode="loss")["loss"].item())
    assert torch.equal(shown.columns[1], shown.columns[0])
    assert torch.equal(shown.columns[3], shown.columns[0])
    assert "on all patches" in shown.caption
    assert "visible" not in shown.caption
    assert "visible" not in reconstruct(model(True, loss_on="all"), *batch).caption


def test_what_is_no_picture_is_refused(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="Components are no pixels"):
        reconstruct(model(False, target="pca", pca=5), *batch)


def test_normalised_predictions_get_the_true_statistics_back(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A model that predicts zeros shows each patch's true mean: that is the leak which the caption admits."""
    mae = model(norm_pix=True)
    torch.nn.init.zeros_(mae.decoder_pred.weight)
    images, noise = batch
    predicted = patchify(reconstruct(mae, images, noise).columns[2], 8).unflatten(-1, (64, 3))
    # Standardised values are averaged over the three channels of a patch.
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])
    pixels = (patchify(images / 255, 8).unflatten(-1, (64, 3)) - mean) / std
    expected = (pixels.mean(dim=(-1, -2), keepdim=True) * std + mean).expand_as(predicted)
    torch.testing.assert_close(predicted, expected.clamp(0, 1), rtol=0, atol=1e-5)


def test_captions_say_what_leaks() -> None:
    columns = torch.zeros(4, 2, 3, 8, 8)
    normalised, plain = (Reconstruction(columns, (0.2, 0.3), norm_pix).caption for norm_pix in (True, False))
    assert "0.2500 (normalised pixels)" in normalised
    assert "true mean and variance" in normalised
    assert "leak" in normalised
    assert "leak" not in plain
    assert all("No loss looks at" in caption for caption in (normalised, plain))


def test_grid_on_disk(tmp_path: Path, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    result = reconstruct(model(norm_pix=True), *batch)
    result.write(tmp_path / "grid.png")
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]
    with Image.open(tmp_path / "grid.png") as grid:
        width, height = grid.size
        assert width >= len(COLUMNS) * 112
        assert height >= 3 * 112
        # The first tile is the first picture, enlarged by a whole factor.
        tile = grid.crop((6, 20, 6 + 128, 20 + 128)).resize((32, 32), Image.Resampling.NEAREST)
        shown = torch.from_numpy(np.array(tile)).permute(2, 0, 1)
    assert torch.equal(shown, batch[0][0])


def test_names_stand_above_the_rows(tmp_path: Path, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    result = reconstruct(model(norm_pix=False), *batch)
    result.write(tmp_path / "plain.png")
    result.write(tmp_path / "named.png", ["a.png", "x" * 5000, "\u202e\x00\udcff"])
    with Image.open(tmp_path / "plain.png") as plain, Image.open(tmp_path / "named.png") as named:
        assert named.width == plain.width
        assert named.height == plain.height + 3 * 14
        lines = [np.array(named)[20 + row * (14 + 128 + 6) :][:14] for row in range(3)]
        assert all((line < 128).any() for line in lines)
        assert (lines[1][:, -6:] == 255).all()  # the long one ends before the edge
        tile = np.array(named.crop((6, 34, 6 + 128, 34 + 128)).resize((32, 32), Image.Resampling.NEAREST))
    assert torch.equal(torch.from_numpy(tile).permute(2, 0, 1), batch[0][0])
