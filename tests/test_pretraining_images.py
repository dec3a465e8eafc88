"""Samples for pre-training: FAIR's by default to the bit, Table 1e's crops, non-square sizes, repeats, and `extra`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from mae_bench.data.sources import Files
from mae_bench.engine.samplers import SeededDataset
from mae_bench.engine.seeds import Stream, generator
from mae_bench.errors import UserError
from mae_bench.pretraining import images
from mae_bench.pretraining.images import Pictures, Sample, TrainingSamples, ValidationSamples, collate, cover
from mae_bench.pretraining.masking import Masking
from mae_bench.recipes import load_backbone, resolve_task
from mae_bench.schema import PretrainingValues

GRID, PATCH = (8, 8), 4
BICUBIC = v2.InterpolationMode.BICUBIC


def values(*settings: str) -> PretrainingValues:
    resolved = resolve_task("imagenet_pretrain", load_backbone("vit_b_mae"), list(settings)).values
    assert isinstance(resolved, PretrainingValues)
    return resolved


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    """Noise, smoothed, of 60 x 44, 44 x 60 and 48 x 48 pixels."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    paths = []
    for number, (width, height) in enumerate([(60, 44), (44, 60), (48, 48)]):
        coarse = Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        paths.append(folder / f"{number}.png")
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(paths[-1])
    return Pictures(Files(paths))


def training(pictures: Pictures, *settings: str, grid: tuple[int, int] = GRID) -> TrainingSamples:
    return TrainingSamples(pictures, grid, PATCH, values(*settings))


def drawn(samples: TrainingSamples, index: int, seed: int = 0) -> Sample:
    torch.manual_seed(seed)
    return samples[index]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_default_is_fairs_pipeline_to_the_bit(pictures: Pictures, index: int) -> None:
    picture, noise = drawn(training(pictures), index)
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(32, scale=(0.2, 1.0), interpolation=BICUBIC)
    assert torch.equal(picture, v2.RandomHorizontalFlip()(crop(pictures[index])))
    assert torch.equal(noise, torch.rand(64))
    centre = v2.Compose([v2.Resize(32, interpolation=BICUBIC), v2.CenterCrop(32)])
    picture, noise = ValidationSamples(pictures, GRID, PATCH, values())[index]
    assert torch.equal(picture, centre(pictures[index]))
    assert torch.equal(noise, torch.rand(64, generator=generator(Stream.SAMPLE, 0, 0, index)))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_fixed_size_and_centre_crops_are_cut_from_one_resized_picture(pictures: Pictures, index: int) -> None:
    resized = v2.Resize(37, interpolation=BICUBIC)(pictures[index])  # 32 * 256 / 224 = 36.6
    torch.manual_seed(5)
    expected = v2.RandomCrop(32)(resized)
    assert torch.equal(drawn(training(pictures, "crop=fixed_size", "flip=false"), index, 5)[0], expected)
    plain = training(pictures, "crop=centre", "flip=false")
    assert torch.equal(drawn(plain, index, 5)[0], v2.CenterCrop(32)(resized))
    assert torch.equal(drawn(plain, index, 6)[0], drawn(plain, index, 5)[0])  # the paper's "none": nothing is random
    mirrored = [drawn(training(pictures, "crop=centre"), index, seed)[0] for seed in range(8)]
    assert {torch.equal(one, drawn(plain, index)[0]) for one in mirrored} == {True, False}


def test_colour_jitter_comes_after_the_crop_and_changes_no_mask(pictures: Pictures) -> None:
    plain, noise = drawn(training(pictures, "crop=centre", "flip=false"), 0)
    samples = training(pictures, "crop=centre", "flip=false", "color_jitter=0.4")
    jittered = [drawn(samples, 0, seed)[0] for seed in range(20)]
    assert len({picture.numpy().tobytes() for picture in jittered}) == 20
    assert jittered[0].dtype == torch.uint8
    torch.manual_seed(0)
    assert torch.equal(jittered[0], v2.ColorJitter(0.4, 0.4, 0.4)(plain))
    # A grey picture has no hue or saturation to change; brightness and contrast move it as a whole.
    grey = torch.full((3, 32, 32), 128, dtype=torch.uint8)
    out = samples._augment[-1](grey)
    assert (out == out[0, 0, 0]).all() and 0.6 * 0.6 * 127 < out[0, 0, 0] < 1.4 * 1.4 * 129
    assert noise.shape == (64,)


@pytest.mark.parametrize("crop", ["random_size", "fixed_size", "centre"])
def test_pictures_need_not_be_square(pictures: Pictures, crop: str) -> None:
    samples = training(pictures, f"crop={crop}", grid=(4, 10))
    for index in range(3):
        picture, noise = drawn(samples, index)
        assert picture.shape == (3, 16, 40) and noise.shape == (40,)
    picture, noise = ValidationSamples(pictures, (4, 10), PATCH, values())[1]
    assert picture.shape == (3, 16, 40) and noise.shape == (40,)


def test_a_crop_is_stretched_no_more_for_a_wide_picture_than_for_a_square() -> None:
    """Areas of a large ramp: the number of its columns per row that a crop shows, over the picture's own shape."""
    ramp = torch.arange(400).expand(400, 400)
    both = torch.stack([ramp, ramp.T, 0 * ramp]).float()
    crop = images._crop(values("crop_scale=[0.1, 0.2]"), (16, 40))
    stretched = []
    for seed in range(50):
        torch.manual_seed(seed)
        out = crop(both)
        columns, rows = (out[0, 0, -1] - out[0, 0, 0]) / 39, (out[1, -1, 0] - out[1, 0, 0]) / 15
        stretched.append(float(columns / rows))
    assert 0.7 < min(stretched) < 0.85 and 1.2 < max(stretched) < 1.42


@given(st.integers(5, 60), st.integers(5, 60), st.integers(4, 40), st.integers(4, 40))
def test_cover_is_the_smallest_picture_of_the_same_shape(height: int, width: int, rows: int, columns: int) -> None:
    picture = torch.zeros(3, height, width, dtype=torch.uint8)
    out = cover(picture, (rows, columns)).shape[1:]
    assert out[0] >= rows and out[1] >= columns and (out[0] == rows or out[1] == columns)
    assert abs(out[0] * width - out[1] * height) <= max(height, width)  # the shape, up to a pixel
    if rows == columns:
        assert out == v2.Resize(rows)(picture).shape[1:]


@pytest.mark.parametrize("side", [17, 32, 48, 90])
def test_cover_of_a_square_has_torchvisions_pixels(pictures: Pictures, side: int) -> None:
    for index in range(3):
        assert torch.equal(
            cover(pictures[index], (side, side)), v2.Resize(side, interpolation=BICUBIC)(pictures[index])
        )


@pytest.mark.parametrize("crop", ["fixed_size", "centre"])
def test_a_crop_scale_that_nothing_reads_is_refused(pictures: Pictures, crop: str) -> None:
    with pytest.raises(UserError, match=rf"crop '{crop}' does not read crop_scale.*--set crop_scale=\[0.2, 1.0\]"):
        training(pictures, f"crop={crop}", "crop_scale=[0.5, 1.0]")


def test_repeats_are_crops_and_masks_of_their_own_of_one_decoded_picture(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = Pictures.__getitem__
    monkeypatch.setattr(Pictures, "__getitem__", lambda self, index: read.append(index) or original(self, index))
    samples = SeededDataset(training(pictures, "repeats=3"), seed=0)
    assert len(samples) == 9
    made = [samples[0, index] for index in range(9)]
    assert read == [0, 1, 2]
    assert len({picture.numpy().tobytes() for picture, _ in made}) == 9
    assert len({noise.numpy().tobytes() for _, noise in made}) == 9
    # The same sample in any order, and the pictures are the right ones.
    assert all(torch.equal(a, b) for a, b in zip(samples[0, 5], made[5], strict=True))
    still = training(pictures, "repeats=3", "crop=centre", "flip=false")
    once = training(pictures, "crop=centre", "flip=false")
    assert all(torch.equal(still[index][0], once[index // 3][0]) for index in range(9))
    assert [still.name(index) for index in (0, 2, 3, 8)] == [pictures.name(number) for number in (0, 0, 1, 2)]


@pytest.mark.parametrize(("sampling", "ratio"), [("block", 0.75), ("block", 0.5), ("grid", 0.75)])
def test_samples_have_the_masks_of_their_sampling(pictures: Pictures, sampling: str, ratio: float) -> None:
    settings = (f"sampling={sampling}", f"mask_ratio={ratio}")
    keep = int(64 * (1 - ratio))
    validation = ValidationSamples(pictures, GRID, PATCH, values(*settings))
    first, again = validation[0][1], validation[0][1]
    assert torch.equal(first, again) and not torch.equal(first, validation[1][1])
    for noise in (first, drawn(training(pictures, *settings), 0)[1]):
        assert (noise >= 1).sum() == 64 - keep
        assert Masking.from_noise(noise[None], keep).mask.view(-1)[noise >= 1].all()


def test_a_grid_that_does_not_fit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UserError, match=r"set mask_ratio to 0\.75 \(keeps 16\)"):
        training(Pictures(Files([Path("nowhere.png")])), "sampling=grid", "mask_ratio=0.6")


def test_extra_is_what_the_objective_draws(pictures: Pictures) -> None:
    whole = ("mask_ratio=0.0", "loss_on=all")
    plain = drawn(training(pictures, "objective=autoencoder", *whole), 0)
    assert len(plain) == 2
    picture, noise, extra = drawn(training(pictures, "objective=denoising", "noise=0.5", *whole), 0)
    assert torch.equal(picture, plain[0]) and torch.equal(noise, plain[1])
    assert extra.shape == (4, 32, 32) and extra.dtype == torch.float32
    assert abs(float(extra[:3].mean())) < 0.1 and 0.9 < float(extra[:3].std()) < 1.1
    assert 0 <= float(extra[3].min()) < 0.01 and 0.99 < float(extra[3].max()) < 1
    settings = ("objective=vae", "latent=6", "kl_weight=0.1", *whole)
    code = drawn(training(pictures, *settings), 0)[2]
    assert code.shape == (64, 6) and 0.8 < float(code.std()) < 1.2
    validation = ValidationSamples(pictures, GRID, PATCH, values(*settings))
    torch.manual_seed(9)
    assert all(torch.equal(a, b) for a, b in zip(validation[0], validation[0], strict=True))
    assert not torch.equal(validation[0][2], validation[1][2])
    batch = collate([validation[0], validation[1]])
    assert batch["extra"].shape == (2, 64, 6)
    assert torch.equal(batch["inputs"], torch.stack([validation[0][0], validation[1][0]]))
    assert list(collate([plain, plain])) == ["inputs", "data_samples"]


def large_jpegs(folder: Path) -> Pictures:
    """The smooth noise of ``pictures`` at 240 x 176, 176 x 240 and 60 x 60, the last one too small to be divided."""
    random = np.random.default_rng(1)
    paths = []
    for number, size in enumerate([(240, 176), (176, 240), (60, 60)]):
        coarse = Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        paths.append(folder / f"{number}.jpg")
        coarse.resize(size, Image.Resampling.BICUBIC).save(paths[-1], quality=95)
    return Pictures(Files(paths))


def test_scaled_decoding_takes_the_same_crops_of_other_pixels(tmp_path: Path) -> None:
    settings = ("crop_scale=[0.3, 1.0]",)
    pictures = large_jpegs(tmp_path)
    exact, scaled = training(pictures, *settings), training(pictures, *settings, "scaled_decode=true")
    pictures[0]  # that it is kept decoded is of no account
    for index in range(3):
        (ours, noise), (other, same) = drawn(exact, index), drawn(scaled, index)
        assert torch.equal(noise, same)
        apart = (ours.int() - other.int()).abs().float().mean()
        assert apart == 0 if index == 2 else 0 < apart < 6
        assert torch.equal(drawn(scaled, index)[0], other)
    several = training(pictures, *settings, "scaled_decode=true", "repeats=2")
    assert torch.equal(drawn(several, 1)[0], drawn(scaled, 0)[0])


def test_scaled_decoding_is_another_protocol_and_needs_its_crop(pictures: Pictures) -> None:
    backbone = load_backbone("vit_b_mae")
    published = resolve_task("imagenet_pretrain", backbone)
    assert "scaled_decode" not in published.values.model_dump()
    other = resolve_task("imagenet_pretrain", backbone, ["scaled_decode=true"])
    assert other.protocol.startswith(f"{published.protocol}+set:")
    with pytest.raises(UserError, match="crop 'centre' does not read scaled_decode"):
        training(pictures, "crop=centre", "scaled_decode=true")
