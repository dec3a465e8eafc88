"""Which rows are of recipes or code that have changed since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mae_bench import provenance, recipes, runs
from mae_bench.recipes import digest, load_backbone, resolve_task
from mae_bench.reporting import staleness, store
from mae_bench.reporting.record import read_record, record_from, write_record
from mae_bench.reporting.staleness import Tree
from mae_bench.schema import Backbone

ROOT = Path(__file__).resolve().parent.parent
TREE = Tree(
    runs.recipe_of, runs.untrained, lambda engine: provenance.code_hash(runs.PIPELINES[engine].rpartition(".")[0])
)


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes on the search path: a task and a backbone of its own."""
    task, backbone = tmp_path / "tasks" / "mine", tmp_path / "backbones" / "mine"
    shutil.copytree(ROOT / "tasks" / "tiny_linear", task)
    _edit(task / "task.toml", 'name = "tiny_linear"', 'name = "mine"')
    backbone.mkdir(parents=True)
    (source,) = (ROOT / "backbones").glob("*/vit_t_mae.toml")
    shutil.copy(source, backbone / "vit_mine.toml")
    _edit(backbone / "vit_mine.toml", 'name = "vit_t_mae"', 'name = "vit_mine"')
    monkeypatch.setenv("MAE_BENCH_PATH", str(tmp_path))
    recipes._index.cache_clear()
    return tmp_path


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def run_record(backbone: Backbone, settings: list[str], folder: Path, **changes: Any) -> Path:
    """A record as `runs` would write it now, of the task 'mine'."""
    (kept,) = (ROOT / "results" / "runs" / "tiny_linear" / "vit_t_mae").glob("*.seed0-*.json")
    task = resolve_task("mine", backbone, settings)
    recipe = runs.recipe_of(task, backbone)
    old = read_record(kept).model_dump()
    making = runs.recipe_of(resolve_task("tiny_pretrain", backbone), runs.untrained(backbone))
    made = old | {
        "run_id": f"{old['run_id']}.{folder.name}",
        "weights": old["weights"] | {"maker": {"run_id": "a pre-training", "recipe_hash": digest(making)}},
        "task": "mine",
        "backbone": backbone.name,
        "protocol": task.protocol,
        "recipe_protocol": task.task.protocol,
        "recipe": recipe | {"origins": {}},
        "recipe_hash": digest(recipe),
        "overridden": list(task.overridden),
        "code_hash": TREE.code_hash("classification"),
    }
    return write_record(record_from(made | changes), folder)


def judged(*paths: Path) -> pd.DataFrame:
    return staleness.judge(store.load_frame(paths), TREE)


def stale(*paths: Path) -> list[str]:
    return list(judged(*paths)["stale"])


def test_a_run_of_todays_recipes_is_current(private: Path) -> None:
    mine = load_backbone("vit_mine")
    files = [
        run_record(mine, [], private / "0"),
        run_record(mine, ["base_lr=0.5", "randaug='rand-m9-\"x\"'", "crop_scale=[0.2, 1.0]"], private / "1"),
        run_record(runs.untrained(mine), [], private / "2", weights={"kind": "none"}),
    ]
    rows = judged(*files)
    assert list(rows["stale"]) == ["", "", ""]
    assert not rows["other_code"].any()
    assert list(rows.columns) == [*store.COLUMNS, "stale", "other_code"]


def test_a_value_that_is_set_to_the_schemas_default_is_current(private: Path) -> None:
    """Recipes leave such values out of what is hashed and recorded."""
    model = type(resolve_task("mine", load_backbone("vit_mine")).values)
    feature = sorted(model.FEATURES)[0]
    default = model.model_fields[feature].get_default(call_default_factory=True)
    file = private / "tasks" / "mine" / "task.toml"
    other = next(value for value in (not default, 7, "rewind") if _admits(model, feature, value))
    _edit(file, "base_lr", f"{feature} = {json.dumps(other)}\nbase_lr")
    path = run_record(load_backbone("vit_mine"), [f"{feature}={json.dumps(default)}"], private / "run")
    assert feature in read_record(path).overridden and feature not in read_record(path).recipe["values"]
    assert stale(path) == [""]


def _admits(model: Any, feature: str, value: object) -> bool:
    raw = resolve_task("mine", load_backbone("vit_mine")).values.model_dump() | {feature: value}
    try:
        model.model_validate(raw)
    except ValueError:
        return False
    return True


def test_a_changed_value_names_it(private: Path) -> None:
    path = run_record(load_backbone("vit_mine"), [], private / "run")
    before = resolve_task("mine", load_backbone("vit_mine")).values.batch
    _edit(private / "tasks" / "mine" / "task.toml", f"batch = {before}", "batch = 7")
    assert stale(path) == [f"the task recipe has changed (values.batch: {before} is now 7)"]
    objects = store.frame([read_record(path)])
    assert list(staleness.judge(objects, TREE)["stale"]) == ["the recipe has changed"]


def test_a_changed_backbone_names_it(private: Path) -> None:
    path = run_record(load_backbone("vit_mine"), [], private / "run")
    depth = load_backbone("vit_mine").architecture.depth
    _edit(private / "backbones" / "mine" / "vit_mine.toml", f"depth = {depth}", f"depth = {depth + 1}")
    expected = f"backbone.architecture.depth: {depth} is now {depth + 1}"
    assert stale(path) == [f"the backbone recipe has changed ({expected})"]


def test_words_about_a_backbone_may_change(private: Path) -> None:
    path = run_record(load_backbone("vit_mine"), [], private / "run")
    _edit(private / "backbones" / "mine" / "vit_mine.toml", 'summary = "', 'summary = "Better words. ')
    assert stale(path) == [""]


def test_weights_that_were_made_by_another_recipe(private: Path) -> None:
    """The pre-training's steps have changed: the transfer's own recipe says nothing of that."""
    mine = load_backbone("vit_mine")
    path = run_record(mine, [], private / "run")
    shutil.copytree(ROOT / "tasks" / "tiny_pretrain", private / "tasks" / "my_pretrain")
    task = private / "tasks" / "my_pretrain" / "task.toml"
    _edit(task, 'name = "tiny_pretrain"', 'name = "my_pretrain"')
    backbone = private / "backbones" / "mine" / "vit_mine.toml"
    _edit(backbone, 'task = "tiny_pretrain"', 'task = "my_pretrain"')
    recipes._index.cache_clear()
    mine = load_backbone("vit_mine")
    making = digest(runs.recipe_of(resolve_task("my_pretrain", mine), runs.untrained(mine)))
    weights = read_record(path).weights.model_dump() | {"maker": {"recipe_hash": making}}
    path = run_record(mine, [], private / "again", weights=weights)
    assert stale(path) == [""]
    steps = resolve_task("my_pretrain", mine).values.steps
    _edit(task, f"\nsteps = {steps}", "\nsteps = 7")
    assert stale(path) == ["its weights were made by another recipe"]
    _edit(task, "\nsteps = 7", "\nstep = 7")
    assert stale(path)[0].startswith("its weights cannot be made today: ")


def test_a_new_protocol(private: Path) -> None:
    path = run_record(load_backbone("vit_mine"), [], private / "run")
    protocol = read_record(path).recipe_protocol
    _edit(private / "tasks" / "mine" / "task.toml", protocol, "tiny-linear@9")
    assert stale(path) == [f"protocol {protocol} is now tiny-linear@9"]


def test_recipes_that_are_gone_or_broken(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = load_backbone("vit_mine")
    path = run_record(mine, [], private / "run")
    set_away = run_record(mine, [], private / "set", overridden=["no_such"], protocol="tiny-linear@1+set:x")
    assert "unknown key 'no_such'" in stale(set_away)[0]
    _edit(private / "backbones" / "mine" / "vit_mine.toml", "name = ", "nome = ")
    assert "unknown key 'nome' (did you mean 'name'?)" in stale(path)[0]
    monkeypatch.delenv("MAE_BENCH_PATH")
    assert stale(path) == ["recipe 'mine' is not on the search path"]


def test_an_edited_hash_is_sent_to_the_check(private: Path) -> None:
    path = run_record(load_backbone("vit_mine"), [], private / "run", recipe_hash="9" * 64)
    assert "results check" in stale(path)[0]


def test_smoke_runs_are_not_judged(private: Path) -> None:
    smoke = run_record(
        load_backbone("vit_mine"), [], private, smoke=True, protocol="tiny-linear@1+smoke", recipe_hash="9" * 64
    )
    assert stale(smoke) == [""]


def test_other_code(private: Path) -> None:
    mine = load_backbone("vit_mine")
    files = [run_record(mine, [], private / "a"), run_record(mine, [], private / "b", code_hash="9" * 64)]
    rows = judged(*files).set_index("file")
    assert not rows.loc[str(files[0]), "other_code"]
    assert rows.loc[str(files[1]), "other_code"]


def test_an_empty_frame(private: Path) -> None:
    rows = staleness.judge(store.frame([]), TREE)
    assert rows.empty and rows["other_code"].dtype == bool


def test_each_recipe_is_resolved_once(private: Path) -> None:
    """Ten thousand records have fifty recipes."""
    calls: list[str] = []

    def recipe_of(task: Any, backbone: Any) -> dict[str, Any]:
        calls.append(task.task.name)
        return runs.recipe_of(task, backbone)

    rows = store.load_frame([run_record(load_backbone("vit_mine"), [], private / "run")])
    many = pd.concat([rows] * 50, ignore_index=True)
    staleness.judge(many, Tree(recipe_of, runs.untrained, TREE.code_hash))
    assert calls == ["mine", "tiny_pretrain"]


def test_the_committed_records_are_current() -> None:
    assert set(stale(ROOT / "results" / "runs")) == {""}
