"""Two runs side by side: whether they can be compared at all, all that differs, and whether the difference is noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from mae_bench import places
from mae_bench.errors import UserError, nearest
from mae_bench.reporting import store
from mae_bench.reporting.comparison_text import text_of
from mae_bench.reporting.record import Record, Values, flat, read_record
from mae_bench.reporting.statistics import Classes, McNemar, mcnemar, over_classes


@dataclass(frozen=True)
class Change:
    """One value that differs; None where a run has no such key. ``origin``: where a recipe's value comes from."""

    key: str
    first: JsonValue
    second: JsonValue
    first_origin: str = ""
    second_origin: str = ""


@dataclass(frozen=True)
class Score:
    """A metric, of the whole or of one class; nan where a run has it undefined or not at all."""

    name: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        return self.first - self.second


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. ``obstacles`` is empty where the two numbers may stand side by side."""

    first: str  # run ids
    second: str
    protocol: str  # of the first
    metric: str
    obstacles: tuple[str, ...]
    metrics: tuple[Score, ...]
    images: McNemar | None
    no_images: str  # why there is no test
    class_metric: str
    classes: tuple[Score, ...]  # largest differences first
    over_classes: Classes | None
    changes: dict[str, tuple[Change, ...]]  # "recipe", "environment", "weights", "data"
    history: str  # one line

    def text(self) -> str:
        """A report of lines of at most 100 characters; the same for the same two records."""
        return text_of(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values, undefined as None."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return {"comparable": not self.obstacles} | plain


def compare(first: str | Path, second: str | Path, roots: Iterable[Path] | None = None) -> Comparison:
    """Compare two runs, each a record file, a run's folder or a run id (looked for below ``roots``).

    Args:
        roots: folders of records; default ``runs`` and the checkout's ``results``, those that exist.

    Raises:
        UserError: no such run, an id that two different records have, or a damaged record.
    """
    folders = default_roots() if roots is None else list(roots)
    return compare_records(find(first, folders), find(second, folders))


def default_roots() -> list[Path]:
    """Where runs are looked for by id: ``runs``, and ``results`` of the checkout, as far as they exist."""
    return [folder for folder in (Path("runs"), (places.checkout() or Path()) / "results") if folder.is_dir()]


def find(run: str | Path, roots: Iterable[Path]) -> Record:
    """The record that ``run`` names; see `compare`."""
    path = Path(run)
    if path.is_file():
        return read_record(path)
    if path.is_dir():
        if not (path / "record.json").is_file():
            raise UserError(f"{path} holds no record.json: name a run's own folder, a record file or a run id")
        return read_record(path / "record.json")
    folders = list(roots)
    records = list(store.load_records(folders))
    found = {record.model_dump_json(): record for record in records if record.run_id == str(run)}
    if len(found) > 1:
        raise UserError(f"{len(found)} different records call themselves '{run}'; name the file")
    if not found:
        hint = nearest(str(run), {record.run_id for record in records})
        below = " or ".join(map(str, folders)) or "runs or results"
        raise UserError(f"'{run}' is no record file, no run folder and no run id below {below}{hint}")
    return next(iter(found.values()))


def compare_records(a: Record, b: Record) -> Comparison:
    """The comparison of two records that are read already."""
    images, no_images = _images(a, b)
    class_metric = _class_metric(a, b)
    classes = _classes(a, b, class_metric)
    return Comparison(
        first=a.run_id,
        second=b.run_id,
        protocol=a.protocol,
        metric=a.metric,
        obstacles=tuple(_obstacles(a, b)),
        metrics=tuple(_scores(a.metrics, b.metrics, a.metric)),
        images=images,
        no_images=no_images,
        class_metric=class_metric,
        classes=tuple(sorted(classes, key=_largest)),
        over_classes=_described(classes),
        changes={
            "recipe": tuple(_recipe(a, b)),
            "environment": tuple(_changes(_environment(a), _environment(b))),
            "weights": tuple(_changes(_weights(a), _weights(b))),
            "data": tuple(_changes(a.data.model_dump(mode="json"), b.data.model_dump(mode="json"))),
        },
        history=_history(a, b),
    )


def _obstacles(a: Record, b: Record) -> Iterator[str]:
    """Why the numbers may not stand side by side."""
    for what, one, other in (
        ("metric", a.metric, b.metric),
        ("protocol", a.protocol, b.protocol),
        ("data", a.data.fingerprint[:12], b.data.fingerprint[:12]),
    ):
        if one != other:
            yield f"{what} differs: {one or 'unknown'} and {other or 'unknown'}"
    if a.eval_only != b.eval_only:
        yield f"only {'A' if b.eval_only else 'B'} was trained by its run; the other evaluates a model"
    for name, record in (("A", a), ("B", b)):
        if record.smoke:
            yield f"{name} is a smoke run: two steps on made data measure nothing"


def _scores(first: Values, second: Values, primary: str) -> Iterator[Score]:
    """Every metric of either, the primary one first."""
    names = sorted(first.keys() | second.keys(), key=lambda name: (name != primary, name))
    return (Score(name, _number(first.get(name)), _number(second.get(name))) for name in names)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _images(a: Record, b: Record) -> tuple[McNemar | None, str]:
    """McNemar's test where both records say which images were right, or one line why there is none."""
    if a.images is None or b.images is None:
        who = " and ".join(name for name, record in (("A", a), ("B", b)) if record.images is None)
        if "classification" not in (a.engine, b.engine):
            return None, f"no test: {a.engine} has no image that is simply right or wrong; compare seeds"
        return None, f"no test: which images were right is not in the record of {who}; run again, or compare seeds"
    if a.images.names != b.images.names:
        return None, "no test: the two saw different images, or in another order"
    return mcnemar(a.images.array(), b.images.array()), ""


def _class_metric(a: Record, b: Record) -> str:
    """What a class is scored by: the primary metric, that of which it is the mean (mIoU: IoU), or the first by name."""
    names = {name for values in (*a.per_class.values(), *b.per_class.values()) for name in values}
    wanted = (a.metric, a.metric.removeprefix("m"))
    return next((name for name in wanted if name in names), min(names, default=a.metric))


def _classes(a: Record, b: Record, name: str) -> list[Score]:
    """The score of every class that either has."""
    labels = sorted(a.per_class.keys() | b.per_class.keys())
    return [
        Score(label, *(_number(record.per_class.get(label, {}).get(name)) for record in (a, b))) for label in labels
    ]


def _largest(score: Score) -> tuple[bool, float, str]:
    return math.isnan(score.difference), -abs(score.difference), score.name


def _described(scores: list[Score]) -> Classes | None:
    found = over_classes({s.name: s.first for s in scores}, {s.name: s.second for s in scores})
    return found if found.n else None


def _recipe(a: Record, b: Record) -> Iterator[Change]:
    origins = [record.recipe.get("origins") for record in (a, b)]
    plain = [{key: value for key, value in record.recipe.items() if key != "origins"} for record in (a, b)]
    for change in _changes(*plain):
        key = change.key.removeprefix("values.")
        yield Change(change.key, change.first, change.second, *(_origin(known, key) for known in origins))
    yield from _changes({"seed": a.seed}, {"seed": b.seed})
    yield from _changes({"effective": a.effective}, {"effective": b.effective})


def _origin(origins: JsonValue, key: str) -> str:
    found = origins.get(key) if isinstance(origins, dict) else None
    return "; ".join(str(part) for part in found.values() if part) if isinstance(found, dict) else ""


def _environment(record: Record) -> dict[str, JsonValue]:
    return {
        "code_hash": record.code_hash,
        "git": record.git.model_dump(mode="json"),
        "hardware": record.hardware.model_dump(mode="json"),
        "versions": dict(record.versions),
    }


def _weights(record: Record) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = record.weights.model_dump(mode="json")
    return found | {"parameters": dict(record.parameters)}


def _changes(first: Mapping[str, JsonValue], second: Mapping[str, JsonValue]) -> Iterator[Change]:
    """Values of nested mappings that differ, under dotted keys, in the order of the keys."""
    sides = dict(flat(first)), dict(flat(second))
    for key in sorted(sides[0].keys() | sides[1].keys()):
        one, other = sides[0].get(key), sides[1].get(key)
        if one != other:
            yield Change(key, one, other)


def _history(a: Record, b: Record) -> str:
    """Where the two losses part: the first step is the first that something else went in."""
    curves = [_losses(record) for record in (a, b)]
    shared = sorted(curves[0].keys() & curves[1].keys())
    if not shared:
        return "no step at which both runs noted a loss"
    for before, step in zip([None, *shared[:-1]], shared, strict=True):
        one, other = curves[0][step], curves[1][step]
        if one != other:
            until = f"equal up to step {before:g}, " if before is not None else ""
            return f"{until}first different at step {step:g}: {_loss(one)} and {_loss(other)}"
    return f"equal at all {len(shared)} steps that both noted, up to {shared[-1]:g}"


def _losses(record: Record) -> dict[float, float | None]:
    """Step -> loss, of the points that have both."""
    return {
        step: point["loss"] for point in record.history if "loss" in point and (step := point.get("step")) is not None
    }


def _loss(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.9g}"
