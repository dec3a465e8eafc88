"""Draw one made picture: upright coloured shapes on a soft background. A pure function of (seed, index).

What makes the pictures a fair small test: the class is the form of the largest, roughly centred shape and nothing
else. Colours, position, size and background are drawn independently of it, and smaller shapes of any class stand around
it. Shapes are always lighter than their ground: with either sign, a tiny encoder learns next to nothing in minutes.
Everything up to the last pixel is integer or plain IEEE arithmetic on a fixed random stream, so that every machine
draws the same picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLASSES = ("cross", "diamond", "disk", "hourglass", "ring", "square", "star", "triangle")
SIDE = 64  # native side of a picture, in pixels
MAIN = (34, 46)  # side of the main shape, in pixels, ends included
OTHER = (10, 15)  # side of every other shape
CROWD_SHARE = 0.2  # of the other shapes are crowds of four
CROWD_SIDE, CROWD_STEP = 6, 7  # side of the members of a crowd, and the distance between them
COUNTS = (1, 1, 1, 1, 2, 2, 2, 3, 4)  # shapes in a picture, drawn evenly from these
GAP = 2  # pixels kept free between shapes
LIGHTER = 200  # least difference of R + G + B between a shape and the background's base colour

Polygon = tuple[tuple[float, float], ...]
Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]


def _arc(start: float, stop: float, points: int, radius: float = 1.0) -> list[tuple[float, float]]:
    """Points on a circle, angles in turns. Rounded, so that the last bit of a platform's cosine does not matter."""
    angles = [2 * math.pi * (start + (stop - start) * k / (points - 1)) for k in range(points)]
    return [(round(radius * math.cos(a), 4), round(radius * math.sin(a), 4)) for a in angles]


def _star() -> Polygon:
    outer, inner = _arc(-0.25, 0.75, 6), _arc(-0.15, 0.85, 6, radius=0.42)
    return tuple(point for pair in zip(outer[:5], inner[:5], strict=True) for point in pair)


def _half_ring(start: float) -> Polygon:
    return tuple(_arc(start, start + 0.5, 13) + _arc(start + 0.5, start, 13, radius=0.55))


_T = 0.34  # half the width of a cross's arms
# Outlines in the square [-1, 1]^2, y pointing down. A ring is two halves: polygons have no holes.
OUTLINES: dict[str, tuple[Polygon, ...]] = {
    "cross": (
        (
            *((-_T, -1), (_T, -1), (_T, -_T), (1, -_T), (1, _T), (_T, _T)),
            *((_T, 1), (-_T, 1), (-_T, _T), (-1, _T), (-1, -_T), (-_T, -_T)),
        ),
    ),
    "diamond": (((0, -1), (1, 0), (0, 1), (-1, 0)),),
    "disk": (tuple(_arc(0, 23 / 24, 24)),),
    "hourglass": (((-1, -1), (1, -1), (0.15, 0), (1, 1), (-1, 1), (-0.15, 0)),),
    "ring": (_half_ring(0.0), _half_ring(0.5)),
    "square": (((-1, -1), (1, -1), (1, 1), (-1, 1)),),
    "star": (_star(),),
    "triangle": (((0, -1), (1, 1), (-1, 1)),),
}


@dataclass(frozen=True)
class Shape:
    """One shape, or a crowd of small ones. ``label`` indexes ``CLASSES``; ``polygons`` hold (x, y) in pixels."""

    label: int
    polygons: tuple[Polygon, ...]
    mask: Mask  # (H, W)
    crowd: bool = False

    @property
    def box(self) -> tuple[float, float, float, float]:
        """x, y, width, height around the polygons, in pixels."""
        xs, ys = zip(*(point for polygon in self.polygons for point in polygon), strict=True)
        return min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)


@dataclass(frozen=True)
class Picture:
    """``pixels`` (H, W, 3) uint8; ``shapes[0]`` is the main one, unless the picture is empty."""

    pixels: Pixels
    shapes: tuple[Shape, ...]

    def labels(self) -> Pixels:
        """(H, W) uint8: 0 where there is no shape, else 1 + class."""
        labels = np.zeros(self.pixels.shape[:2], np.uint8)
        for shape in self.shapes:
            labels[shape.mask] = 1 + shape.label
        return labels


def place(name: str, x: int, y: int, side: int) -> tuple[Polygon, ...]:
    """Outline of a shape in the square of ``side`` pixels whose top left corner is (x, y)."""
    half = side / 2
    return tuple(
        tuple((round(x + half + half * u, 2), round(y + half + half * v, 2)) for u, v in polygon)
        for polygon in OUTLINES[name]
    )


def rasterise(polygons: tuple[Polygon, ...], height: int, width: int) -> Mask:
    """(H, W) bool: pixels whose centre lies inside one of the polygons (even-odd rule for each)."""
    mask = np.zeros((height, width), np.bool_)
    for polygon in polygons:
        corners = np.asarray(polygon, np.float64)
        left, top = np.maximum(np.floor(corners.min(0)), 0).astype(int)
        right, bottom = np.minimum(np.ceil(corners.max(0)), (width, height)).astype(int)
        centre_x, centre_y = np.arange(left, right) + 0.5, np.arange(top, bottom) + 0.5
        (x1, y1), (x2, y2) = corners.T[:, :, None], np.roll(corners, -1, 0).T[:, :, None]
        crosses = (y1 <= centre_y) != (y2 <= centre_y)  # (edges, rows)
        rise = np.where(crosses, y2 - y1, 1.0)
        at_x = np.where(crosses, x1 + (centre_y - y1) * (x2 - x1) / rise, np.inf)
        inside = (at_x[:, :, None] <= centre_x).sum(0) % 2 == 1
        mask[top:bottom, left:right] |= inside
    return mask


def _colour(rng: np.random.Generator, base: NDArray[np.int64]) -> NDArray[np.int64]:
    """An RGB colour lighter than the background's ``base``."""
    while True:
        colour = rng.integers(60, 256, 3)
        if colour.sum() - base.sum() >= LIGHTER:
            return colour


def _background(rng: np.random.Generator, height: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A dark base colour, and that with a soft texture: 5 x 5 grey levels up to +-20, interpolated bilinearly."""
    base = rng.integers(10, 130, 3)
    levels = rng.integers(-20, 21, (5, 5))
    texture = _spread(height) @ levels @ _spread(width).T // 64**2
    return base, base + texture[:, :, None]


def _spread(length: int) -> NDArray[np.int64]:
    """(length, 5) integer weights of a linear interpolation between five knots; each row sums to 64."""
    position = np.arange(length) * 4 * 64 // length
    weights = np.zeros((length, 5), np.int64)
    rows, knot, fraction = np.arange(length), position // 64, position % 64
    weights[rows, knot] = 64 - fraction
    weights[rows, knot + 1] = fraction
    return weights


def draw(seed: int, index: int, *, height: int = SIDE, width: int = SIDE, empty: bool = False) -> Picture:
    """Picture ``index`` of the endless set ``seed``. Main classes take turns: ``index % 8``.

    ``empty`` leaves the shapes out: the same background alone.
    """
    rng = np.random.default_rng((seed, index))
    base, canvas = _background(rng, height, width)
    shapes: list[Shape] = []
    taken: list[tuple[int, int, int]] = []  # x, y, side
    for number in range(0 if empty else COUNTS[rng.integers(len(COUNTS))]):
        main = number == 0
        label = index % len(CLASSES) if main else int(rng.integers(len(CLASSES)))
        crowd = not main and rng.random() < CROWD_SHARE
        low, high = MAIN if main else OTHER
        side = CROWD_STEP + CROWD_SIDE if crowd else int(rng.integers(low, high + 1))
        spot = _spot(rng, taken, side, height, width, main)
        if spot is None:
            continue
        taken.append((*spot, side))
        corners = [(0, 0), (0, CROWD_STEP), (CROWD_STEP, 0), (CROWD_STEP, CROWD_STEP)] if crowd else [(0, 0)]
        member = CROWD_SIDE if crowd else side
        polygons = tuple(p for dx, dy in corners for p in place(CLASSES[label], spot[0] + dx, spot[1] + dy, member))
        mask = rasterise(polygons, height, width)
        canvas[mask] = _colour(rng, base)
        shapes.append(Shape(label, polygons, mask, crowd))
    return Picture(canvas.clip(0, 255).astype(np.uint8), tuple(shapes))


def _spot(
    rng: np.random.Generator, taken: list[tuple[int, int, int]], side: int, height: int, width: int, main: bool
) -> tuple[int, int] | None:
    """Top left corner for a shape that touches no other one, or None after 20 misses. The main one stays near the
    centre: within an eighth of the picture's side."""
    for _ in range(20):
        if main:
            x, y = (
                min(max((extent - side) // 2 + int(rng.integers(-(extent // 8), extent // 8 + 1)), 0), extent - side)
                for extent in (width, height)
            )
        else:
            x, y = (int(rng.integers(0, extent - side + 1)) for extent in (width, height))
        if all(
            x >= left + size + GAP or left >= x + side + GAP or y >= top + size + GAP or top >= y + side + GAP
            for left, top, size in taken
        ):
            return x, y
    return None
