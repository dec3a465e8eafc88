"""From JPEG files to a batch on one core: torchvision's Pillow pipeline, torchvision v2 on uint8, and `mae_bench.data`.

    python benchmarks/input.py [FOLDER OF PHOTOS]

The photos are cut to 4:3 and saved at 500 x 375 and 1600 x 1200, quality 90, 4:2:0; without a folder, noise with the
spectrum of photos stands in for them. All paths read the same files and draw the same crops and flips. Times are CPU
seconds of the whole process; ratios are medians of 9 in the order A B B A, with their range.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

from mae_bench.data.decode import Interpolation, inspect, read_crop
from mae_bench.data.folders import is_picture
from mae_bench.data.images import read_bytes

PAIRS = 9
SIZE = 224
ASPECTS = (3 / 4, 4 / 3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Scale = tuple[float, float]
Read = Callable[[Path], Tensor]


def pillow(scale: Scale, how: Interpolation, *last: Callable[[object], object]) -> Read:
    """torchvision's classification reference: everything on Pillow images, then ``last``."""
    crop = v1.RandomResizedCrop(SIZE, scale, ASPECTS, v1.InterpolationMode(how))
    transform = v1.Compose([crop, v1.RandomHorizontalFlip(), *last])

    def read(path: Path) -> Tensor:
        with Image.open(path) as image:
            return transform(image.convert("RGB"))

    return read


def uint8(scale: Scale, how: Interpolation) -> Read:
    """Pillow's picture as a uint8 tensor, then torchvision v2."""
    crop = v2.RandomResizedCrop(SIZE, scale, ASPECTS, v2.InterpolationMode(how))
    transform = v2.Compose([crop, v2.RandomHorizontalFlip()])

    def read(path: Path) -> Tensor:
        with Image.open(path) as image:
            return transform(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))

    return read


def ours(scale: Scale, how: Interpolation, *, scaled: bool = False) -> Read:
    def read(path: Path) -> Tensor:
        encoded = inspect(read_bytes(path), str(path))
        raster = torch.empty(1).expand(3, encoded.height, encoded.width)  # only its shape is looked at
        box = v1.RandomResizedCrop.get_params(raster, list(scale), list(ASPECTS))
        flip = bool(torch.rand(1) < 0.5)
        return read_crop(encoded, box, SIZE, flip=flip, interpolation=how, scaled=scaled)

    return read


def batch(read: Read, paths: Sequence[Path]) -> Tensor:
    """Samples stacked in the layout that they have in memory."""
    torch.manual_seed(0)
    samples = [read(path) for path in paths]
    if samples[0].stride(0) == 1:
        return torch.stack([sample.permute(1, 2, 0) for sample in samples]).permute(0, 3, 1, 2)
    return torch.stack(samples)


def seconds(read: Read, paths: Sequence[Path]) -> float:
    start = time.process_time()
    batch(read, paths)
    return time.process_time() - start


def compare(title: str, a: Read, others: dict[str, Read], paths: Sequence[Path]) -> None:
    """Print the speed of ``a``, and of every other one beside it."""
    print(title)
    for name, b in others.items():
        seconds(a, paths), seconds(b, paths)  # warm-up
        ratios, times_a, times_b = [], [], []
        for _ in range(PAIRS):
            first, second, third, fourth = (seconds(read, paths) for read in (a, b, b, a))
            ratios.append((second + third) / (first + fourth))
            times_a += [first, fourth]
            times_b += [second, third]
        ratios.sort()
        slow, fast = (len(paths) / statistics.median(times) for times in (times_b, times_a))
        print(
            f"  {name:36} {slow:6.0f} images/s, ours {fast:6.0f}: {statistics.median(ratios):.2f} x "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def difference(a: Read, b: Read, paths: Sequence[Path]) -> str:
    apart = (batch(a, paths).int() - batch(b, paths).int()).abs()
    return f"mean {apart.float().mean():.4f}, largest {int(apart.max())} of 255"


def photos(folder: Path | None, count: int) -> list[Image.Image]:
    """4:3 pictures: the largest centre part of photos, or noise whose amplitude falls with frequency."""
    if folder is not None:
        names = sorted(path for path in folder.rglob("*") if is_picture(path.name))[:count]
        cuts = []
        for image in (Image.open(name).convert("RGB") for name in names):
            width = min(image.width, image.height * 4 // 3)
            height, left = width * 3 // 4, (image.width - width) // 2
            cuts.append(image.crop((left, 0, left + width, height)))
        return cuts
    random = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(1200)[:, None], np.fft.fftfreq(1600))[..., None] + 1 / 1600
    made = []
    for _ in range(min(count, 16)):
        noise = np.fft.fft2(random.normal(size=(1200, 1600, 3)), axes=(0, 1))
        waves = np.fft.ifft2(noise / frequency, axes=(0, 1)).real
        made.append(Image.fromarray((127 + 50 * waves / waves.std()).clip(0, 255).astype(np.uint8)))
    return made


def write(pictures: Sequence[Image.Image], size: tuple[int, int], folder: Path) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{number:03d}.jpg" for number in range(len(pictures))]
    for picture, path in zip(pictures, paths, strict=True):
        picture.resize(size, Image.Resampling.BICUBIC).save(path, quality=90, subsampling="4:2:0")
    average = statistics.mean(path.stat().st_size for path in paths) / 1000
    print(f"{len(paths)} JPEGs of {size[0]} x {size[1]} pixels, quality 90, 4:2:0, {average:.0f} kB on average")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="photos, also in folders of folders")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    floats = (v1.ToTensor(), v1.Normalize(MEAN, STD))
    with tempfile.TemporaryDirectory() as temporary:
        small = write(photos(folder, 64), (500, 375), Path(temporary) / "small")
        large = write(photos(folder, 16), (1600, 1200), Path(temporary) / "large")
        cases: tuple[tuple[str, Scale, Interpolation], ...] = (
            ("500 x 375, MAE's crops (bicubic, 0.2 to 1 of the area)", (0.2, 1.0), "bicubic"),
            ("500 x 375, torchvision's defaults (bilinear, 0.08 to 1)", (0.08, 1.0), "bilinear"),
        )
        for title, scale, how in cases:
            others = {
                "torchvision, Pillow, float32": pillow(scale, how, *floats),
                "torchvision v2, uint8": uint8(scale, how),
            }
            compare(title, ours(scale, how), others, small)
            apart = difference(ours(scale, how), pillow(scale, how, v1.PILToTensor()), small)
            print(f"  difference from Pillow's pixels: {apart}")
        mae = partial(ours, *cases[0][1:])
        others = {"torchvision, Pillow, float32": pillow(*cases[0][1:], *floats), "ours, exact": mae()}
        compare("1600 x 1200, MAE's crops, scaled decoding", mae(scaled=True), others, large)
        reference = pillow(*cases[0][1:], v1.PILToTensor())
        print(f"  difference from Pillow's pixels: scaled {difference(mae(scaled=True), reference, large)}")
        print(f"  {'':32} exact  {difference(mae(), reference, large)}")


if __name__ == "__main__":
    main()
