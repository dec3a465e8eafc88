"""Decoding pictures: one policy for every pipeline that reads them through Pillow.

The content decides, not the suffix (ImageNet holds a PNG named ``.JPEG`` and CMYK JPEGs). The raster is taken as
stored: no rotation by EXIF, as in the published ImageNet protocols. Transparency is dropped. A picture that does not
decode stops the run: skipping it would change the data set in silence.
"""

from __future__ import annotations

import struct
from pathlib import Path

from PIL import Image

from mae_bench.errors import UserError

MAX_PIXELS = 89_478_485  # above this Pillow warns of a decompression bomb
POLICY = "pictures are never skipped: repair the file, or remove it on purpose"
# What Pillow raises on files that it cannot read.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


def read_rgb(path: Path) -> Image.Image:
    """Decode one picture to 8-bit RGB at its stored size. Undecodable: ``UserError`` with the path and the policy."""
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UserError(f"{path} has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; {POLICY}")
            if image.mode.startswith(("I", "F")):
                raise UserError(f"{path} is not an 8-bit picture (mode {image.mode}); convert it to 8 bits per channel")
            if image.mode == "P" and "transparency" in image.info:
                return image.convert("RGBA").convert("RGB")
            return image.convert("RGB")
    except BROKEN as error:
        raise UserError(f"cannot decode picture {path}: {error}; {POLICY}") from error


def header(path: Path) -> tuple[tuple[int, int], int]:
    """(width, height) as stored, and the EXIF orientation: 1 = upright, 5 and above swap the sides. Decodes nothing."""
    try:
        with Image.open(path) as image:
            orientation = image.getexif().get(0x0112)
            return image.size, orientation if isinstance(orientation, int) else 1
    except BROKEN as error:
        raise UserError(f"cannot decode picture {path}: {error}; {POLICY}") from error
