"""The segmentation pipeline from a job to an outcome: learning, resume, evaluation alone, smoke."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from segmentation_cases import backbone, job, values
from two_processes import in_two_processes

from mae_bench.checkpoints.load import read_tensors
from mae_bench.data.ade20k import read_label
from mae_bench.engine.job import Job, Outcome
from mae_bench.errors import UserError
from mae_bench.recipes import load_backbone, resolve_task
from mae_bench.segmentation.run import MODEL_FILE, run, smoke


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Outcome]:
    """Four steps with an evaluation in the middle; sliding windows, all parts of the model on."""
    this = job(tmp_path_factory.mktemp("trained"), values(eval_every_steps=2, drop_path=0.1))
    return this, run(this)


def test_an_outcome_says_what_was_measured(trained: tuple[Job, Outcome]) -> None:
    this, outcome = trained
    assert set(outcome.metrics) == set(outcome.best) == set(outcome.baseline) == {"mIoU", "mAcc", "aAcc"}
    assert all(0 <= value <= 100 for value in outcome.metrics.values())
    assert set(outcome.per_class) == set(this.dataset.classes)
    evaluations = [point for point in outcome.history if "mIoU" in point]
    assert [point["step"] for point in evaluations] == [2, 4]
    assert outcome.metrics == {key: evaluations[-1][key] for key in outcome.metrics}
    assert outcome.load["total"] > 40
    assert outcome.parameters["total"] == outcome.parameters["trainable"] > 50_000
    assert any("BatchNorm instead of SyncBatchNorm: statistics over 4 images" in note for note in this.notes)


def test_majority_baseline_follows_from_the_label_files(trained: tuple[Job, Outcome]) -> None:
    this, outcome = trained
    labels = np.concatenate([read_label(label).ravel() for _, label in this.dataset.masks("val")])
    counts = np.bincount(labels[labels != 255], minlength=9)[1:]
    share = 100 * counts.max() / counts.sum()
    assert outcome.baseline["aAcc"] == pytest.approx(share)
    assert outcome.baseline["mIoU"] == pytest.approx(share / (counts > 0).sum())


def test_a_resumed_run_equals_the_uninterrupted_one(trained: tuple[Job, Outcome], tmp_path: Path) -> None:
    this, straight = trained
    again = job(tmp_path, this.task.values, resume=True)
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(this.folder / "checkpoints" / "step_000000003.pt", tmp_path / "checkpoints")
    resumed = run(again)
    assert resumed.metrics == straight.metrics
    assert resumed.history == straight.history
    first, second = (read_tensors(folder / MODEL_FILE)[0] for folder in (this.folder, tmp_path))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_workers_change_nothing(trained: tuple[Job, Outcome], tmp_path: Path) -> None:
    this, outcome = trained
    assert run(job(tmp_path, this.task.values, workers=2)).metrics == outcome.metrics


def test_evaluation_alone_equals_the_last_one_of_training(trained: tuple[Job, Outcome], tmp_path: Path) -> None:
    this, outcome = trained
    alone = run(job(tmp_path, this.task.values, eval_only=True, weights=this.folder / MODEL_FILE, seed=7))
    assert alone.metrics == outcome.metrics
    assert alone.per_class == outcome.per_class
    assert alone.effective.get("linear") == outcome.effective.get("linear")
    assert alone.baseline == outcome.baseline


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool_scales": [1, 2, 3, 4]}, "was made with model"),
        ({"head_width": 8}, "decode_head"),
        ({"rel_pos": False}, "relative_position_bias_table"),
    ],
)
def test_evaluation_alone_refuses_another_model(
    trained: tuple[Job, Outcome], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    this, _ = trained
    other = values(**(this.task.values.model_dump() | change))
    with pytest.raises(UserError, match=message):
        run(job(tmp_path, other, eval_only=True, weights=this.folder / MODEL_FILE))


def test_accumulation_says_over_how_many_images_batch_norm_went(tmp_path: Path) -> None:
    this = job(tmp_path, values(steps=1), micro_batch=2)
    outcome = run(this)
    assert outcome.effective["accumulation"] == 2
    assert any("over 2 images, batch 4" in note for note in this.notes)


def test_batch_norm_over_one_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 images"):
        run(job(tmp_path, values(), micro_batch=1))


def test_values_are_checked_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="taps"):
        run(job(tmp_path, values(taps=[3, 5, 7, 11])))


@pytest.mark.parametrize("name", ["vit_b_mae", "vit_l_mae", "vit_h_mae", "vit_t_mae"])
@pytest.mark.parametrize("task", ["ade20k", "tiny_ade20k"])
def test_smoke_values_fit_every_size(task: str, name: str) -> None:
    from mae_bench.segmentation.adapter import check_values

    recipe = load_backbone(name)
    resolved = resolve_task(task, recipe)
    reduced = resolved.changed(**smoke(resolved.values, recipe)).values
    check_values(reduced, recipe, 150)
    assert reduced.image_size == 4 * recipe.architecture.patch
    assert reduced.taps == resolved.values.taps and reduced.head_width == resolved.values.head_width


@pytest.mark.slow
def test_two_processes_train_and_count_every_picture_once(trained: tuple[Job, Outcome], tmp_path: Path) -> None:
    this, outcome = trained
    first, second = in_two_processes("segmentation_two_processes.py", tmp_path, str(this.folder / MODEL_FILE))
    assert first == second
    assert first["alone"] == [outcome.metrics, outcome.per_class, outcome.baseline]
    assert any("statistics over 2 images, batch 4" in note for note in first["notes"])
    assert (tmp_path / "together" / MODEL_FILE).is_file()


@pytest.mark.slow
def test_the_real_graph_of_vit_b_runs(tmp_path: Path) -> None:
    """ViT-B/16's sizes and ADE20K's values, two steps."""
    recipe = load_backbone("vit_b_scratch")
    resolved = resolve_task("ade20k", recipe)
    short = {"steps": 2, "warmup_steps": 1, "eval_every_steps": 0, "batch": 2}
    reduced = resolved.changed(**(smoke(resolved.values, recipe) | short)).values
    this = job(tmp_path, reduced)
    this.backbone = backbone(**recipe.architecture.model_dump())
    outcome = run(this)
    assert 0 <= outcome.metrics["mIoU"] <= 100
    assert outcome.parameters["total"] > 150e6


@pytest.mark.slow
def test_overfitting_eight_pictures_reaches_80_miou(tmp_path: Path) -> None:
    chosen = values(
        steps=150,
        batch=8,
        base_lr=2e-3,
        warmup_steps=10,
        layer_decay=1.0,
        photometric=False,
        resize=[96, 80],
        resize_ratio=[0.9, 1.1],
        max_class_share=1.0,
        image_size=48,
        stride=32,
        dropout=0.0,
        head_width=32,
    )
    this = job(tmp_path, chosen, val="train")
    outcome = run(this)
    assert outcome.metrics["mIoU"] >= 80, outcome
    assert outcome.baseline["mIoU"] < 20
    losses = [point["loss"] for point in outcome.history if "loss" in point]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
