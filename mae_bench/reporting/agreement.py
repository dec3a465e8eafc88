"""What a record says twice must agree: a number, a name or a hash that was edited later does not. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime

from mae_bench.recipes import digest
from mae_bench.reporting.record import Record, Values
from mae_bench.reporting.statistics import impossible
from mae_bench.reporting.store import overridden_values

Faults = Iterator[str]

# Totals that are by construction the mean of a score per class. mIoU and mAcc: over the classes that have the score.
# AP: COCO averages precision over classes, recalls and overlaps at once, and each class has as many of them.
MEANS = {"mIoU": "IoU", "mAcc": "Acc", "box_AP": "box_AP", "mask_AP": "mask_AP"}
ROUNDING = 1e-6  # percent points between two ways to add up
SLACK_SECONDS = 60.0  # between the clock and the stopwatch of a run


def contradictions(record: Record) -> Faults:
    """One line for each two places of a record that cannot both be as they were written."""
    for rule in RULES:
        yield from rule(record)


def _recipe(record: Record) -> Faults:
    recipe = {key: value for key, value in record.recipe.items() if key != "origins"}
    if digest(recipe) != record.recipe_hash:
        yield "recipe_hash is not the hash of recipe"
    backbone, origins = recipe.get("backbone"), record.recipe.get("origins")
    named = backbone if isinstance(backbone, dict) else {}
    stated = (recipe.get("task"), recipe.get("protocol"), *(named.get(key) for key in ("name", "size", "init")))
    ours = (record.task, record.recipe_protocol, record.backbone, record.size, record.init)
    for name, inside, outside in zip(("task", "protocol", "backbone", "size", "init"), stated, ours, strict=True):
        if inside != outside:
            yield f"{name} is '{outside}', and its recipe says '{inside}'"
    origins = origins if isinstance(origins, dict) else {}
    unpublished = {
        key for key, origin in origins.items() if isinstance(origin, dict) and origin.get("source") == "ours"
    }
    if unpublished != set(record.ours):
        yield f"ours and the recipe's origins differ in {', '.join(sorted(unpublished ^ set(record.ours)))}"


def _protocol(record: Record) -> Faults:
    expected = record.recipe_protocol
    if record.overridden:
        expected += f"+set:{digest(overridden_values(record))[:8]}"
    if record.smoke:
        expected += "+smoke"
    elif not record.data.matches:
        expected += f"+data:{record.data.fingerprint[:8]}"
    if record.protocol != expected:
        yield f"protocol is '{record.protocol}', and what the record says of values and data makes '{expected}'"


def _identity(record: Record) -> Faults:
    if not record.run_id.startswith(f"{record.task}.{record.backbone}."):
        yield f"run_id does not begin with '{record.task}.{record.backbone}.'"
    seed = re.search(r"\.seed(\d+)-[0-9a-f]{8}", record.run_id)
    if seed and int(seed[1]) != record.seed:
        yield f"seed is {record.seed}, and run_id says {seed[1]}"
    stamp = re.search(r"\.(\d{8}T\d{6}Z)$", record.run_id)
    if stamp and stamp[1] != f"{datetime.fromisoformat(record.created):%Y%m%dT%H%M%SZ}":
        yield f"created is {record.created}, and run_id says {stamp[1]}"


def _best(record: Record) -> Faults:
    """``best`` is over all evaluations, of which the result is the last."""
    for key, best in record.best.items():
        reached = [point[key] for point in (*record.history, record.metrics) if point.get(key) is not None]
        first = min if "loss" in key else max
        if best is not None and reached and first(best, *reached) != best:  # type: ignore[type-var]
            yield f"best.{key} is {best}, and {first(reached)} was reached"  # type: ignore[type-var]


def _result(record: Record) -> Faults:
    """The result is the last evaluation of the history, where that was kept; ``best`` has what evaluations measure."""
    for key, value in record.metrics.items():
        last = next((point[key] for point in reversed(record.history) if key in point), value)
        if key in record.best and last != value:
            yield f"metrics.{key} is {value}, and the last point of history says {last}"


def _classes(record: Record) -> Faults:
    for total, part in MEANS.items():
        yield from _mean(record.metrics.get(total), total, part, record.per_class)
    # As many pictures of each class: then always predicting one class is right as often as there are classes.
    majority, classes = record.baseline.get("top1"), len(record.per_class)
    if majority is not None and classes and math.isclose(majority * classes, 100):
        yield from _mean(record.metrics.get("top1"), "top1", "top1", record.per_class)


def _mean(stated: float | None, total: str, part: str, per_class: dict[str, Values]) -> Faults:
    parts = [value for scores in per_class.values() if (value := scores.get(part)) is not None]
    if stated is None or not parts:
        return
    mean = math.fsum(parts) / len(parts)
    if abs(mean - stated) > ROUNDING:
        yield f"metrics.{total} is {stated}, and the mean of per_class {part} is {mean}"


def _range(record: Record) -> Faults:
    """A loss is not negative, and every other metric is a percentage; classes have the same metrics as their mean."""
    parts = {"metrics": record.metrics, "best": record.best, "baseline": record.baseline}
    parts |= {f"per_class.{name}": scores for name, scores in record.per_class.items()}
    for place, values in parts.items():
        for key, value in values.items():
            if value is not None and (outside := impossible(key, value)):
                yield f"{place}.{key} is {value}, outside {outside}"


RULES: tuple[Callable[[Record], Faults], ...] = (_recipe, _protocol, _identity, _best, _result, _classes, _range)


def oddities(record: Record) -> Faults:
    """What can happen to an honest run (a clock that was set), but is rare."""
    created = datetime.fromisoformat(record.created)
    try:
        started = datetime.fromisoformat(record.times.started)
        elapsed = (created - started).total_seconds()
    except (ValueError, TypeError):  # no time, or one without a zone
        yield f"times.started is no time in UTC: '{record.times.started}'"
        return
    if abs(elapsed - record.times.seconds) > SLACK_SECONDS:
        yield f"created is {elapsed:.0f} s after times.started, and the run took {record.times.seconds:.0f} s"
