"""The summary of a page: every task by every backbone, with the gap to the baseline of the same size."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mae_bench.reporting import shown
from mae_bench.reporting.cells import COLUMN, INITS, SIZES, THRESHOLD
from mae_bench.reporting.shown import Shown
from mae_bench.reporting.statistics import holm, lower_is_better, paired
from mae_bench.reporting.verdicts import Flag

BASELINES = ("scratch", "supervised")  # the first that a column has at a size
EDGES = (2.0, 10.0)  # percent points (percent, for a loss) between the three strengths of a colour
FLAGS = {"chance": "chance level", "identical": "identical", "dead seed": "dead seed", "spread": "wide spread",
         "impossible": "impossible", "undefined": "undefined"}  # fmt: skip

Tone = Literal["base", "none", "even", "up1", "up2", "up3", "down1", "down2", "down3"]


@dataclass(frozen=True)
class Square:
    """One cell of ours. ``tone`` is the colour of the gap; ``against`` names what the gap is to, in words."""

    number: str
    marks: str
    count: int
    gap: str
    against: str
    tone: Tone
    badges: tuple[str, ...]
    anchor: str  # of its first record in the page; empty = not in the page


@dataclass(frozen=True)
class TaskRow:
    task: str
    protocol: str
    metric: str
    trivial: str
    squares: tuple[Square | None, ...]


@dataclass(frozen=True)
class Matrix:
    """The summary of one size, since gaps are within a size. ``heads``: (initialisation, backbone) of each column."""

    size: str
    heads: tuple[tuple[str, str], ...]
    rows: tuple[TaskRow, ...]


def matrices(found: Sequence[Shown], flags: Sequence[Flag], anchors: Mapping[str, str]) -> list[Matrix]:
    """One matrix a size, small ones first. ``found``: from `shown.beside`, in the order of the tables.

    Args:
        flags: `verdicts.flags` of the same runs.
        anchors: record file -> its anchor in the page.
    """
    base = {id(cell): _baseline(cell, found) for cell in found}
    noise = _within_noise(found, base)
    made = []
    for size in sorted({cell["size"] for cell in found}, key=SIZES.index):
        squares = {
            (_task(cell), _head(cell)): _square(cell, base[id(cell)], id(cell) in noise, flags, anchors)
            for cell in found
            if cell["size"] == size
        }
        heads = sorted({head for _, head in squares}, key=lambda head: (INITS.index(head[0]), head[1]))
        rows = []
        for task in dict.fromkeys(task for task, _ in squares):
            trivial = shown.span(cell["trivial"] for cell in found if _task(cell) == task and cell["size"] == size)
            rows.append(TaskRow(*task, trivial, tuple(squares.get((task, head)) for head in heads)))
        made.append(Matrix(size, tuple(heads), tuple(rows)))
    return made


def first_anchor(files: Collection[str], anchors: Mapping[str, str]) -> str:
    """The anchor of that of the files which stands first in the page, or an empty string."""
    return next((anchor for file, anchor in anchors.items() if file in files), "")


def _task(cell: Shown) -> tuple[str, str, str]:
    return cell["task"], cell["protocol"], cell["metric"]


def _head(cell: Shown) -> tuple[str, str]:
    return cell["init"], shown.label(cell)


def _baseline(cell: Shown, found: Sequence[Shown]) -> Shown | None:
    """The baseline of a cell's task, protocol, metric and size; of several, the recipe of the usual name."""
    place = [*COLUMN, "size"]
    near = [one for one in found if all(one[key] == cell[key] for key in place) and not one["given"]]
    for init in BASELINES:
        usual = f"vit_{cell['size']}_{init}"
        named = sorted(
            (one for one in near if one["init"] == init), key=lambda one: (one["backbone"] != usual, one["backbone"])
        )
        if named:
            return named[0]
    return None


def _within_noise(found: Sequence[Shown], base: Mapping[int, Shown | None]) -> set[int]:
    """Cells whose gap a paired t test over the seeds, by Holm's method over all of them, does not tell from nothing."""
    tests: dict[int, float] = {}
    for cell in found:
        other = base[id(cell)]
        if other is None or other is cell or _other_data(cell, other):
            continue
        if not (cell["eval_only"] or other["eval_only"]):
            first: dict[Hashable, float] = cell["values"]
            tests[id(cell)] = paired(first, other["values"]).p
    return {key for key, p in zip(tests, holm(list(tests.values())), strict=True) if p >= THRESHOLD}


def _other_data(cell: Shown, base: Shown) -> bool:
    return len({*cell["data"], *base["data"]}) > 1


def _square(cell: Shown, base: Shown | None, noise: bool, flags: Sequence[Flag], anchors: Mapping[str, str]) -> Square:
    gap, against, tone = _gap(cell, base, noise)
    files = set(cell["files"])
    kinds = dict.fromkeys(FLAGS[flag.kind] for flag in flags if files & set(flag.runs))
    badges = ["stale"] * bool(cell["stale"]) + list(kinds)
    anchor = first_anchor(files, anchors)
    return Square(shown.value(cell), shown.marks(cell), cell["n"], gap, against, tone, tuple(badges), anchor)


def _gap(cell: Shown, base: Shown | None, noise: bool) -> tuple[str, str, Tone]:
    if base is None:
        return "", "no baseline", "none"
    if base is cell:
        return "", "baseline", "base"
    gap: float = cell["mean"] - base["mean"]
    against = f"to {base['init']}" if base["backbone"].endswith(base["init"]) else f"to {base['backbone']}"
    if math.isnan(gap):
        return "", "undefined", "none"
    if _other_data(cell, base):
        return shown.signed(gap), f"{against}, other data", "none"
    if noise:
        return shown.signed(gap), f"{against}, within noise", "even"
    return shown.signed(gap), against, _tone(gap, cell, base)


def _alike(cell: Shown, base: Shown) -> bool:
    one = paired(cell["values"], base["values"])
    return one.n > 1 and math.isnan(one.p)


def _tone(gap: float, cell: Shown, base: dict[str, Any]) -> Tone:
    """A gap of unknown spread has the faintest colour, however large it is; so has one that is equal in all pairs."""
    better = gap
    if lower_is_better(cell["metric"]):
        better = -100 * gap / abs(base["mean"]) if base["mean"] else -gap
    known = cell["n"] > 1 and base["n"] > 1 and not _alike(cell, base)
    strength = 1 + sum(abs(better) >= edge for edge in EDGES) if known else 1
    if not better:
        return "even"
    tones: dict[tuple[bool, int], Tone] = {
        (True, 1): "up1", (True, 2): "up2", (True, 3): "up3",
        (False, 1): "down1", (False, 2): "down2", (False, 3): "down3",
    }  # fmt: skip
    return tones[better > 0, strength]
