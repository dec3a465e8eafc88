"""Sheets of pictures with text: sizes, printable text, colours, layout, and a PNG of bounded size.

Text comes from outside (names of classes and files) and is escaped here, whatever a caller hands over.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

TILE = 112  # smallest side of a picture in a sheet, in pixels; small ones are enlarged by a whole factor
SIDE = 280  # longest side of a picture of free size in a sheet
GAP = 6
LINE = 14  # height of a line of text
LETTER = 6  # width of one, roughly
LIMIT = 200_000  # bytes of a PNG that is to be small
COLOURS = (256, 128, 64, 32)  # of a PNG that is too large with all of them
IGNORED = (128, 128, 128)  # the colour of what no class has
FONT = ImageFont.load_default(size=12)

Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]  # left, top, right, bottom

# Okabe & Ito, "Color Universal Design", 2008: told apart by colour-blind eyes too. Black is left for text.
_FIRST = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0), (240, 228, 66))


@dataclass(frozen=True)
class Tile:
    """A picture with lines of text below it, which are shortened to the width of its column."""

    picture: Image.Image
    lines: tuple[str, ...] = ()


def spread(total: int, most: int) -> list[int]:
    """At most ``most`` of the numbers below ``total``, evenly spread: splits are often sorted by class."""
    count = min(most, total)
    return [number * total // count for number in range(count)]


def shown_size(width: int, height: int, most: int | None = SIDE) -> tuple[int, int]:
    """Width and height of a picture in a sheet: a small one is enlarged by the whole factor that gives its shorter side
    ``TILE`` pixels, one that is longer than ``most`` is scaled down to it."""
    if most is not None and max(width, height) > most:
        scale = most / max(width, height)
        return max(1, round(width * scale)), max(1, round(height * scale))
    factor = max(1, -(-TILE // min(width, height)))
    if most is not None:
        factor = max(1, min(factor, most // max(width, height)))
    return width * factor, height * factor


def shown(picture: Image.Image, most: int | None = SIDE) -> Image.Image:
    """A picture at its ``shown_size``; enlarged, every pixel is a square."""
    size = shown_size(*picture.size, most)
    return picture.resize(size, Image.Resampling.NEAREST if size >= picture.size else Image.Resampling.LANCZOS)


def colour(number: int) -> Colour:
    """The colour of class ``number``, one of 255; the same in every sheet, and never grey, which means ignored."""
    palette = _palette()
    return palette[number % len(palette)]


@cache
def _palette() -> list[Colour]:
    """Each colour is the one of a grid that is farthest from all before it, as in Glasbey et al., "Colour displays for
    categorical images", 2007: the fewer classes there are, the easier they are told apart."""
    levels = range(15, 256, 24)
    grid = [(red, green, blue) for red in levels for green in levels for blue in levels]
    candidates = [*_FIRST, *(one for one in grid if max(one) - min(one) > 60)]
    lab = _lab(candidates)
    taken = _lab([(0, 0, 0), (255, 255, 255), IGNORED, *_FIRST])
    nearest = np.linalg.norm(lab[:, None] - taken, axis=-1).min(axis=1)
    chosen = list(_FIRST)
    while len(chosen) < 255:
        farthest = int(nearest.argmax())
        chosen.append(candidates[farthest])
        nearest = np.minimum(nearest, np.linalg.norm(lab - lab[farthest], axis=-1))
    return chosen


def _lab(colours: Sequence[Colour]) -> NDArray[np.float64]:
    """sRGB -> (n,3) CIE L*a*b* under D65, in which distances are about those that eyes see."""
    share = np.array(colours) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt((linear @ to_xyz.T / to_xyz.sum(axis=1)).T.clip(min=1e-4))
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


def ink(background: Colour) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = background
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def printable(name: str, most: int) -> str:
    """A name in ASCII, everything else escaped, its middle left out where it is longer than ``most``."""
    escaped = ascii(name)[1:-1]
    if len(escaped) <= most:
        return escaped
    half = max(1, (most - 3) // 2)
    return f"{escaped[:half]}...{escaped[-half:]}"


def fitted(name: str, width: int) -> str:
    """A printable name that is at most ``width`` pixels wide, or the shortest form of it."""
    most = max(5, width // 2)  # no letter is narrower
    while FONT.getlength(text := printable(name, most)) > width and most > 5:
        most -= 1
    return text


def rows(tiles: Sequence[Sequence[Tile]], heads: Sequence[str] = (), names: Sequence[str] = ()) -> Image.Image:
    """Tiles in rows and columns; ``heads`` stand above the columns, ``names`` above the rows."""
    widths = [max(TILE, *(tile.picture.width for tile in column)) for column in _columns(tiles)]
    label = LINE if names else 0
    heights = [label + GAP + max(tile.picture.height + LINE * len(tile.lines) for tile in row) for row in tiles]
    top = LINE + GAP if heads else GAP
    sheet = Image.new("RGB", (GAP + sum(width + GAP for width in widths), top + sum(heights)), "white")
    draw = ImageDraw.Draw(sheet)
    lefts = [GAP + sum(widths[:number]) + GAP * number for number in range(len(widths))]
    for column, head in enumerate(heads):
        draw.text((lefts[column], GAP // 2), fitted(head, widths[column]), fill="black", font=FONT)
    for number, (row, height) in enumerate(zip(tiles, heights, strict=True)):
        if names:
            draw.text((GAP, top - 2), fitted(names[number], sheet.width - 2 * GAP), fill="black", font=FONT)
        for column, tile in enumerate(row):
            sheet.paste(tile.picture, (lefts[column], top + label))
            for line, text in enumerate(tile.lines):
                y = top + label + tile.picture.height + line * LINE
                draw.text((lefts[column], y), fitted(text, widths[column]), fill="black", font=FONT)
        top += height
    return sheet


def _columns(tiles: Sequence[Sequence[Tile]]) -> list[list[Tile]]:
    return [[row[number] for row in tiles if number < len(row)] for number in range(max(map(len, tiles)))]


def label(draw: ImageDraw.ImageDraw, corner: tuple[float, float], name: str, filled: Colour, taken: list[Box]) -> None:
    """A name on a ground of its own, just above ``corner`` (x, y) or, at the upper edge of the picture, below it.

    Left out where it would cover one of ``taken``, the places of names, to which its own is added.
    """
    width, height = draw.im.size
    text = fitted(name, width - 4)
    wide = FONT.getlength(text) + 4
    x = max(0.0, min(corner[0], width - wide))
    y = max(0.0, min(corner[1] - LINE if corner[1] >= LINE else corner[1], height - LINE))
    place = (x, y, x + wide, y + LINE - 1)
    if any(x < right and left < place[2] and y < bottom and top < place[3] for left, top, right, bottom in taken):
        return
    taken.append(place)
    draw.rectangle(place, fill=filled)
    draw.text((x + 2, y), text, fill=ink(filled), font=FONT)


def paragraph(text: str, width: int) -> Image.Image:
    """Wrapped text, ``width`` pixels wide."""
    lines = textwrap.wrap(printable(text, len(text) * 10), width=max(1, width // LETTER))
    block = Image.new("RGB", (width, LINE * len(lines) + GAP), "white")
    for number, line in enumerate(lines):
        ImageDraw.Draw(block).text((GAP, number * LINE), line, fill="black", font=FONT)
    return block


def legend(entries: Sequence[tuple[Colour, str]], width: int, cell: int = 150) -> Image.Image:
    """A swatch and a name for each entry, in columns of ``cell`` pixels."""
    columns = max(1, (width - GAP) // cell)
    block = Image.new("RGB", (width, -(-len(entries) // columns) * (LINE + 2) + GAP), "white")
    draw = ImageDraw.Draw(block)
    for number, (filled, name) in enumerate(entries):
        x, y = GAP + number % columns * cell, number // columns * (LINE + 2)
        draw.rectangle((x, y + 2, x + LINE, y + LINE - 2), fill=filled, outline="black")
        draw.text((x + LINE + GAP, y), fitted(name, cell - LINE - 3 * GAP), fill="black", font=FONT)
    return block


def stacked(*parts: Image.Image) -> Image.Image:
    """Pictures one above the other on white."""
    sheet = Image.new("RGB", (max(part.width for part in parts), sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        sheet.paste(part, (0, top))
        top += part.height
    return sheet


def encoded(sheet: Image.Image, limit: int = LIMIT) -> bytes:
    """A PNG of at most about ``limit`` bytes: exact where it is that small, else with as many colours as fit, which are
    at least 32. The same sheet gives the same bytes."""
    content = _png(sheet)
    for colours in COLOURS:
        if len(content) <= limit:
            break
        content = _png(sheet.quantize(colours, dither=Image.Dither.NONE))
    return content


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
