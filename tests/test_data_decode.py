"""The fast path of the input: the same pixels as Pillow's, the same refusals, and what `scaled` changes."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from mae_bench.data import jpeg
from mae_bench.data.decode import Oddities, crop, inspect, read_crop, read_picture
from mae_bench.data.images import Odd, read_rgb
from mae_bench.errors import UserError

WIDTH, HEIGHT = 157, 110  # no multiples of any block


def photo(height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    """The same waves and edges at any size, and a little noise."""
    y, x = np.mgrid[:height, :width] * (WIDTH / width)
    waves = [127 + 120 * np.sin(x / (9 + 4 * channel) + y / 13) for channel in range(3)]
    pixels = np.stack(waves, 2) + np.random.default_rng(0).normal(0, 6, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 90)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **({"quality": 90} | options))
    return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x010F] = "a maker before it"
    exif[0x0112] = orientation
    return exif


PHOTO = photo()
# JPEGs that torchvision decodes, and what is odd about them under the name a.jpg.
COMMON = {
    "4:2:0": (encoded(PHOTO, subsampling="4:2:0"), Odd(0)),
    "4:2:2": (encoded(PHOTO, subsampling="4:2:2"), Odd(0)),
    "4:4:4": (encoded(PHOTO, subsampling="4:4:4"), Odd(0)),
    "4:4:0": (
        cv2.imencode(
            ".jpg",
            np.asarray(PHOTO)[:, :, ::-1],
            [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440],
        )[1].tobytes(),
        Odd(0),
    ),
    "progressive": (encoded(PHOTO, progressive=True), Odd(0)),
    "restart markers": (encoded(PHOTO, restart_marker_rows=1), Odd(0)),
    "RGB inside": (encoded(PHOTO, keep_rgb=True), Odd(0)),
    "grey": (encoded(PHOTO.convert("L")), Odd.GREY),
    "a comment and a profile": (encoded(PHOTO, comment=b"\xff\xd9" * 40, icc_profile=bytes(70_000)), Odd(0)),
    "turned": (encoded(PHOTO, exif=turned(6)), Odd.ROTATED),
    "bytes behind the end": (encoded(PHOTO) + b"appended", Odd(0)),
    "two pictures": (encoded(PHOTO, "MPO", save_all=True, append_images=[PHOTO.rotate(180)]), Odd(0)),
}
OTHERS = {
    "cmyk": (encoded(PHOTO.convert("CMYK")), Odd.CMYK),
    "png named jpg": (encoded(PHOTO, "PNG"), Odd.SUFFIX),
    "webp": (encoded(PHOTO, "WEBP"), Odd.SUFFIX),
}


@pytest.mark.parametrize("kind", [*COMMON, *OTHERS])
def test_pixels_are_pillows(kind: str) -> None:
    data, odd = (COMMON | OTHERS)[kind]
    picture = inspect(data, "a.jpg")
    assert (picture.height, picture.width, picture.odd) == (HEIGHT, WIDTH, odd)
    assert picture.common_jpeg == (kind in COMMON)
    assert np.array_equal(read_picture(picture).permute(1, 2, 0), np.asarray(read_rgb(data)))


def test_common_jpegs_are_not_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fall-back would give the same pixels, slower, without a word."""
    monkeypatch.setattr("mae_bench.data.decode.read_rgb", None)
    for kind, (data, _) in COMMON.items():
        if kind != "bytes behind the end":  # which look like a file that is cut off
            assert read_picture(inspect(data, "a.jpg")).shape == (3, HEIGHT, WIDTH)


def test_a_jpeg_by_another_name_is_odd() -> None:
    assert inspect(COMMON["4:2:0"][0], "a.png").odd == Odd.SUFFIX
    assert inspect(COMMON["4:2:0"][0], "a.JPEG").odd == Odd(0)
    assert inspect(COMMON["4:2:0"][0], "000123").odd == Odd(0)


@given(st.integers(1, 8), st.sampled_from(["<", ">"]))
@settings(max_examples=20)
def test_orientation_is_read_as_pillow_reads_it(orientation: int, order: str) -> None:
    exif = turned(orientation)
    exif.endian = order
    frame = jpeg.parse(encoded(PHOTO, exif=exif))
    assert frame is not None
    assert frame.orientation == orientation


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    height, width = draw(st.integers(1, HEIGHT)), draw(st.integers(1, WIDTH))
    return draw(st.integers(0, HEIGHT - height)), draw(st.integers(0, WIDTH - width)), height, width


@given(
    boxes(), st.tuples(st.integers(1, 64), st.integers(1, 64)), st.sampled_from(["bicubic", "bilinear"]), st.booleans()
)
@settings(max_examples=150)
def test_crops_are_torchvisions_of_pillows_picture(
    box: tuple[int, int, int, int], size: tuple[int, int], interpolation: Any, flip: bool
) -> None:
    data = COMMON["4:2:0"][0]
    picture = v2.functional.pil_to_tensor(read_rgb(data))
    how = v2.InterpolationMode(interpolation)
    theirs = v2.functional.resized_crop(picture, *box, list(size), interpolation=how, antialias=True)
    ours = read_crop(inspect(data, "a"), box, size, flip=flip, interpolation=interpolation)
    difference = (ours.flip(-1) if flip else ours).int() - theirs.int()
    assert ours.dtype == torch.uint8
    assert difference.abs().max() <= (interpolation == "bilinear")  # without AVX2 torchvision goes through floats


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_crops_are_pillows_but_for_rounding(interpolation: Any) -> None:
    data = encoded(photo(375, 500))
    how = Image.Resampling[interpolation.upper()]
    for top, left, height, width in ((0, 0, 375, 500), (20, 31, 300, 280), (100, 100, 180, 200)):
        part = Image.open(io.BytesIO(data)).crop((left, top, left + width, top + height)).resize((224, 192), how)
        ours = read_crop(inspect(data, "a"), (top, left, height, width), (192, 224), interpolation=interpolation)
        difference = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - np.asarray(part).astype(int))
        assert difference.max() <= 2  # rounded once a direction
        assert difference.mean() < 0.05


def test_a_box_of_the_right_size_is_cut_out() -> None:
    picture = read_picture(inspect(COMMON["4:2:0"][0], "a"))
    assert torch.equal(crop(picture, (3, 4, 32, 40), (32, 40)), picture[:, 3:35, 4:44])
    assert torch.equal(crop(picture.contiguous(), (3, 4, 90, 80), 32), crop(picture, (3, 4, 90, 80), 32))


@pytest.mark.parametrize("box", [(-1, 0, 9, 9), (0, 0, 0, 9), (HEIGHT - 8, 0, 9, 9), (0, WIDTH - 8, 9, 9)])
def test_a_box_outside_is_an_error(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="leaves the picture"):
        read_crop(inspect(COMMON["4:2:0"][0], "a"), box, 8)


def test_scaled_decoding_is_close_where_it_applies() -> None:
    """And exact where the box has too few pixels, or the file is no common JPEG."""
    data = encoded(photo(801, 1203))
    picture = inspect(data, "a.jpg")
    for box, expected in (
        ((0, 0, 801, 1203), 4.0),
        ((101, 205, 640, 701), 4.0),
        ((161, 243, 640, 960), 4.0),
        ((100, 200, 300, 300), 4.0),
        ((100, 200, 191, 191), 0.0),
    ):
        exact = read_crop(picture, box, 96).int()
        scaled = read_crop(picture, box, 96, scaled=True).int()
        difference = (scaled - exact).abs().float().mean().item()
        assert difference <= expected
        assert (difference == 0) == (expected == 0)
    other = inspect(encoded(photo(801, 1203), "PNG"), "a.png")
    assert torch.equal(read_crop(other, (0, 0, 800, 800), 96, scaled=True), read_crop(other, (0, 0, 800, 800), 96))


@given(st.integers(8, 400), st.integers(8, 400), st.integers(1, 60))
@settings(max_examples=60)
def test_scaled_decoding_never_leaves_the_picture(height: int, width: int, size: int) -> None:
    """The box is cut from the raster that Pillow really made, at every size."""
    picture = inspect(encoded(Image.new("RGB", (width, height), (10, 200, 30))), "a.jpg")
    scaled = read_crop(picture, (0, 0, height, width), size, scaled=True)
    assert scaled.shape == (3, size, size)
    assert (scaled.float().mean((1, 2)) - torch.tensor([10.0, 200.0, 30.0])).abs().max() < 6


def test_sizes_come_without_decoding() -> None:
    picture = inspect(COMMON["turned"][0][:-2000], "a.jpg")  # its pixels are not all there
    assert (picture.height, picture.width) == (HEIGHT, WIDTH)
    with pytest.raises(UserError, match=r"a\.jpg.*never skipped"):
        read_picture(picture)


def claiming(height: int, width: int) -> bytes:
    """A JPEG whose frame header claims a size."""
    data = bytearray(COMMON["4:2:0"][0])
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(UserError, match=r"shard/3\.jpg has 65000 x 65000 pixels"):
        inspect(claiming(65_000, 65_000), "shard/3.jpg")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0\0\0", COMMON["4:2:0"][0][:100], claiming(0, 9), b"<html>"],
)
def test_what_is_no_picture_is_named(data: bytes) -> None:
    with pytest.raises(UserError, match=r"shard/3\.jpg.*never skipped"):
        inspect(data, "shard/3.jpg")


def test_more_rows_than_there_are_is_truncation() -> None:
    with pytest.raises(UserError, match=r"a\.jpg"):
        read_picture(inspect(claiming(HEIGHT * 9, WIDTH)[:-2], "a.jpg"))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@given(
    kind=st.sampled_from(["4:2:0", "progressive", "turned", "cmyk"]),
    at=st.integers(0, 1200),
    noise=st.binary(max_size=40),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_never_escapes_as_another_error(kind: str, at: int, noise: bytes, capfd: Any) -> None:
    """libjpeg conceals some damage, and says so on standard error."""
    data = bytearray((COMMON | OTHERS)[kind][0])
    data[at : at + len(noise)] = noise
    with contextlib.suppress(UserError):
        picture = inspect(bytes(data), "a.jpg")
        if picture.height * picture.width < 1 << 20:  # a damaged size may be a large one
            assert read_picture(picture).shape == (3, picture.height, picture.width)
    capfd.readouterr()


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_any_bytes_have_a_frame_or_none(noise: bytes) -> None:
    for data in (noise, b"\xff\xd8\xff" + noise, b"\xff\xd8\xff\xe1\x01\x00Exif\0\0II*\0" + noise):
        frame = jpeg.parse(data)
        assert frame is None or (frame.height > 0 and 1 <= frame.orientation <= 8)


class Noting:
    """A data set whose pictures are odd by their index."""

    def __init__(self) -> None:
        self.oddities = Oddities(50)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        self.oddities.note(index, Odd.GREY if index % 10 == 0 else Odd.CMYK | Odd.ROTATED if index == 7 else Odd(0))
        return index


def test_oddities_are_counted_once_over_workers_and_epochs() -> None:
    data = Noting()
    assert data.oddities.text() == ""
    for _ in range(2):
        loader: Any = DataLoader(data, batch_size=4, num_workers=2)  # type: ignore[arg-type]
        assert sum(map(len, loader)) == 50
    assert list(data.oddities.counts().values()) == [5, 1, 1]
    assert data.oddities.text().startswith("5 grey (repeated in three channels), 1 CMYK (")
