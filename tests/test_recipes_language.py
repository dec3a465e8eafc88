"""The recipe language: layers, origins, --set and its types, names, and errors that say what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mae_bench.errors import UserError
from mae_bench.recipes import Origin, digest, find, index, load_backbone, load_task, resolve_task
from mae_bench.schema import ClassificationValues

BACKBONE = load_backbone("vit_b_mae")
BASE = """
name = "toy"
engine = "classification"
protocol = "toy@1"
metric = "top1"
summary = "a toy"
reference = "ours"

[data]
format = "image_folder"
train = "train"
val = "val"

[[layer]]
source = "a paper"
values = { mode = "linear", image_size = 32, pool = "cls", head_init_std = 0.01, batch = 8, base_lr = 0.1 }

[[layer]]
source = "another"
values = { weight_decay = 0.0, epochs = 2 }
"""


def _toy(tmp_path: Path, text: str = BASE) -> str:
    folder = tmp_path / "toy"
    folder.mkdir(exist_ok=True)
    (folder / "task.toml").write_text(text)
    return str(folder)


def _complaint(call: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_later_layers_win_and_origins_follow(tmp_path: Path) -> None:
    text = BASE + (
        '[[layer]]\nwhen = { size = ["b"] }\nsource = "third"\nvalues = { epochs = 5, flip = false }\n'
        'sources = { flip = "ours" }\n'
        '[[layer]]\nwhen = { size = ["l"] }\nsource = "fourth"\nvalues = { epochs = 7 }\n'
    )
    resolved = resolve_task(_toy(tmp_path, text), BACKBONE)
    assert (resolved.values.epochs, resolved.values.flip) == (5, False)
    assert resolved.origins["epochs"] == Origin("tasks/toy/task.toml layer 3 (size b)", "third")
    assert resolved.origins["flip"].source == "ours"
    assert resolved.origins["batch"] == Origin("tasks/toy/task.toml layer 1 (all)", "a paper")
    assert resolved.origins["mixup"] == Origin("default", "schema")
    assert resolved.ours == ("flip",)


def test_refusal_says_why(tmp_path: Path) -> None:
    text = BASE.replace("[[layer]]", '[[refuse]]\nwhen = { init = ["mae"] }\nreason = "no such thing"\n[[layer]]', 1)
    task = _toy(tmp_path, text)
    assert _complaint(resolve_task, task, BACKBONE) == "task 'toy' cannot run with 'vit_b_mae': no such thing"
    resolve_task(task, load_backbone("vit_b_scratch"))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("epochs = 2", "epcohs = 2", "unknown key 'epcohs' in layer 2 (did you mean 'epochs'?)"),
        ('metric = "top1"', 'metrik = "top1"', "unknown key 'metrik' (did you mean 'metric'?)"),
        ('train = "train"', 'trian = "train"', "unknown key 'data.trian' (did you mean 'train'?)"),
        ('protocol = "toy@1"', 'protocol = "toy"', "protocol"),
        ('engine = "classification"', 'engine = "classifier"', "engine"),
        ('source = "a paper"', 'source = ""', "layer.0.source"),
        ('source = "a paper"\n', "", "key 'layer.0.source' is missing"),
        ('name = "toy"', 'name = "tox"', "differs from its folder's name"),
        ('source = "another"', 'source = "x"\nsources = { flip = "y" }', "sources names 'flip'"),
        ('source = "another"', 'source = "x"\nwhen = { size = ["xl"] }', "layer.1.when.size"),
    ],
)
def test_a_wrong_task_is_named(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert BASE.count(old) == 1
    message = _complaint(load_task, _toy(tmp_path, BASE.replace(old, new)))
    assert expected in message and "task.toml" in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("epochs = 2", "epochs = 2, steps = 3", "give epochs or steps: exactly one of the two"),
        ("epochs = 2", "flip = true", "give epochs or steps: exactly one of the two"),
        ("epochs = 2", "epochs = 2, warmup_epochs = 1, warmup_steps = 1", "at most one of the two"),
        ("epochs = 2", 'epochs = "2"', "epochs"),
        ("batch = 8", "batch = 8.0", "batch"),
        ("batch = 8", "batch = 0", "batch"),
        ('pool = "cls"', 'pool = "max"', "pool"),
        ("base_lr = 0.1", "base_lr = nan", "base_lr"),
        ("weight_decay = 0.0, ", "", "key 'weight_decay' is missing"),
        ("epochs = 2", 'epochs = 2, no_decay = ["norms"]', "no_decay"),
    ],
)
def test_a_wrong_value_is_named(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert BASE.count(old) == 1
    message = _complaint(resolve_task, _toy(tmp_path, BASE.replace(old, new)), BACKBONE)
    assert expected in message and "task 'toy' for 'vit_b_mae'" in message


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("epochs=3", "epochs", 3.0),
        ("epochs = 0.5", "epochs", 0.5),
        ("batch=16", "batch", 16),
        ("pool=mean", "pool", "mean"),
        ('pool="mean"', "pool", "mean"),
        ("flip=false", "flip", False),
        ("crop_scale=[0.5, 1.0]", "crop_scale", (0.5, 1.0)),
        ("no_decay=[]", "no_decay", ()),
        ("base_lr=1e-3", "base_lr", 1e-3),
    ],
)
def test_set_is_typed(setting: str, key: str, value: Any, tmp_path: Path) -> None:
    task = _toy(tmp_path)
    changed = resolve_task(task, BACKBONE, [setting])
    assert getattr(changed.values, key) == value
    assert type(getattr(changed.values, key)) is type(value)
    assert changed.overridden == (key,)
    assert changed.origins[key] == Origin("--set", "command line")
    assert changed.protocol.startswith("toy@1+set:")


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        (["epochs"], "expected key=value"),
        (["epohcs=3"], "unknown key 'epohcs' (did you mean 'epochs'?)"),
        (["taps=[1, 2, 3, 4]"], "unknown key 'taps'"),
        (["epochs='3'"], "epochs"),
        (["epochs=three"], "epochs"),
        (["batch=1.5"], "batch"),
        (["epochs=1", "epochs=2"], "'epochs' is set twice"),
        (["steps=10"], "exactly one of the two"),
        (["epochs="], "epochs"),
    ],
)
def test_wrong_settings(settings_: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in _complaint(resolve_task, _toy(tmp_path), BACKBONE, settings_)


def test_a_setting_that_changes_nothing_stays_in_the_column(tmp_path: Path) -> None:
    same = resolve_task(_toy(tmp_path), BACKBONE, ["epochs=2"])
    assert (same.overridden, same.protocol) == ((), "toy@1")


def test_protocol_of_an_override_is_a_function_of_what_changed(tmp_path: Path) -> None:
    task = _toy(tmp_path)
    ids = {
        resolve_task(task, BACKBONE, settings_).protocol
        for settings_ in (["epochs=3", "batch=4"], ["batch=4", "epochs=3.0"], ["batch=4", "epochs=3", "flip=true"])
    }
    assert len(ids) == 1
    assert resolve_task(task, BACKBONE, ["epochs=4"]).protocol not in ids


def test_names_paths_and_the_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did you mean 'imagenet_linear'?" in _complaint(find, "task", "imagenet_liner")
    assert "did you mean 'vit_b_mae'?" in _complaint(find, "backbone", "vit_b_mea")
    assert "no task recipe at" in _complaint(find, "task", str(tmp_path / "absent"))
    (tmp_path / "tasks").mkdir()
    _toy(tmp_path / "tasks")
    _toy_shadow = tmp_path / "tasks" / "tiny_linear"
    _toy_shadow.mkdir()
    (_toy_shadow / "task.toml").write_text(BASE.replace('name = "toy"', 'name = "tiny_linear"'))
    monkeypatch.setenv("MAE_BENCH_PATH", str(tmp_path))
    assert load_task("toy").protocol == "toy@1"
    assert load_task("tiny_linear").protocol == "tiny-linear@1", "the checkout comes before $MAE_BENCH_PATH"
    assert index("task")["toy"] == tmp_path / "tasks" / "toy" / "task.toml"


def test_a_recipe_that_is_no_text(tmp_path: Path) -> None:
    folder = Path(_toy(tmp_path))
    (folder / "task.toml").write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in _complaint(load_task, str(folder))
    (folder / "task.toml").write_text("#" * ((1 << 20) + 1))
    assert "not a recipe" in _complaint(load_task, str(folder))


@settings(max_examples=60)
@given(
    key=st.sampled_from(sorted(ClassificationValues.model_fields)),
    place=st.integers(0, 30),
    letter=st.sampled_from("qxz"),
)
def test_any_slip_of_a_letter_is_an_error(key: str, place: int, letter: str) -> None:
    place %= len(key) + 1
    slip = key[:place] + letter + key[place:]
    message = _complaint(resolve_task, "tiny_linear", BACKBONE, [f"{slip}=1"])
    assert f"unknown key '{slip}'" in message and "did you mean" in message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_digest_is_canonical(value: Any) -> None:
    """Order of keys does not matter; a round trip through JSON does not either."""
    turned = dict(reversed(value.items())) if isinstance(value, dict) else value
    assert digest(value) == digest(turned) == digest(json.loads(json.dumps(value)))
