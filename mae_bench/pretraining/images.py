"""Pictures and mask noise for pre-training: uint8 up to the model, randomness per sample.

Augmentation as in FAIR's ``main_pretrain.py``: random resized crop (bicubic) and flip, nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from mae_bench.data.images import read_rgb
from mae_bench.engine.seeds import Stream, generator
from mae_bench.schema import PretrainingValues

BICUBIC = v2.InterpolationMode.BICUBIC
CACHE_BYTES = 256 << 20  # of decoded pictures, per split and process that loads it
VALIDATION_SEED = 0  # validation masks are the same for every run

Sample = tuple[Tensor, Tensor]  # picture (3,H,W) uint8, mask noise (N,)


class Pictures:
    """A split's pictures as uint8 (3,H,W) tensors at their stored size. A set that fits into ``CACHE_BYTES``, judged
    by its first picture, is kept once decoded; of a large one nothing is: a process would rarely meet it again."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = np.array([os.fsencode(path) for path in paths])  # one block that worker processes share
        self._kept: dict[int, Tensor] = {}
        self._room = CACHE_BYTES

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> str:
        return os.fsdecode(self._paths[index])

    def __getitem__(self, index: int) -> Tensor:
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        # Channels last in memory, as decoded: torchvision resizes that up to twice as fast, to the same pixels.
        picture = torch.from_numpy(np.array(read_rgb(Path(self.path(index))))).permute(2, 0, 1)
        if not self._kept and len(self) * picture.nbytes > CACHE_BYTES:
            self._room = 0
        if picture.nbytes <= self._room:
            self._room -= picture.nbytes
            self._kept[index] = picture
        return picture


class TrainingSamples:
    """Random crop, flip and noise from torch's global generator, which the engine seeds per (seed, epoch, index)."""

    def __init__(self, pictures: Pictures, size: int, patches: int, values: PretrainingValues) -> None:
        self.pictures = pictures
        self._crop = v2.RandomResizedCrop(size, scale=values.crop_scale, interpolation=BICUBIC)
        self._flip = v2.RandomHorizontalFlip() if values.flip else v2.Identity()
        self._patches = patches

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Sample:
        return self._flip(self._crop(self.pictures[index])), torch.rand(self._patches)


class ValidationSamples:
    """The centre square at the encoder's size, and noise that depends on the index alone."""

    def __init__(self, pictures: Pictures, size: int, patches: int) -> None:
        self.pictures = pictures
        self._fit = v2.Compose([v2.Resize(size, interpolation=BICUBIC), v2.CenterCrop(size)])
        self._patches = patches

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Sample:
        random = generator(Stream.SAMPLE, VALIDATION_SEED, 0, index)
        return self._fit(self.pictures[index]), torch.rand(self._patches, generator=random)


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """``inputs`` uint8 (B,3,H,W) and ``data_samples``, the noise, (B,N)."""
    pictures, noise = zip(*samples, strict=True)
    return {"inputs": torch.stack(pictures), "data_samples": torch.stack(noise)}
