"""A comparison of two runs as plain text: lines of at most 100 characters, every foreign text on one printable line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import JsonValue

from mae_bench.reporting.record import one_line

if TYPE_CHECKING:
    from mae_bench.reporting.compare import Change, Comparison, Score

WIDTH = 100
CLASSES = 12  # shown; the rest is in `as_dict`
CHANGES = 40
TITLES = {"recipe": "Recipe", "environment": "Environment", "weights": "Weights", "data": "Data"}


def text_of(found: Comparison) -> str:
    """The report; ends with a newline."""
    lines = [f"A  {one_line(found.first, WIDTH - 3)}", f"B  {one_line(found.second, WIDTH - 3)}", ""]
    lines += _verdict(found)
    lines += ["", *_table("Result", found.metrics, len(found.metrics)), *_test(found)]
    if found.classes:
        title = one_line(f"Classes: {found.class_metric}", 30)
        lines += ["", *_table(title, found.classes, CLASSES), *_classes(found)]
    for name, title in TITLES.items():
        lines += ["", *_changes(title, found.changes[name])]
    lines += ["", "Training loss", f"  {found.history}"]
    return "".join(line.rstrip()[:WIDTH] + "\n" for line in lines)


def _verdict(found: Comparison) -> Iterator[str]:
    if not found.obstacles:
        yield one_line(f"Comparable: same data, metric {found.metric} and protocol {found.protocol}", WIDTH)
        return
    yield "NOT comparable: these numbers may not stand side by side"
    for reason in found.obstacles:
        yield f"  - {one_line(reason, WIDTH - 4)}"


def _table(title: str, scores: tuple[Score, ...], most: int) -> Iterator[str]:
    width = min(max([30, *(len(one_line(score.name)) for score in scores[:most])]), WIDTH - 39)
    yield f"{title:<{width + 2}} {'A':>11} {'B':>11} {'A - B':>11}"
    for score in scores[:most]:
        numbers = [_number(score.first), _number(score.second), _number(score.difference, "+")]
        yield f"  {one_line(score.name, width):<{width}} " + " ".join(f"{number:>11}" for number in numbers)
    if len(scores) > most:
        yield f"  … and {len(scores) - most} more with smaller differences"


def _number(value: float, sign: str = "") -> str:
    if math.isnan(value):
        return "undefined"
    return f"{value:{sign}.4g}" if 0 < abs(value) < 0.01 or abs(value) >= 1e6 else f"{round(value, 4) + 0.0:{sign}.4f}"


def _test(found: Comparison) -> Iterator[str]:
    if found.images is None:
        yield f"  {one_line(found.no_images, WIDTH - 2)}"
        return
    test = found.images
    yield (
        f"  of {test.n} images only A has {test.only_first} right, only B {test.only_second}: "
        f"{test.difference:+.2f} points, 95 % interval {test.low:+.2f} to {test.high:+.2f}"
    )
    yield f"  {test.test} p = {test.p:.2g}: about these two trained models; other seeds would be two others"


def _classes(found: Comparison) -> Iterator[str]:
    if one := found.over_classes:
        yield f"  of {one.n} classes A is higher in {one.above}, B in {one.below}; median {one.median:+.2f}"
        yield f"  Wilcoxon over classes p = {one.p:.2g}, a description: classes are no independent sample"


def _changes(title: str, changes: tuple[Change, ...]) -> Iterator[str]:
    if not changes:
        yield f"{title}: the same"
        return
    yield f"{title}: {len(changes)} difference{'s' if len(changes) > 1 else ''}"
    for change in changes[:CHANGES]:
        yield f"  {one_line(change.key, WIDTH - 2)}"
        for name, value, origin in (
            ("A", change.first, change.first_origin),
            ("B", change.second, change.second_origin),
        ):
            yield f"    {name}  {_value(value, origin)}"
    if len(changes) > CHANGES:
        yield f"  … and {len(changes) - CHANGES} more"


def _value(value: JsonValue, origin: str) -> str:
    shown = "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = one_line(shown or "(empty)", 70 if origin else WIDTH - 7)
    return one_line(f"{text} [{one_line(origin)}]" if origin else text, WIDTH - 7)
