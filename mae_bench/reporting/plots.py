"""Line charts as inline SVG: no script, no style of its own, every text escaped. Imports no torch.

Colours and widths are classes that the page's style sheet knows (``s0`` … ``s7``, ``run``, ``mean``, ``axis``), so one
chart serves light and dark. Lines differ in their dashes too, never in colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup, escape

from mae_bench.reporting.record import one_line

COLOURS = 8
MOST_POINTS = 200  # of one line
MARKED = 12  # a line of at most that many points shows them
LARGEST, SMALLEST = 1e15, 1e-12  # values beyond cannot be drawn beside others; below, not on a logarithmic axis
WIDTH, HEIGHT = 440.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 42.0  # room for the numbers and the names of the axes
STEPS = (1.0, 2.0, 5.0, 10.0)  # between ticks, times a power of ten

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Line:
    """``label`` stands in the legend, once for all lines that have it; ``colour`` counts from 0 and wraps around."""

    label: str
    points: Points
    colour: int = 0
    role: Literal["mean", "run"] = "mean"  # a run is drawn thin, below the means


@dataclass(frozen=True)
class Chart:
    """``description`` says in words what the chart shows, for those who do not see it.

    ``ticks``: the places on the x axis, instead of round ones. ``log``: equal factors of x are equally far apart.
    """

    name: str  # an identifier within the page
    title: str
    description: str
    x: str
    y: str
    lines: tuple[Line, ...]
    ticks: tuple[float, ...] = ()
    log: bool = False


@dataclass(frozen=True)
class Axis:
    """Maps [low, high] to pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def drawable(value: object) -> bool:
    """Whether a value is a number that a chart can show."""
    return isinstance(value, (int, float)) and math.isfinite(value) and abs(value) <= LARGEST


def thinned(points: Iterable[tuple[float, float]], most: int = MOST_POINTS) -> Points:
    """At most ``most`` points: of each stretch of equally many, the mean x and the mean y."""
    found = sorted((x, y) for x, y in points if drawable(x) and drawable(y))
    if len(found) <= most:
        return tuple(found)
    ends = [len(found) * i // most for i in range(most + 1)]
    return tuple(
        (math.fsum(x for x, _ in part) / len(part), math.fsum(y for _, y in part) / len(part))
        for first, last in pairwise(ends)
        for part in [found[first:last]]
    )


def mean_line(runs: Sequence[Points]) -> Points:
    """The mean of several lines at the x that all of them have."""
    values = [dict(points) for points in runs]
    shared = set.intersection(*map(set, values)) if values else set()
    return tuple((x, math.fsum(one[x] for one in values) / len(values)) for x in sorted(shared))


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``, 1, 2 or 5 times a power of ten apart, ``most`` at most."""
    span = max(high - low, 1e-9 * max(abs(low), abs(high), 1e-6))
    power = 10.0 ** math.floor(math.log10(span / (most - 1)))
    step = next(power * factor for factor in STEPS if power * factor * (most - 1) >= span * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    ticks = [float(f"{(first + i) * step:.12g}") + 0.0 for i in range(most)]
    return [tick for tick in dict.fromkeys(ticks) if low - 1e-9 * span <= tick <= high + 1e-9 * span]


def tick_label(value: float) -> str:
    """Short and exact: 0.25, 400, 20k."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(factor, 1e4):
            return f"{value / factor:g}{unit}"
    return f"{value:g}"


def _span(values: Sequence[float], log: bool) -> tuple[float, float]:
    """The values' range with a little room, never empty."""
    low, high = min(values), max(values)
    if log:
        return (low, high) if high > low * (1 + 1e-9) else (low / 2, high * 2)
    room = 0.04 * (high - low) if high > low else max(0.5 * abs(high), 0.5)
    return low - room, high + room


def svg(chart: Chart) -> Markup:
    """``<svg>`` with a title and a description; a line of text if no line has a point."""
    points = [point for line in chart.lines for point in line.points if drawable(point[0]) and drawable(point[1])]
    log = chart.log and all(x > SMALLEST for x, _ in points)
    if not points:
        return Markup("<p>no points to draw</p>")
    across = Axis(*_span([x for x, _ in points], log), LEFT + 6, WIDTH - RIGHT - 6, log)
    up = Axis(*_span([y for _, y in points], False), HEIGHT - BOTTOM, TOP)
    drawn = sorted(chart.lines, key=lambda line: line.role == "mean")  # means on top
    body = [*_axes(chart, across, up), *(part for line in drawn for part in _line(line, across, up))]
    names = [f"{chart.name}-title", f"{chart.name}-text"]
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-labelledby="{} {}" focusable="false">').format(
        _px(WIDTH), _px(HEIGHT), *names
    )
    texts = Markup('<title id="{}">{}</title><desc id="{}">{}</desc>').format(
        names[0], _text(chart.title), names[1], _text(chart.description)
    )
    return Markup("\n").join([head + texts, *body, Markup("</svg>")])


def _axes(chart: Chart, across: Axis, up: Axis) -> list[Markup]:
    parts = []
    for tick in nice_ticks(up.low, up.high):
        y = _px(up.place(tick))
        parts.append(Markup('<path class="grid" d="M{} {}H{}"/>').format(_px(LEFT), y, _px(WIDTH - RIGHT)))
        parts.append(_label(LEFT - 6, up.place(tick) + 4, "end", tick_label(tick)))
    floor = HEIGHT - BOTTOM
    for tick in chart.ticks or nice_ticks(across.low, across.high):
        if across.low <= tick <= across.high:
            x = across.place(tick)
            parts.append(Markup('<path class="axis" d="M{} {}v4"/>').format(_px(x), _px(floor)))
            parts.append(_label(x, floor + 17, "middle", tick_label(tick)))
    parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(_px(LEFT), _px(floor), _px(WIDTH - RIGHT)))
    parts.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle", chart.x))
    middle = (TOP + floor) / 2
    turn = Markup(' transform="rotate(-90 12 {})"').format(_px(middle))
    parts.append(_label(12, middle, "middle", chart.y, turn))
    return parts


def _label(x: float, y: float, anchor: str, text: str, more: str = "") -> Markup:
    pattern = Markup('<text x="{}" y="{}" text-anchor="{}"{}>{}</text>')
    return pattern.format(_px(x), _px(y), anchor, more, _text(text))


def _line(line: Line, across: Axis, up: Axis) -> list[Markup]:
    places = [(across.place(x), up.place(y), x, y) for x, y in line.points if drawable(x) and drawable(y)]
    if not places:
        return []
    look = f"s{line.colour % COLOURS} {line.role}"
    path = "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y, _, _ in places)
    parts = [Markup('<path class="line {}" d="{}"/>').format(look, path)]
    if len(places) <= MARKED:
        dot = Markup('<circle class="dot {}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>')
        size = "3.5" if line.role == "mean" else "2"
        parts += [
            dot.format(look, _px(px), _px(py), size, _text(f"{line.label}: {x:g}, {y:.6g}")) for px, py, x, y in places
        ]
    return parts


def legend(chart: Chart) -> list[tuple[str, int]]:
    """Label and colour of each kind of line, in the order of the lines."""
    return list(dict.fromkeys((line.label, line.colour % COLOURS) for line in chart.lines if line.label))


def _px(value: float) -> str:
    """A coordinate: one decimal is below what a screen shows."""
    return f"{value:.1f}".removesuffix(".0")


def _text(value: str) -> Markup:
    return escape(one_line(value, 500))
