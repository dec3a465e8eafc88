"""Charts of a page: training curves from the histories of runs, and the paper's Figures 5 and 7 with ours beside them.

Runs of two protocols never share a chart of a result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mae_bench.recipes import digest
from mae_bench.reporting.plots import COLOURS, Chart, Line, Points, drawable, mean_line, thinned
from mae_bench.reporting.published import Published
from mae_bench.reporting.record import Record

MEAN_POINTS = 50  # of a mean: where a history has more steps, a point is the mean of a stretch of them
MOST_LINES = COLOURS  # kinds of line in a chart
PAPER = "MAE paper arXiv:2111.06377v3"
Json = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A record that a page shows; ``label`` names its cell and is the same for all its seeds."""

    record: Record
    label: str


@dataclass
class Group:
    """The charts of one task and protocol, and what could not be drawn."""

    name: str  # an identifier within the page
    task: str
    protocol: str
    charts: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def training_curves(runs: Iterable[Run]) -> list[Group]:
    """Per task and protocol a chart of the loss and one of the metric, where runs have two points or more."""
    tasks: dict[tuple[str, str], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    colours: dict[str, int] = {}  # the same in every chart, as far as there are enough
    for run in runs:
        colours.setdefault(run.label, len(colours))
        tasks[run.record.task, run.record.protocol][run.label].append(run.record)
    groups = []
    for number, ((task, protocol), labels) in enumerate(tasks.items(), start=1):
        group = Group(f"curve-{number}", task, protocol)
        first = next(iter(labels.values()))[0]
        for key in dict.fromkeys(("loss", "val_loss" if first.engine == "pretraining" else first.metric)):
            chart = _curve(f"{group.name}-{key}", task, key, labels, colours)
            group.charts += [chart] if chart else []
        if len(labels) > MOST_LINES:
            group.notes.append(f"backbones not drawn: {len(labels) - MOST_LINES}")
        if group.charts:
            groups.append(group)
    return groups


def _curve(
    name: str, task: str, key: str, labels: Mapping[str, Sequence[Record]], colours: Mapping[str, int]
) -> Chart | None:
    lines: list[Line] = []
    words: list[str] = []
    for position, (label, records) in enumerate(list(labels.items())[:MOST_LINES]):
        colour = colours[label] if len(colours) <= COLOURS else position
        points = [line for record in records if len(line := _points(record, key)) > 1]
        mean = mean_line(points)
        if len(mean) > 1:
            lines += [Line(label, thinned(one), colour, "run") for one in points]
            lines.append(Line(label, thinned(mean, MEAN_POINTS), colour))
            seeds = f", mean of {len(points)} seeds" if len(points) > 1 else ""
            words.append(f"{label} from {mean[0][1]:.4g} to {mean[-1][1]:.4g}{seeds}")
    text = f"{key} over training steps of {task}: {'; '.join(words)}."
    return Chart(name, f"{task}: {key}", text, "training step", key, tuple(lines)) if lines else None


def _points(record: Record, key: str) -> Points:
    """(step, value) of a history; an undefined value has none."""
    found: dict[float, float] = {}
    for point in record.history:
        step, value = point.get("step"), point.get(key)
        if step is not None and value is not None and drawable(step) and drawable(value):
            found[step] = value
    return tuple(sorted(found.items()))


@dataclass(frozen=True)
class Sweep:
    """One of the paper's figures: what is varied, where its published numbers stand, and the recipe's keys for it."""

    name: str
    title: str
    locator: str
    x: str
    keys: tuple[str, ...]  # values of a pre-training recipe that the figure varies together
    ticks: tuple[float, ...]
    log: bool = False

    def published_x(self, row: Published) -> float | None:
        if self.name == "schedule":
            return None if row.pretrain_epochs is None else float(row.pretrain_epochs)
        ratio = next((part for part in row.protocol.split(";") if part.startswith("mask_ratio_pct=")), "")
        return float(ratio.partition("=")[2]) if ratio else None

    def our_x(self, values: Json, effective: Json) -> float | None:
        x = values.get("mask_ratio") if self.name == "mask_ratio" else effective.get("steps")
        if not isinstance(x, (int, float)) or not drawable(x):
            return None
        return round(100.0 * x, 6) if self.name == "mask_ratio" else float(x)


SWEEPS = (
    Sweep("mask_ratio", "Masking ratio", "Fig.5", "masking ratio in percent", ("mask_ratio",),
          (10, 20, 30, 40, 50, 60, 70, 80, 90)),
    Sweep("schedule", "Training schedule", "Fig.7", "epochs of pre-training",
          ("epochs", "steps", "warmup_epochs", "warmup_steps"), (100, 200, 400, 800, 1600), log=True),
)  # fmt: skip
WORDS = {"finetune": "fine-tuning", "linear_probe": "linear probe"}


def sweep_charts(sweep: Sweep, runs: Sequence[Run], published: Sequence[Published]) -> list[Chart]:
    """The published curves of a figure, then ours: transfers of pre-trainings that differ in nothing else."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in published:
        if row.source == PAPER and row.source_locator.startswith(sweep.locator) and row.verified:
            x = sweep.published_x(row)
            if x is not None:
                found[row.protocol.partition(";")[0]].append((x, row.value))
    charts: list[Chart] = []
    for kind, points in found.items():
        line = Line("published", tuple(sorted(points)))
        title = f"{WORDS.get(kind, kind)}, ViT-L/16, ImageNet-1K"
        charts.append(_sweep_chart(f"{sweep.name}-{len(charts)}", sweep, title, "top-1 in percent", (line,)))
    for (task, protocol, metric), lines in _ours(sweep, runs).items():
        title = f"ours: {task} ({protocol})"
        across = "steps of pre-training" if sweep.name == "schedule" else sweep.x
        charts.append(_sweep_chart(f"{sweep.name}-{len(charts)}", sweep, title, metric, lines, across))
    return charts


def _sweep_chart(name: str, sweep: Sweep, title: str, y: str, lines: tuple[Line, ...], x: str = "") -> Chart:
    values = "; ".join(
        f"{line.label}: " + ", ".join(f"{px:g} gives {py:.4g}" for px, py in line.points)
        for line in lines
        if line.role == "mean"
    )
    text = f"{y} over {x or sweep.x}. {values}."
    ticks = sweep.ticks if x in ("", sweep.x) else tuple(sorted({px for line in lines for px, _ in line.points}))
    return Chart(name, f"{sweep.title}: {title}", text, x or sweep.x, y, lines, ticks, sweep.log)


def _ours(sweep: Sweep, runs: Sequence[Run]) -> dict[tuple[str, str, str], tuple[Line, ...]]:
    """Lines by (task, protocol, metric): one kind a pre-training recipe, where it was run at two places or more."""
    makers: dict[str, tuple[str, float]] = {}  # recipe hash of a pre-training -> the recipe without the keys, its x
    for one in (run.record for run in runs if run.record.engine == "pretraining"):
        values = one.recipe.get("values")
        if isinstance(values, dict) and (x := sweep.our_x(values, one.effective)) is not None:
            rest = {key: value for key, value in values.items() if key not in sweep.keys}
            makers[one.recipe_hash] = digest({"backbone": one.recipe.get("backbone"), "values": rest}), x
    seeds: dict[tuple[str, str, str], dict[str, dict[int, dict[float, float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for one in (run.record for run in runs if run.record.engine != "pretraining" and not run.record.eval_only):
        maker = one.weights.maker.get("recipe_hash")
        if isinstance(maker, str) and maker in makers and one.value is not None:
            rest_hash, x = makers[maker]
            seeds[one.task, one.protocol, one.metric][rest_hash][one.seed][x] = one.value
    found: dict[tuple[str, str, str], tuple[Line, ...]] = {}
    for key, kinds in seeds.items():
        lines: list[Line] = []
        for colour, of_seed in enumerate(list(kinds.values())[:MOST_LINES]):
            lines += _seed_lines(of_seed, colour)
        if lines:
            found[key] = tuple(lines)
    return found


def _seed_lines(of_seed: Mapping[int, Mapping[float, float]], colour: int) -> list[Line]:
    points = [tuple(sorted(values.items())) for values in of_seed.values()]
    mean = mean_line(points)
    if len(mean) < 2:
        return []
    label = f"ours, mean of {len(points)} seeds" if len(points) > 1 else "ours, one seed"
    thin = [Line(label, one, colour, "run") for one in points] if len(points) > 1 else []
    return [*thin, Line(label, mean, colour)]
