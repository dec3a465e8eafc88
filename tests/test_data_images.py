"""Decoding: by content, as stored, never skipped."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mae_bench.data.images import ODD, Odd, examine, read_bytes, read_rgb
from mae_bench.errors import UserError

RED = np.full((6, 8, 3), (200, 30, 40), np.uint8)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


KINDS = {
    "png named JPEG": (encoded(Image.fromarray(RED), "PNG"), (200, 30, 40), 0),
    "jpeg": (encoded(Image.fromarray(RED), "JPEG", quality=95), (200, 30, 40), 6),
    "cmyk jpeg": (encoded(Image.fromarray(RED).convert("CMYK"), "JPEG", quality=95), (200, 30, 40), 8),
    "grey": (encoded(Image.fromarray(RED[:, :, 0]), "PNG"), (200, 200, 200), 0),
    "palette": (encoded(Image.fromarray(RED).convert("P", palette=Image.Palette.ADAPTIVE), "PNG"), (200, 30, 40), 0),
    "palette, transparent": (
        encoded(Image.fromarray(RED).convert("P", palette=Image.Palette.ADAPTIVE), "PNG", transparency=bytes([0])),
        (200, 30, 40),
        0,
    ),
    "rgba": (encoded(Image.fromarray(np.dstack([RED, RED[:, :, 0]])), "PNG"), (200, 30, 40), 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_content_decides(tmp_path: Path, kind: str) -> None:
    content, colour, tolerance = KINDS[kind]
    path = tmp_path / "picture.JPEG"
    path.write_bytes(content)
    image = read_rgb(path)
    assert (image.mode, image.size) == ("RGB", (8, 6))
    assert np.abs(np.asarray(image).astype(int) - colour).max() <= tolerance


def turned(orientation: int = 6) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize(("form", "size"), [("JPEG", (8, 6)), ("PNG", (8, 6)), ("WEBP", (8, 6)), ("TIFF", (6, 8))])
def test_exif_does_not_turn_the_raster(form: str, size: tuple[int, int]) -> None:
    """But Pillow itself turns a TIFF."""
    data = encoded(Image.fromarray(RED), form, exif=turned())
    assert read_rgb(data, "a").size == size
    assert examine(data, "a") == (size, Odd.ROTATED)


GREY, ALPHA = RED[:, :, 0], np.full((6, 8), 7, np.uint8)
ADAPTIVE = Image.fromarray(RED).convert("P", palette=Image.Palette.ADAPTIVE)
# Bytes and what is odd about them, under the name of a PNG.
ODDITIES = {
    "png": (encoded(Image.fromarray(RED), "PNG"), Odd(0)),
    "grey": (encoded(Image.fromarray(GREY), "PNG"), Odd.GREY),
    "one bit": (encoded(Image.fromarray(GREY > 0), "PNG"), Odd.GREY),
    "grey, transparent": (encoded(Image.fromarray(np.dstack([GREY, ALPHA])), "PNG"), Odd.GREY | Odd.ALPHA),
    "transparent": (encoded(Image.fromarray(np.dstack([RED, ALPHA])), "PNG"), Odd.ALPHA),
    "a transparent colour": (encoded(Image.fromarray(RED), "PNG", transparency=(200, 30, 40)), Odd.ALPHA),
    "palette": (encoded(ADAPTIVE, "PNG"), Odd.PALETTE),
    "palette, transparent": (encoded(ADAPTIVE, "PNG", transparency=bytes([0])), Odd.PALETTE | Odd.ALPHA),
    "16 bits": (cv2.imencode(".png", RED[:, :, ::-1].astype(np.uint16) * 257)[1].tobytes(), Odd.DEEP),
    "16 bits in a TIFF": (
        cv2.imencode(".tif", RED[:, :, ::-1].astype(np.uint16) * 257)[1].tobytes(),
        Odd.DEEP | Odd.SUFFIX,
    ),
    "animated": (
        encoded(Image.fromarray(RED), "PNG", save_all=True, append_images=[Image.fromarray(255 - RED)]),
        Odd.ANIMATED,
    ),
    "animated WebP": (
        encoded(Image.fromarray(RED), "WEBP", save_all=True, lossless=True, append_images=[Image.fromarray(255 - RED)]),
        Odd.ANIMATED | Odd.SUFFIX,
    ),
    "animated GIF": (
        encoded(ADAPTIVE, "GIF", save_all=True, append_images=[Image.fromarray(255 - RED)]),
        Odd.ANIMATED | Odd.SUFFIX | Odd.PALETTE,
    ),
    "cmyk": (encoded(Image.fromarray(RED).convert("CMYK"), "JPEG", quality=95), Odd.CMYK | Odd.SUFFIX),
}


@pytest.mark.parametrize("kind", ODDITIES)
def test_oddities_are_named_and_change_no_colour(kind: str) -> None:
    data, odd = ODDITIES[kind]
    assert examine(data, "picture.png") == ((8, 6), odd)
    colour = (200, 200, 200) if odd & Odd.GREY else (200, 30, 40)
    if kind == "one bit":
        colour = (255, 255, 255)
    assert np.abs(np.asarray(read_rgb(data)).astype(int) - colour).max() <= (8 if odd & Odd.CMYK else 0)


def test_every_oddity_fits_a_byte_and_has_its_words() -> None:
    assert set(ODD) == set(Odd)
    assert max(Odd) < 256


def test_damaged_exif_is_not_the_pictures_fault() -> None:
    data = encoded(Image.fromarray(RED), "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    assert examine(data, "a.png") == ((8, 6), Odd(0))
    assert read_rgb(data).size == (8, 6)


def header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


FAULTS = {
    "empty": b"",
    "text": b"<html>404</html>",
    "truncated": encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)), "JPEG")[
        :900
    ],
    "bomb": header(60_000, 60_000),
    "16 bits": encoded(Image.fromarray(np.full((4, 4), 40_000, np.uint16)), "PNG"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_undecodable_pictures_are_named(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(FAULTS[fault])
    with pytest.raises(UserError, match=r"picture\.jpg.*(never skipped|convert it to 8 bits)"):
        read_rgb(path)


def test_undecodable_bytes_are_named() -> None:
    for data in FAULTS.values():
        with pytest.raises(UserError, match="shard/7"):
            read_rgb(data, "shard/7")
    for data in (FAULTS["empty"], FAULTS["text"], FAULTS["bomb"]):
        with pytest.raises(UserError, match="shard/7"):
            examine(data, "shard/7")


def test_a_missing_picture_is_named(tmp_path: Path) -> None:
    for read in (read_rgb, read_bytes):
        with pytest.raises(UserError, match=r"gone\.jpg"):
            read(tmp_path / "gone.jpg")


def test_a_file_that_cannot_be_a_picture_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(2 << 30)  # a hole, which takes no room
    with pytest.raises(UserError, match=r"a\.jpg has 2147483648 bytes"):
        read_bytes(tmp_path / "a.jpg")


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in (tmp_path / "pipe.jpg", tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match=rf"{path} is no regular file"):
            read_bytes(path)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no file here has other bytes than it says")
def test_a_file_of_other_bytes_than_it_says_is_refused() -> None:
    with pytest.raises(UserError, match="changes while it is read"):
        read_bytes(Path("/proc/self/status"))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of odd TIFF tags, when the noise makes a TIFF of it
@given(st.binary(max_size=40), st.integers(0, 300))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_never_escapes_as_another_error(tmp_path: Path, noise: bytes, at: int) -> None:
    content = bytearray(KINDS["png named JPEG"][0])
    content[at : at + len(noise)] = noise
    path = tmp_path / "picture.png"
    path.write_bytes(bytes(content))
    with contextlib.suppress(UserError):
        assert read_rgb(path).mode == "RGB"
