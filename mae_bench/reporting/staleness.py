"""Which rows are of recipes or code that have changed since. Imports no torch.

A stale row has no experiment that could be repeated today: its task or backbone recipe, the recipe that made its
weights, or its protocol, is another now. A row of other code may still hold; it is marked only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from mae_bench import recipes
from mae_bench.errors import UserError
from mae_bench.recipes import ResolvedTask
from mae_bench.reporting.record import one_line, read_record
from mae_bench.schema import Backbone, MadeWeights

Json = dict[str, Any]
DESCRIBED = ["task", "backbone", "settings", "untrained", "recipe_protocol", "recipe_hash", "made_by"]
NAMED_AT_MOST = 3  # changed values in a reason


@dataclass(frozen=True)
class Tree:
    """What a run would be today. Given by the caller: reporting imports neither pipelines nor what runs them."""

    recipe_of: Callable[[ResolvedTask, Backbone], Json]  # `runs.recipe_of`
    untrained: Callable[[Backbone], Backbone]  # `runs.untrained`
    code_hash: Callable[[str], str]  # engine -> hash of its code


def judge(runs: pd.DataFrame, tree: Tree) -> pd.DataFrame:
    """`store.frame`'s rows with two more columns.

    ``stale`` says in a line what has changed since the run, and is empty where its recipe is today's. Smoke runs are
    not judged: their values are reduced, and no table counts them. ``other_code`` says that the sources of the run's
    engine differ from the tree's.
    """

    @cache
    def now(task: str, backbone: str, settings: tuple[str, ...], untrained: bool) -> Json:
        return _today(tree, task, backbone, settings, untrained)

    @cache
    def maker(backbone: str) -> str:
        return _maker(tree, backbone)

    @cache
    def reason(row: tuple[Any, ...]) -> str:
        *what, protocol, recipe_hash, made_by = row
        found = _reason(now, what, protocol, recipe_hash, files[row])
        return found if found or not made_by else _of_weights(maker, what[1], made_by)

    rows = list(zip(*(runs[key] for key in DESCRIBED), strict=True))
    files = dict(zip(rows, runs["file"], strict=True))
    stale = ["" if smoke else reason(row) for row, smoke in zip(rows, runs["smoke"], strict=True)]
    code = {engine: tree.code_hash(engine) for engine in runs["engine"].unique()}
    return runs.assign(
        stale=pd.Series(stale, index=runs.index, dtype="str"),
        other_code=(runs["code_hash"] != runs["engine"].map(code)).astype(bool),
    )


def _today(tree: Tree, task: str, backbone: str, settings: tuple[str, ...], untrained: bool) -> Json:
    for kind, name in (("task", task), ("backbone", backbone)):
        if name not in recipes.index(kind):  # type: ignore[arg-type]
            raise UserError(f"recipe '{name}' is not on the search path")
    recipe = recipes.load_backbone(backbone)
    resolved = recipes.resolve_task(task, recipe, list(settings))
    return tree.recipe_of(resolved, tree.untrained(recipe) if untrained else recipe)


def _reason(now: Callable[..., Json], what: list[Any], protocol: str, recipe_hash: str, file: str) -> str:
    try:
        today = now(*what)
    except UserError as error:
        return one_line(error)
    if today["protocol"] != protocol:
        return f"protocol {protocol} is now {today['protocol']}"
    if recipes.digest(today) == recipe_hash:
        return ""
    return _change(read_record(Path(file)).recipe, today) if file else "the recipe has changed"


def _of_weights(maker: Callable[[str], str], backbone: str, made_by: str) -> str:
    try:
        return "" if maker(backbone) == made_by else "its weights were made by another recipe"
    except UserError as error:
        return one_line(f"its weights cannot be made today: {error}")


def _maker(tree: Tree, backbone: str) -> str:
    """Hash of the recipe that makes a backbone's weights today; empty if it brings its own."""
    recipe = recipes.load_backbone(backbone)
    if not isinstance(recipe.weights, MadeWeights):
        return ""
    task = recipes.resolve_task(recipe.weights.task, recipe)
    return recipes.digest(tree.recipe_of(task, tree.untrained(recipe)))


def _change(then: Json, now: Json) -> str:
    """Which recipe has changed, and its first values that have: ``then`` and ``now`` as `runs.recipe_of` gives them."""
    then = {key: value for key, value in then.items() if key != "origins"}
    changed = list(_differences(then, json.loads(json.dumps(now))))
    if not changed:
        return "its recipe_hash is not of its recipe: see `python -m mae_bench results check`"
    kinds = {"backbone" if line.startswith("backbone.") else "task" for line in changed}
    what = f"the {kinds.pop()} recipe has" if len(kinds) == 1 else "both recipes have"
    more = f" and {len(changed) - NAMED_AT_MOST} more" if len(changed) > NAMED_AT_MOST else ""
    return one_line(f"{what} changed ({', '.join(changed[:NAMED_AT_MOST])}{more})")


def _differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            yield from _differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif then != now:
        yield f"{path}: {json.dumps(then)} is now {json.dumps(now)}"
