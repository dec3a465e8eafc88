"""Pictures of a classification task: augmentation on the CPU up to uint8, the rest on the device (`adapter`).

Order and settings are timm's and FAIR's (`util/datasets.py`, `main_linprobe.py`): crop, flip, RandAugment or colour
jitter; evaluation resizes the shorter side and crops the centre. All resampling is Pillow's bicubic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import rand_augment_transform
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from mae_bench.data.decode import Oddities, inspect
from mae_bench.data.images import read_rgb
from mae_bench.data.sources import Source
from mae_bench.errors import UserError
from mae_bench.schema import ClassificationValues, Input

BICUBIC = v2.InterpolationMode.BICUBIC
RATIO = (3 / 4, 4 / 3)

Transform = Callable[[Image.Image], Image.Image]
Sample = tuple[torch.Tensor, int]


class Pictures:
    """Map-style data set of (uint8 image (3,H,W), class index)."""

    def __init__(self, source: Source, transform: Transform) -> None:
        self.source = source
        self.oddities = Oddities(len(source))
        self._transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        encoded = inspect(self.source.read(index), self.source.name(index))
        self.oddities.note(index, encoded.odd)
        image = self._transform(read_rgb(encoded.data, encoded.name))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), int(self.source.labels[index])


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """``inputs`` uint8 (B,3,H,W) and ``data_samples`` int64 (B,)."""
    return {
        "inputs": torch.stack([image for image, _ in samples]),
        "data_samples": torch.tensor([label for _, label in samples]),
    }


class OneShotCrop(v2.Transform):
    """Random area and aspect, cut down to the picture instead of drawn again (FAIR `util/crop.py`, after BYOL)."""

    def __init__(self, size: int, scale: tuple[float, float]) -> None:
        super().__init__()
        self.size = size
        self.scale = scale

    def make_params(self, flat_inputs: list[Any]) -> dict[str, int]:
        width, height = flat_inputs[0].size
        area = width * height * torch.empty(1).uniform_(*self.scale).item()
        aspect = math.exp(torch.empty(1).uniform_(math.log(RATIO[0]), math.log(RATIO[1])).item())
        w = min(round(math.sqrt(area * aspect)), width)
        h = min(round(math.sqrt(area / aspect)), height)
        top = int(torch.randint(height - h + 1, (1,)).item())
        left = int(torch.randint(width - w + 1, (1,)).item())
        return {"top": top, "left": left, "height": h, "width": w}

    def transform(self, inpt: Any, params: dict[str, int]) -> Any:
        return TF.resized_crop(inpt, **params, size=[self.size, self.size], interpolation=BICUBIC, antialias=True)


def training_transform(values: ClassificationValues, statistics: Input) -> Transform:
    """Augmentation of a training picture, drawn from the global generators."""
    size = values.image_size
    crop = (
        v2.RandomResizedCrop(size, scale=values.crop_scale, ratio=RATIO, interpolation=BICUBIC)
        if values.crop_retry
        else OneShotCrop(size, values.crop_scale)
    )
    steps: list[Any] = [crop]
    if values.flip:
        steps.append(v2.RandomHorizontalFlip())
    if values.randaug:
        steps.append(_rand_augment(values.randaug, size, statistics))
    if values.color_jitter:
        steps.append(v2.ColorJitter(values.color_jitter, values.color_jitter, values.color_jitter))
    transform: Transform = v2.Compose(steps)
    return transform


def _rand_augment(config: str, size: int, statistics: Input) -> Any:
    settings = {
        "translate_const": int(size * 0.45),
        "img_mean": tuple(min(255, round(255 * mean)) for mean in statistics.mean),
        "interpolation": Image.Resampling.BICUBIC,
    }
    try:
        augment = rand_augment_transform(config, settings)
    except (AssertionError, ValueError, KeyError) as error:
        raise UserError(f"randaug '{config}' is not timm's notation, e.g. rand-m9-mstd0.5-inc1") from error
    for op in augment.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = _posterize
    return augment


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm's posterize, which at the largest magnitude keeps 0 bits: black, but an error since Pillow 13."""
    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def evaluation_transform(values: ClassificationValues) -> Transform:
    """Shorter side to image_size / eval_crop, then the centre square of image_size."""
    size = values.image_size
    transform: Transform = v2.Compose(
        [v2.Resize(round(size / values.eval_crop), interpolation=BICUBIC), v2.CenterCrop(size)]
    )
    return transform
