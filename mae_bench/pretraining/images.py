"""Pictures and mask noise for pre-training: uint8 up to the model, randomness per sample.

Augmentation as in FAIR's ``main_pretrain.py`` (random resized crop, bicubic, and flip), and what He et al., arXiv
2111.06377, compare it with (Table 1e).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from mae_bench.data.decode import Box, Encoded, Oddities, crop, inspect, read_crop, read_picture
from mae_bench.data.sources import Source
from mae_bench.encoders.positions import Grid
from mae_bench.engine.seeds import Stream, generator
from mae_bench.errors import UserError
from mae_bench.pretraining import sampling
from mae_bench.pretraining.masking import keep_count
from mae_bench.schema import PretrainingValues

CACHE_BYTES = 256 << 20  # of decoded pictures, per split and process that loads it
VALIDATION_SEED = 0  # validation masks are the same for every run
CROP_ASPECTS = (3 / 4, 4 / 3)  # of a random-size crop, before it is resized to a square; torchvision's own
MARGIN = 256 / 224  # side that a picture is resized to, over the side of the fixed-size crop

# Picture (3,H,W) uint8, mask noise (N,), and where the objective draws more than a mask: `extra`, float32.
Sample = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
Transform = Callable[[Tensor], Tensor]


class Pictures:
    """A split's pictures as uint8 (3,H,W) tensors at their stored size. A set that fits into ``CACHE_BYTES``, judged
    by its first picture, is kept once decoded; of a large one nothing is: a process would rarely meet it again."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.oddities = Oddities(len(source))
        self._kept: dict[int, Tensor] = {}
        self._room = CACHE_BYTES

    def __len__(self) -> int:
        return len(self._source)

    def name(self, index: int) -> str:
        return self._source.name(index)

    def encoded(self, index: int) -> Encoded:
        """A picture's file, of which the header alone has been read."""
        encoded = inspect(self._source.read(index), self.name(index))
        self.oddities.note(index, encoded.odd)
        return encoded

    def __getitem__(self, index: int) -> Tensor:
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        picture = read_picture(self.encoded(index))
        if not self._kept and len(self) * picture.nbytes > CACHE_BYTES:
            self._room = 0
        if picture.nbytes <= self._room:
            self._room -= picture.nbytes
            self._kept[index] = picture
        return picture


class TrainingSamples:
    """Crop, flip, colour jitter, mask noise and ``extra``, in this order, from torch's global generator, which the
    engine seeds per (seed, epoch, index).

    With ``repeats`` an epoch has that many samples of each picture, with crops and masks of their own: sample ``index``
    shows picture ``index // repeats``, which is decoded once for samples that come one after the other (repeated
    sampling: Feichtenhofer et al., arXiv 2205.09113; Hoffer et al., arXiv 1901.09335).
    """

    def __init__(self, pictures: Pictures, grid: Grid, patch: int, values: PretrainingValues) -> None:
        self.pictures = pictures
        self.repeats = values.repeats
        self._augment = augmentation(values, _size(grid, patch))
        self._noise = Noise(grid, patch, values)
        # Scaled decoding depends on the crop: what is kept decoded is of no use to it.
        self._read: Callable[[int], Any] = pictures.encoded if values.scaled_decode else pictures.__getitem__
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.pictures) * self.repeats

    def name(self, index: int) -> str:
        return self.pictures.name(index // self.repeats)

    def __getitem__(self, index: int) -> Sample:
        picture = self._picture(index // self.repeats)
        for transform in self._augment:
            picture = transform(picture)
        return picture, *self._noise()

    def _picture(self, number: int) -> Any:
        if self.repeats == 1:
            return self._read(number)
        if self._last is None or self._last[0] != number:
            self._last = number, self._read(number)
        return self._last[1]


class ValidationSamples:
    """The centre of each picture at the training size, and noise that depends on the index alone."""

    def __init__(self, pictures: Pictures, grid: Grid, patch: int, values: PretrainingValues) -> None:
        self.pictures = pictures
        size = _size(grid, patch)
        self._fit = v2.Compose([partial(cover, size=size), v2.CenterCrop(size)])
        self._noise = Noise(grid, patch, values)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Sample:
        random = generator(Stream.SAMPLE, VALIDATION_SEED, 0, index)
        return self._fit(self.pictures[index]), *self._noise(random)


class Noise:
    """What a sample draws beside its crop: mask noise (N,), and ``extra`` where the objective has more to draw.

    ``extra`` is, for "denoising", (4,H,W): three channels N(0,1) and one uniform in [0, 1); for "vae" N(0,1), one row a
    patch: (N,latent).
    """

    def __init__(self, grid: Grid, patch: int, values: PretrainingValues) -> None:
        patches = grid[0] * grid[1]
        self._values = values
        self._grid, self._size = grid, _size(grid, patch)
        self._keep = keep_count(patches, values.mask_ratio) if values.objective == "masked" else patches
        if values.sampling == "grid":
            sampling.grid_step(grid, self._keep)  # refused before anything is decoded

    def __call__(self, random: torch.Generator | None = None) -> tuple[Tensor] | tuple[Tensor, Tensor]:
        values = self._values
        noise = sampling.noise(values.sampling, self._grid, self._keep, random)
        if values.objective == "denoising":
            normal = torch.randn(3, *self._size, generator=random)
            return noise, torch.cat([normal, torch.rand(1, *self._size, generator=random)])
        if values.objective == "vae":
            return noise, torch.randn(len(noise), values.latent, generator=random)
        return (noise,)


def augmentation(values: PretrainingValues, size: tuple[int, int]) -> list[Callable[[Any], Tensor]]:
    """Crop to ``size`` (H, W), flip and colour jitter, as Table 1e of He et al. varies them.

    random_size: an area in ``crop_scale`` of the picture, resized; the aspects of the area are torchvision's, times
    that of ``size``. fixed_size: the picture is resized until it covers 256/224 of ``size`` and a crop is drawn.
    centre: the crop in the middle of the same. The paper's "none" is centre without flip; its crops have the flip. It
    states neither the size before a fixed-size or centre crop (256 for 224 is ImageNet's usual one) nor the strength of
    its colour jitter: here brightness, contrast and saturation change by factors within 1 ± ``color_jitter``, in random
    order, for every sample, and the hue stays.

    The first transform takes a picture (3,H,W), or an ``Encoded`` one under ``scaled_decode``.

    Raises:
        UserError: ``crop_scale`` or ``scaled_decode`` is set and ``crop`` does not read it.
    """
    default = PretrainingValues.model_fields["crop_scale"].default
    if values.crop != "random_size" and values.crop_scale != default:
        raise UserError(
            f"crop '{values.crop}' does not read crop_scale; leave it out, or undo the recipe's: "
            f"--set crop_scale={list(default)}"
        )
    if values.crop != "random_size" and values.scaled_decode:
        raise UserError(f"crop '{values.crop}' does not read scaled_decode, crop 'random_size' does; leave it out")
    transforms = [_crop(values, size)]
    if values.flip:
        transforms.append(_flip)
    if values.color_jitter:
        transforms.append(v2.ColorJitter(*[values.color_jitter] * 3))
    return transforms


def _crop(values: PretrainingValues, size: tuple[int, int]) -> Callable[[Any], Tensor]:
    height, width = size
    if values.crop == "random_size":
        aspects = [aspect * (width / height) for aspect in CROP_ASPECTS]
        cut = _random_size_scaled if values.scaled_decode else _random_size
        return partial(cut, draw=v2.RandomResizedCrop(size, values.crop_scale, aspects), size=size)
    enlarged = round(height * MARGIN), round(width * MARGIN)
    window = v2.RandomCrop(size) if values.crop == "fixed_size" else v2.CenterCrop(size)
    return v2.Compose([partial(cover, size=enlarged), window])  # type: ignore[no-any-return]


def _random_size(picture: Tensor, draw: v2.RandomResizedCrop, size: tuple[int, int]) -> Tensor:
    """torchvision's random box and, up to twice as fast, its pixels."""
    return crop(picture, _box(draw, picture), size)


def _random_size_scaled(encoded: Encoded, draw: v2.RandomResizedCrop, size: tuple[int, int]) -> Tensor:
    """The same box, of a picture that is decoded no larger than the crop needs."""
    raster = torch.empty(3, encoded.height, encoded.width, device="meta")  # only its shape is looked at
    return read_crop(encoded, _box(draw, raster), size, scaled=True)


def _box(draw: v2.RandomResizedCrop, picture: Tensor) -> Box:
    box = draw.make_params([picture])
    return box["top"], box["left"], box["height"], box["width"]


def _flip(picture: Tensor) -> Tensor:
    return picture.flip(-1) if torch.rand(1) < 0.5 else picture


def cover(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize to the smallest picture of the same shape that covers ``size`` (H, W); of a square, its shorter side."""
    (height, width), (rows, columns) = picture.shape[-2:], size
    if height * columns <= width * rows:
        columns = int(rows * width / height)
    else:
        rows = int(columns * height / width)
    return crop(picture, (0, 0, height, width), (rows, columns))


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """``inputs`` uint8 (B,3,H,W), ``data_samples``, the noise, (B,N), and ``extra`` (B,...) where samples have it."""
    pictures, noise, *extra = zip(*samples, strict=True)
    # Channels last in memory, as crops come: they are copied in one piece, and patches are cut from that faster.
    inputs = torch.stack([picture.permute(1, 2, 0) for picture in pictures]).permute(0, 3, 1, 2)
    batch = {"inputs": inputs, "data_samples": torch.stack(noise)}
    if extra:
        batch["extra"] = torch.stack(extra[0])
    return batch


def _size(grid: Grid, patch: int) -> tuple[int, int]:
    """Height and width in pixels."""
    return grid[0] * patch, grid[1] * patch
