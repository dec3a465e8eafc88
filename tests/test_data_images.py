"""Decoding: by content, as stored, never skipped."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mae_bench.data.images import read_rgb
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


def test_exif_does_not_turn_the_raster(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a.jpg").write_bytes(encoded(Image.fromarray(RED), "JPEG", exif=exif))
    assert read_rgb(tmp_path / "a.jpg").size == (8, 6)


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


def test_a_missing_picture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.jpg"):
        read_rgb(tmp_path / "gone.jpg")


@given(st.binary(max_size=40), st.integers(0, 300))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_never_escapes_as_another_error(tmp_path: Path, noise: bytes, at: int) -> None:
    content = bytearray(KINDS["png named JPEG"][0])
    content[at : at + len(noise)] = noise
    path = tmp_path / "picture.png"
    path.write_bytes(bytes(content))
    with contextlib.suppress(UserError):
        assert read_rgb(path).mode == "RGB"
