"""From the bytes of a picture to uint8 tensors: the fast path of the input pipelines.

Common JPEGs are decoded by OpenCV, everything else by Pillow; both use libjpeg-turbo and give the same pixels. The crop
is copied channels last before it is resampled, which torch's antialiased uint8 kernels read twice as fast. Floats and
normalisation are left to the device. Policy and figures: docs/input.md.

    encoded = inspect(data, name)                    # size and oddities; nothing is decoded
    sample = read_crop(encoded, box, 224, flip=True)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mae_bench.data import jpeg
from mae_bench.data.images import ODD, Odd, check_pixels, examine, read_rgb, suffix_oddity

Box = tuple[int, int, int, int]  # top, left, height, width in pixels of the stored raster
Size = int | tuple[int, int]  # side, or (height, width)
Interpolation = Literal["bicubic", "bilinear"]
RGB_AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
END = b"\xff\xd9"  # of a JPEG
SCALES = (8, 4, 2, 1)  # by which libjpeg can divide a picture while it decodes


@dataclass(frozen=True, slots=True)
class Encoded:
    """A picture file whose header has been read: ``height`` and ``width`` in pixels as stored."""

    data: bytes = field(repr=False)
    name: str
    height: int
    width: int
    odd: Odd
    common_jpeg: bool  # 8-bit grey or colour JPEG with Huffman codes, baseline or progressive


def inspect(data: bytes, name: str) -> Encoded:
    """Read the header of a picture. Not a picture, or more than ``MAX_PIXELS``: ``UserError`` with ``name``."""
    frame = jpeg.parse(data)
    if frame is None or not frame.common or frame.components not in (1, 3):
        (width, height), odd = examine(data, name)
        return Encoded(data, name, height, width, odd, common_jpeg=False)
    check_pixels(frame.width, frame.height, name)
    odd = suffix_oddity(name, "JPEG")
    if frame.components == 1:
        odd |= Odd.GREY
    if frame.orientation != 1:
        odd |= Odd.ROTATED
    return Encoded(data, name, frame.height, frame.width, odd, common_jpeg=True)


def read_picture(encoded: Encoded) -> Tensor:
    """(3,H,W) uint8, channels last in memory. Undecodable: ``UserError`` with the name and the policy."""
    if encoded.common_jpeg and encoded.data.endswith(END):  # some releases of OpenCV complete a file that is cut off
        pixels = cv2.imdecode(np.frombuffer(encoded.data, np.uint8), RGB_AS_STORED)
        if pixels is not None:
            return torch.from_numpy(pixels).permute(2, 0, 1)
        # Pillow reads it after all, or says what is wrong.
    return _tensor(read_rgb(encoded.data, encoded.name))


def crop(
    picture: Tensor, box: Box, size: Size, *, flip: bool = False, interpolation: Interpolation = "bicubic"
) -> Tensor:
    """Cut ``box`` out of a picture (3,H,W) and resample it to ``size``, antialiased: (3,h,w) uint8.

    torchvision's ``resized_crop`` bit for bit, and Pillow's but for rounding: photos differ in one value of thirty, by
    one grey level. The result is channels last in memory, and such samples stack fastest as (B,h,w,3). A box that
    leaves the picture is a ``ValueError``.
    """
    top, left, height, width = box
    if not (0 <= top < top + height <= picture.shape[1] and 0 <= left < left + width <= picture.shape[2]):
        raise ValueError(f"box {box} leaves the picture of {picture.shape[1]} x {picture.shape[2]} pixels")
    part = picture[None, :, top : top + height, left : left + width].contiguous(memory_format=torch.channels_last)
    part = F.interpolate(part, size, mode=interpolation, antialias=True)[0]
    return part.flip(-1) if flip else part


def read_crop(
    encoded: Encoded,
    box: Box,
    size: Size,
    *,
    flip: bool = False,
    interpolation: Interpolation = "bicubic",
    scaled: bool = False,
) -> Tensor:
    """Decode a picture and ``crop`` it.

    ``scaled`` is the inexact option for large photos: a JPEG is decoded at the smallest of 1/2, 1/4 and 1/8 of its size
    at which the box still has the pixels of the result, and the box is rounded to that raster. Other pixels, so another
    protocol (docs/input.md has the difference).
    """
    factor = _factor(box, size) if scaled and encoded.common_jpeg else 1
    if factor == 1:
        return crop(read_picture(encoded), box, size, flip=flip, interpolation=interpolation)
    smaller = read_rgb(encoded.data, encoded.name, draft=(encoded.width // factor, encoded.height // factor))
    box = _divided(box, factor)
    return crop(_tensor(smaller), box, size, flip=flip, interpolation=interpolation)


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _factor(box: Box, size: Size) -> int:
    """Largest of 1, 2, 4 and 8 by which the box's sides can be divided and are not below the result's."""
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < SCALES[0]:  # Pillow derives the scale from the smaller size, which needs that many pixels
        return 1
    room = max(1, min(box[2] // height, box[3] // width))
    return next(scale for scale in SCALES if scale <= room)


def _divided(box: Box, factor: int) -> Box:
    """The box on a raster that is ``factor`` times coarser, its edges rounded to whole pixels there."""
    top, left, height, width = box
    first, last = round(top / factor), round((top + height) / factor)
    start, end = round(left / factor), round((left + width) / factor)
    return first, start, last - first, end - start


class Oddities:
    """Which pictures of a set were found odd, one byte each, in memory that data workers share.

    A flag is set however often, and by whichever process, its picture is read: the counts are of files, not of reads.
    """

    def __init__(self, pictures: int) -> None:
        self.flags = torch.zeros(pictures, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]

    def note(self, index: int, odd: Odd) -> None:
        if odd:
            self.flags[index] |= int(odd)

    def counts(self) -> dict[str, int]:
        """Pictures of each kind met so far, in words, without those that were not met."""
        counts = {words: int((self.flags & int(odd)).count_nonzero()) for odd, words in ODD.items()}
        return {words: count for words, count in counts.items() if count}

    def text(self) -> str:
        """Words for a record, such as ``3 grey (…), 1 CMYK (…)``; empty when there were none."""
        return ", ".join(f"{count} {words}" for words, count in self.counts().items())
