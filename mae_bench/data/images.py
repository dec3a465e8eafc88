"""Pictures by one policy, whichever pipeline reads them: the table in docs/input.md.

The content decides, not the suffix (ImageNet holds a PNG named ``.JPEG`` and CMYK JPEGs). The raster is taken as
stored: no rotation by EXIF, as in the published ImageNet protocols. Transparency is dropped. A picture that does not
decode stops the run: skipping it would change the data set in silence.
"""

from __future__ import annotations

import io
import stat
import struct
from enum import IntFlag
from pathlib import Path, PurePath

from PIL import Image

from mae_bench.data.jpeg import ORIENTATION, exif_orientation
from mae_bench.errors import UserError

MAX_PIXELS = 89_478_485  # above this Pillow warns of a decompression bomb
MAX_BYTES = 1 << 30  # of one file, four times the pixels above
POLICY = "pictures are never skipped: repair the file, or remove it on purpose"
# What Pillow raises on files that it cannot read.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
SUFFIXES = {
    **dict.fromkeys((".jpg", ".jpeg"), "JPEG"),
    **dict.fromkeys((".ppm", ".pgm"), "PPM"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    **{".png": "PNG", ".bmp": "BMP", ".webp": "WEBP"},
}


class Odd(IntFlag):
    """What a picture's RGB pixels no longer tell of its file. Eight bits: `mae_bench.data.decode.Oddities`."""

    GREY = 1
    CMYK = 2
    PALETTE = 4
    ALPHA = 8
    DEEP = 16
    ROTATED = 32
    ANIMATED = 64
    SUFFIX = 128


ODD = {
    Odd.GREY: "grey (repeated in three channels)",
    Odd.CMYK: "CMYK (converted without a colour profile)",
    Odd.PALETTE: "with a palette",
    Odd.ALPHA: "with transparency (dropped)",
    Odd.DEEP: "of 16 bits a channel (the low 8 dropped)",
    Odd.ROTATED: "with an EXIF orientation (raster as stored)",
    Odd.ANIMATED: "with several frames (the first one taken)",
    Odd.SUFFIX: "whose suffix names another format",
}


def read_rgb(file: Path | bytes, name: str = "", *, draft: tuple[int, int] | None = None) -> Image.Image:
    """Decode one picture to 8-bit RGB at its stored size. Undecodable: ``UserError`` with its name and the policy.

    ``name`` is what errors call a file that is given as bytes. ``draft`` lets a JPEG come out at 1/2, 1/4 or 1/8 of
    its size, not smaller than this (width, height): libjpeg's scaled inverse DCT.
    """
    name = name or str(file)
    try:
        with Image.open(_handle(file)) as image:
            check_pixels(*image.size, name)
            if image.mode.startswith(("I", "F")):
                raise UserError(f"{name} is not an 8-bit picture (mode {image.mode}); convert it to 8 bits per channel")
            if draft is not None:
                image.draft("RGB", draft)
            if image.mode == "P" and "transparency" in image.info:
                return image.convert("RGBA").convert("RGB")
            return image.convert("RGB")
    except BROKEN as error:
        raise UserError(f"cannot decode picture {name}: {error}; {POLICY}") from error


def header(path: Path) -> tuple[tuple[int, int], int]:
    """(width, height) as stored, and the EXIF orientation: 1 = upright, 5 and above swap the sides. Decodes nothing."""
    try:
        with Image.open(path) as image:
            orientation = image.getexif().get(ORIENTATION)
            return image.size, orientation if isinstance(orientation, int) else 1
    except BROKEN as error:
        raise UserError(f"cannot decode picture {path}: {error}; {POLICY}") from error


def examine(data: bytes, name: str) -> tuple[tuple[int, int], Odd]:
    """(width, height) and oddities of a picture of any format. Decodes nothing; checks no more than Pillow's header."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            check_pixels(*image.size, name)
            return image.size, _oddities(image) | suffix_oddity(name, image.format or "")
    except BROKEN as error:
        raise UserError(f"cannot decode picture {name}: {error}; {POLICY}") from error


def suffix_oddity(name: str, form: str) -> Odd:
    """``SUFFIX`` where the name ends in the suffix of another format than ``form`` (Pillow's word for it)."""
    meant = SUFFIXES.get(PurePath(name).suffix.lower(), form)
    return Odd(0) if meant == form or (meant, form) == ("JPEG", "MPO") else Odd.SUFFIX


def check_pixels(width: int, height: int, name: str) -> None:
    """``UserError`` above ``MAX_PIXELS``: a few bytes can claim gigabytes of pixels."""
    if width * height > MAX_PIXELS:
        raise UserError(f"{name} has {width} x {height} pixels, more than {MAX_PIXELS}; {POLICY}")


def read_bytes(path: Path) -> bytes:
    """A whole file. Unreadable, no regular file (a device never ends), or above ``MAX_BYTES``: ``UserError``."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is no regular file; {POLICY}")
        if (size := status.st_size) > MAX_BYTES:
            raise UserError(f"{path} has {size} bytes, more than {MAX_BYTES}: not a picture of a data set; {POLICY}")
        with path.open("rb") as file:
            data = file.read(size + 1)
    except OSError as error:
        raise UserError(f"cannot read picture {path}: {error.strerror}; {POLICY}") from error
    if len(data) != size:
        raise UserError(f"{path} changes while it is read; start again with the file at rest")
    return data


def _handle(file: Path | bytes) -> Path | io.BytesIO:
    return io.BytesIO(file) if isinstance(file, bytes) else file


def _oddities(image: Image.Image) -> Odd:
    odd = Odd(0)
    if image.mode in ("1", "L", "LA", "La"):
        odd |= Odd.GREY
    if image.mode == "CMYK":
        odd |= Odd.CMYK
    if image.mode in ("P", "PA"):
        odd |= Odd.PALETTE
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        odd |= Odd.ALPHA
    if any(";16" in str(tile.args) for tile in getattr(image, "tile", ())):  # Pillow's raw mode, such as RGB;16B
        odd |= Odd.DEEP
    if getattr(image, "is_animated", False):
        odd |= Odd.ANIMATED
    block = image.info.get("exif", b"")
    tags = getattr(image, "tag_v2", {})  # of a TIFF, which Pillow turns itself
    if exif_orientation(block) != 1 or tags.get(ORIENTATION, 1) != 1:
        odd |= Odd.ROTATED
    return odd
