"""The detection pipeline from a job to an outcome: learning, resume, evaluation alone, processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from detection_cases import IDS, SPEC, backbone, job, values, write_data
from detectron2.utils.events import EventStorage
from two_processes import in_two_processes

from mae_bench.checkpoints.load import read_tensors
from mae_bench.data import open_dataset
from mae_bench.detection.adapter import build_model, load_encoder
from mae_bench.detection.data import read_split, training_examples
from mae_bench.detection.run import run
from mae_bench.detection.train import StepLoss
from mae_bench.engine.job import Job, Outcome
from mae_bench.errors import UserError
from mae_bench.recipes import load_backbone, resolve_task


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Outcome]:
    """Three steps of two forward passes, with an evaluation after the second step."""
    root = tmp_path_factory.mktemp("trained")
    settings = values(batch=4, eval_every_steps=2, ema=0.5, drop_path=0.2, clip_grad=1.0, precision="fp16")
    this = job(root / "run", settings, write_data(root / "data"), micro_batch=2)
    return this, run(this)


def test_an_outcome_says_what_was_done(trained: tuple[Job, Outcome]) -> None:
    this, outcome = trained
    assert set(outcome.metrics) == set(outcome.best) == set(outcome.baseline) > {"box_AP", "mask_AP"}
    assert [point["step"] for point in outcome.history if "box_AP" in point] == [2, 3]
    assert [point["step"] for point in outcome.history if "loss" in point] == [1, 2, 3]
    assert outcome.effective["accumulation"] == 2
    assert outcome.effective["precision"] == "fp32"
    assert outcome.effective["train_images"] == 3
    assert outcome.effective["category_ids"] == IDS
    assert outcome.parameters["total"] == outcome.parameters["trainable"]
    assert len(outcome.load["new"]) == outcome.load["total"]
    assert sorted(note.split(" ")[0] for note in this.notes) == ["1", "precision"]


def test_a_resumed_run_equals_the_uninterrupted_one(trained: tuple[Job, Outcome], tmp_path: Path) -> None:
    this, straight = trained
    again = job(tmp_path, this.task.values, this.dataset, micro_batch=2, resume=True)
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(this.folder / "checkpoints/step_000000002.pt", tmp_path / "checkpoints")
    resumed = run(again)
    assert resumed.history == straight.history
    assert resumed.metrics == straight.metrics
    first, second = (read_tensors(folder / "model.safetensors")[0] for folder in (this.folder, tmp_path))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_workers_change_nothing(trained: tuple[Job, Outcome], tmp_path: Path) -> None:
    this, straight = trained
    other = run(job(tmp_path, this.task.values, this.dataset, micro_batch=2, workers=2))
    assert other.history == straight.history


def test_another_seed_gives_another_model(trained: tuple[Job, Outcome], tmp_path: Path) -> None:
    this, straight = trained
    other = run(job(tmp_path, values(steps=1, batch=4), this.dataset, seed=1))
    assert other.history[0]["loss"] != straight.history[0]["loss"]


def test_evaluation_alone_equals_the_last_one_of_training(trained: tuple[Job, Outcome], tmp_path: Path) -> None:
    this, straight = trained
    weights = this.folder / "model.safetensors"
    alone = run(job(tmp_path, this.task.values, this.dataset, eval_only=True, weights=weights, seed=5))
    assert alone.metrics == straight.metrics
    assert alone.per_class == straight.per_class
    assert alone.baseline == straight.baseline
    shallow = job(tmp_path, this.task.values, this.dataset, eval_only=True, weights=weights)
    shallow.backbone = backbone().model_copy(update={"name": "vit_other"})
    with pytest.raises(UserError, match="was made with backbone"):
        run(shallow)


def test_a_loss_that_is_not_finite_names_step_and_images(tmp_path: Path) -> None:
    this = job(tmp_path / "run", values(base_lr=1e25, warmup_steps=1), write_data(tmp_path / "data"))
    with pytest.raises(UserError, match=r"loss is not finite at step 2, image ids \d+, \d+ .*lower base_lr"):
        run(this)


def test_a_step_is_the_mean_of_its_forward_passes(tmp_path: Path) -> None:
    dataset, settings = write_data(tmp_path / "data"), values()
    this = job(tmp_path, settings, dataset)
    examples = training_examples(read_split(dataset.coco("train")), settings, this)
    model = build_model(load_encoder(backbone(), settings, None, 0)[0], settings, 3, backbone().input)
    pictures = [examples[index] for index in range(3)]
    step = StepLoss(model, torch.amp.GradScaler("cpu", enabled=False))
    gradients, totals = [], []
    for accumulated in (True, False):
        model.zero_grad()
        torch.manual_seed(0)
        with EventStorage():
            if accumulated:
                torch.autograd.backward(list(step([[one] for one in pictures]).values()))
                totals.append(step.total)
            else:
                losses = torch.stack([torch.stack(list(model([one]).values())).sum() for one in pictures])
                torch.autograd.backward(losses.mean())
                totals.append(losses.mean().item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_a_validation_split_without_objects_is_refused(tmp_path: Path) -> None:
    dataset = write_data(tmp_path / "data")
    file = dataset.coco("val").annotations
    file.write_text(json.dumps(json.loads(file.read_text()) | {"annotations": []}))
    empty = open_dataset(SPEC, dataset.root)
    with pytest.raises(UserError, match="average precision is undefined"):
        run(job(tmp_path / "run", values(), empty))


def test_the_terminal_stays_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(job(tmp_path / "run", values(steps=1), write_data(tmp_path / "data")))
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "run/log.txt").read_text()
    assert "Starting training" in log
    assert "Average Precision" in log


@pytest.mark.slow
def test_eight_made_pictures_are_learnt_by_heart(tmp_path: Path) -> None:
    recipe = load_backbone("vit_t_scratch")
    spec = resolve_task("tiny_coco", recipe).task.data
    root = open_dataset(spec).root
    content = json.loads((root / spec.train_annotations).read_text())
    labelled = {one["image_id"] for one in content["annotations"] if not one["iscrowd"]}
    content["images"] = [image for image in content["images"] if image["id"] in labelled][:8]
    kept = {image["id"] for image in content["images"]}
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] in kept]
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for image in content["images"]:
            shutil.copy(root / spec.train / image["file_name"], tmp_path / "data" / split)
    (tmp_path / "data/annotations").mkdir()
    for split in ("train", "val"):
        (tmp_path / f"data/annotations/{split}.json").write_text(json.dumps(content))
    settings = values(
        steps=150, batch=8, base_lr=2e-3, warmup_steps=20, image_size=64, window=0, global_blocks=[], scale=[1.0, 1.0]
    ).model_copy(update={"pyramid_width": 32, "box_fc": 64, "head_convs": 32, "roi_batch": 32, "rpn_batch": 64})
    dataset = open_dataset(SPEC, tmp_path / "data")
    outcome = run(job(tmp_path / "run", settings, dataset))
    assert outcome.metrics["box_AP"] >= 50
    assert outcome.metrics["mask_AP"] >= 50
    alone = run(job(tmp_path / "alone", settings, dataset, eval_only=True, weights=outcome.weights))
    assert alone.metrics == outcome.metrics


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    first, second = in_two_processes("detection_two_processes.py", tmp_path)
    assert first == second
    assert first["effective"]["world_size"] == 2
    assert first["effective"]["accumulation"] == 2
    assert set(first["metrics"]) > {"box_AP", "mask_AP"}
    assert re.fullmatch(r"[0-9a-f]{64}", first["parameters"])
