"""From a recipe to a record: folders, protocol ids, resume, smoke, through the public functions."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

import mae_bench
from mae_bench import places, provenance, runs, weights
from mae_bench.engine.job import Options
from mae_bench.recipes import load_backbone, resolve_task

FAST = Options(smoke=True, quiet=True, workers=0)


def _smoke(tmp_path: Path, task: str = "tiny_linear", backbone: str = "vit_t_mae", **more: object) -> runs.Run:
    (one,) = mae_bench.run(task, backbone, options=Options(smoke=True, quiet=True, workers=0, out=tmp_path), **more)  # type: ignore[arg-type]
    return one


def test_a_smoke_run_leaves_one_marked_record(tmp_path: Path) -> None:
    one = _smoke(tmp_path)
    record = json.loads(one.record_file.read_text())
    assert record["smoke"] is True
    assert record["protocol"] == "tiny-linear@1+smoke"
    assert record["weights"]["kind"] == "synthetic"
    assert record["weights"]["load"]["matched"] == record["weights"]["load"]["total"] > 40
    assert record["data"]["synthetic"] is True
    assert 0 <= record["metrics"]["top1"] <= 100
    assert record["effective"]["steps"] == 2
    assert len(record["code_hash"]) == len(record["recipe_hash"]) == 64
    assert [path.name for path in tmp_path.rglob("record*.json")] == ["record.json"]


def test_a_second_run_never_overwrites_and_resume_returns_the_finished_one(tmp_path: Path) -> None:
    first = _smoke(tmp_path)
    second = _smoke(tmp_path)
    assert first.folder != second.folder
    options = Options(smoke=True, quiet=True, workers=0, out=tmp_path, resume=True)
    (third,) = mae_bench.run("tiny_linear", "vit_t_mae", options=options)
    assert third.folder == second.folder
    assert third.record == second.record
    # Same recipe, seed, weights and data on the same machine: the same number.
    assert first.record.metrics == second.record.metrics
    assert first.record.recipe_hash == second.record.recipe_hash


def test_seeds_make_separate_runs_that_differ(tmp_path: Path) -> None:
    options = Options(smoke=True, quiet=True, workers=0, out=tmp_path)
    one, two = mae_bench.run("tiny_linear", "vit_t_mae", seeds=[0, 1], options=options)
    assert (one.record.seed, two.record.seed) == (0, 1)
    assert one.folder != two.folder
    assert one.record.metrics["val_loss"] != two.record.metrics["val_loss"]  # the recorded seed was used


def test_overridden_values_leave_the_protocols_column() -> None:
    backbone = load_backbone("vit_t_mae")
    published = resolve_task("tiny_linear", backbone)
    assert published.protocol == published.task.protocol
    same = resolve_task("tiny_linear", backbone, [f"batch={published.values.batch}"])
    assert same.protocol == published.protocol  # writing out the recipe's own value changes nothing
    other = resolve_task("tiny_linear", backbone, ["batch=64"])
    assert other.protocol.startswith(published.protocol + "+set:")
    assert other.overridden == ("batch",)
    assert resolve_task("tiny_linear", backbone, ["batch=32"]).protocol != other.protocol


def test_recipe_hash_ignores_words_and_machine(tmp_path: Path) -> None:
    task = resolve_task("imagenet_linear", load_backbone("vit_b_mae"))
    backbone = load_backbone("vit_b_mae")
    reworded = backbone.model_copy(update={"summary": "another text"})
    assert runs.recipe_of(task, backbone) == runs.recipe_of(task, reworded)
    shifted = backbone.model_copy(update={"input": backbone.input.model_copy(update={"mean": [0.5, 0.5, 0.5]})})
    assert runs.recipe_of(task, backbone) != runs.recipe_of(task, shifted)


def test_code_hash_covers_the_room_and_what_it_imports() -> None:
    classification = provenance.code_hash("mae_bench.classification")
    assert classification != provenance.code_hash("mae_bench.segmentation")
    files = {path.name for path in provenance._imports(Path(runs.__file__)) if path}
    assert "weights.py" in files and "record.py" in files


def test_code_hash_leaves_the_layout_of_tables_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms import the package, whose ``__init__`` offers everything: tables were part of every run's code."""
    package = tmp_path / "mae_bench"
    shutil.copytree(places.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(places, "PACKAGE", package)
    code_hash = provenance.code_hash.__wrapped__
    before = code_hash("mae_bench.detection")
    for changed, same in (("reporting/tables.py", True), ("cli.py", True), ("encoders/vit.py", False)):
        with (package / changed).open("a", encoding="utf-8") as file:
            file.write("# another line\n")
        assert (code_hash("mae_bench.detection") == before) is same, changed


def test_pretrain_smoke_leaves_an_encoder_that_run_takes(tmp_path: Path) -> None:
    options = Options(smoke=True, quiet=True, workers=0, out=tmp_path)
    (made,) = mae_bench.pretrain("vit_t_mae", options=options)
    encoder = made.folder / runs.ENCODER_FILE
    assert encoder.is_file()
    given = Options(smoke=True, quiet=True, workers=0, out=tmp_path, weights=encoder)
    (one,) = mae_bench.run("tiny_linear", "vit_t_mae", options=given)
    assert one.record.weights.kind == "given"
    assert one.record.weights.maker == {
        "run_id": made.record.run_id,
        "recipe_hash": made.record.recipe_hash,
        "code_hash": made.record.code_hash,
        "git": made.record.git.model_dump(),
        "protocol": "tiny-mae@1+smoke",
        "data": {key: getattr(made.record.data, key) for key in ("name", "fingerprint", "matches")},
    }


def test_an_encoder_says_itself_what_it_was_made_of(tmp_path: Path) -> None:
    """Away from its run's folder, and in the folder of another run, whose record is not of it."""
    options = Options(smoke=True, quiet=True, workers=0, out=tmp_path)
    (made,) = mae_bench.pretrain("vit_t_mae", options=options)
    other = _smoke(tmp_path)
    for place in (tmp_path / "e.safetensors", other.folder / runs.ENCODER_FILE):
        shutil.copy(made.folder / runs.ENCODER_FILE, place)
        source = runs.find_weights(load_backbone("vit_t_mae"), replace(options, weights=place))
        assert runs._maker(source) == {
            "protocol": "tiny-mae@1",
            "data": {key: getattr(made.record.data, key) for key in ("name", "fingerprint", "matches")},
        }


@pytest.mark.parametrize(
    "data",
    [
        *("[]", "{", '{"name": 1}', '{"name": "a", "fingerprint": "b", "matches": true, "more": 1}'),
        '{"name": "\\ud800", "fingerprint": "b", "matches": true}',  # no record could be written
        f'{{"name": "{"a" * 501}", "fingerprint": "b", "matches": true}}',
    ],
)
def test_what_a_file_says_in_another_form_is_nothing(data: str) -> None:
    assert weights._stated({"protocol": "p@1", "data": data}) == {}
    assert weights._stated({"protocol": "p@1"}) == {}
    data = '{"name": "a", "fingerprint": "b", "matches": true}'
    assert weights._stated({"data": data}) == {}
    assert weights._stated({"protocol": "p@1", "data": data})["data"]["fingerprint"] == "b"


def test_eval_only_gives_the_trained_numbers(tmp_path: Path) -> None:
    trained = _smoke(tmp_path, "tiny_finetune", "vit_t_scratch")
    options = Options(
        smoke=True, quiet=True, workers=0, out=tmp_path, eval_only=True, weights=trained.folder / "model.safetensors"
    )
    (again,) = mae_bench.run("tiny_finetune", "vit_t_scratch", options=options)
    assert again.record.eval_only
    assert again.record.images == trained.record.images is not None
    assert again.record.metrics == trained.record.metrics
    assert again.record.effective.get("linear") == trained.record.effective.get("linear")


def test_load_encoder_gives_features(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    encoder = mae_bench.load_encoder("vit_t_scratch")
    tokens = encoder.tokens(torch.zeros(2, 3, 32, 32))
    assert tokens.shape == (2, 65, encoder.width)
    assert not encoder.training


def test_a_lock_is_free_once_left_even_if_a_forked_process_lives_on(tmp_path: Path) -> None:
    """Data loading processes inherit the lock file of weights that are being made, and can outlive it."""
    path = tmp_path / "made"
    with weights.locked(path):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with path.with_name("made.lock").open("w") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while the lock is held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
