"""Sheets of pictures: printable text, sizes, colours that can be told apart, bounded files."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mae_bench.data import drawing


@given(st.text(max_size=300), st.integers(5, 60))
def test_printable_names(name: str, most: int) -> None:
    shown = drawing.printable(name, most)
    assert shown.isascii() and (shown.isprintable() or not shown)
    assert len(shown) <= most
    if name.isascii() and name.isprintable() and len(name) <= most and not {"'", "\\"} & set(name):
        assert shown == name


@given(st.text(max_size=300), st.integers(60, 400))
def test_fitted_names(name: str, width: int) -> None:
    shown = drawing.fitted(name, width)
    assert shown.isascii() and (shown.isprintable() or not shown)
    assert drawing.FONT.getlength(shown) <= width


@given(st.integers(1, 10**6), st.integers(1, 50))
def test_spread_numbers(total: int, most: int) -> None:
    numbers = drawing.spread(total, most)
    assert numbers == sorted(set(numbers))
    assert len(numbers) == min(total, most)
    assert numbers[0] == 0 and numbers[-1] < total
    gaps = np.diff([*numbers, total])
    assert gaps.max() - gaps.min() <= 1


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(112, 400))
def test_shown_sizes(width: int, height: int, most: int) -> None:
    w, h = drawing.shown_size(width, height, most)
    assert 1 <= max(w, h) <= most
    if w >= width and h >= height:
        assert w % width == h % height == 0 and w // width == h // height
    else:
        assert abs(w * height - h * width) <= max(width, height)  # the shape, up to a pixel's rounding
    assert drawing.shown(Image.new("RGB", (width, height)), most).size == (w, h)


def test_colours_are_told_apart() -> None:
    colours = [drawing.colour(number) for number in range(255)]
    assert len(set(colours)) == 255
    assert drawing.colour(255) == colours[0]  # data sets may have more classes
    first = drawing._lab([drawing.IGNORED, (0, 0, 0), (255, 255, 255), *colours[:20]])
    distances = np.linalg.norm(first[:, None] - first, axis=-1) + np.diag([np.inf] * len(first))
    assert distances.min() > 25  # 2.3 is the least that an eye notices


def test_lab_of_known_colours() -> None:
    """The primary colours and white, as any table of sRGB under D65 has them."""
    expected = [[53.2, 80.1, 67.2], [87.7, -86.2, 83.2], [32.3, 79.2, -107.9], [100, 0, 0]]
    found = drawing._lab([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)])
    np.testing.assert_allclose(found, expected, atol=0.1)


@pytest.mark.parametrize(
    ("filled", "word"), [((255, 255, 0), "black"), ((0, 0, 200), "white"), ((0, 114, 178), "white")]
)
def test_ink_on_a_colour(filled: drawing.Colour, word: str) -> None:
    assert drawing.ink(filled) == word


def test_a_small_sheet_is_exact_and_a_large_one_fits() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    for limit in (400_000, 60_000):
        content = drawing.encoded(Image.fromarray(noise), limit)
        assert len(content) <= limit
        with Image.open(io.BytesIO(content)) as sheet:
            exact = np.array_equal(np.array(sheet.convert("RGB")), noise)
        assert exact == (limit == 400_000)


def test_rows_of_unequal_tiles() -> None:
    red, blue = (Image.new("RGB", size, name) for size, name in (((120, 30), "red"), ((130, 60), "blue")))
    sheet = drawing.rows([[drawing.Tile(red, ("x",)), drawing.Tile(blue)], [drawing.Tile(blue)]], ("one", "two"), "ab")
    assert sheet.size == (6 + 130 + 6 + 130 + 6, 20 + (14 + 6 + 60) * 2)
    assert sheet.getpixel((6, 34)) == (255, 0, 0)
    assert sheet.getpixel((142, 34)) == (0, 0, 255)
    assert sheet.getpixel((6, 34 + 80)) == (0, 0, 255)
    assert sheet.getpixel((142, 34 + 80)) == (255, 255, 255)


def test_a_name_in_a_picture_stays_inside_and_covers_no_other() -> None:
    from PIL import ImageDraw

    picture = Image.new("RGB", (100, 40), "white")
    draw, taken = ImageDraw.Draw(picture), list[drawing.Box]()
    drawing.label(draw, (90, 2), "long name \u202e", (0, 0, 255), taken)
    drawing.label(draw, (80, 4), "other", (255, 0, 0), taken)
    drawing.label(draw, (-50, 90), "below", (255, 0, 0), taken)
    assert len(taken) == 2
    assert all(0 <= left < right <= 100 and 0 <= top < bottom <= 40 for left, top, right, bottom in taken)
    assert picture.getpixel((99, 3)) == (0, 0, 255)
    assert picture.getpixel((0, 39)) == (255, 0, 0)
