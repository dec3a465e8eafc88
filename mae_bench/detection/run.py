"""The detection pipeline: Mask R-CNN with ViTDet's pyramid (arXiv 2203.16527) on COCO-format data, on detectron2."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from torch import nn

from mae_bench.checkpoints.load import load_model, save_model
from mae_bench.data import CocoSplit
from mae_bench.detection import samples
from mae_bench.detection.adapter import ENCODER_PREFIX, build_model, check, load_encoder, smoke, untrained_encoder
from mae_bench.detection.data import evaluation_batch, evaluation_examples, read_split, training_examples
from mae_bench.detection.evaluate import Evaluation, evaluate
from mae_bench.detection.logs import logged
from mae_bench.detection.train import Training
from mae_bench.engine import distributed
from mae_bench.engine.job import Job, Outcome
from mae_bench.engine.optim import count_parameters
from mae_bench.engine.plan import make_plan
from mae_bench.engine.samplers import ExactShard
from mae_bench.engine.seeds import Stream, derive, seed_all
from mae_bench.errors import UserError
from mae_bench.schema import DetectionValues

__all__ = ["run", "smoke"]


def run(job: Job) -> Outcome:
    """Train on the images with objects and evaluate on all images of the validation split, or evaluate only.

    Metrics are box_AP, mask_AP and their parts, in percent. The trained model is left as ``model.safetensors``.
    """
    check(job.task.values, job.backbone)
    with logged(job.folder / "log.txt" if distributed.main_process() else Path(os.devnull)):
        return _evaluate_only(job) if job.options.eval_only else _train(job)


def _train(job: Job) -> Outcome:
    values: DetectionValues = job.task.values
    examples = training_examples(read_split(job.dataset.coco("train")), values, job)
    plan = make_plan(values, len(examples), job.options, distributed.world_size())
    scorer = _Scorer(job)
    encoder, report = load_encoder(job.backbone, values, job.encoder_file, job.seed)
    seed_all(derive(Stream.INIT, job.seed))  # of the pyramid and the heads, which detectron2 initialises
    model = build_model(encoder, values, len(job.dataset.classes), job.backbone.input)
    report.complete(model, ENCODER_PREFIX)
    distributed.say(job.options, report.line())
    trained = Training(model, job, plan, scorer).train(examples)
    file = job.folder / "model.safetensors"
    if distributed.main_process():
        save_model(file, model.state_dict(), _identity(job))
    outcome = _outcome(model, trained.last, scorer)
    outcome.best, outcome.history = trained.best, trained.history
    outcome.effective = trained.effective | {"train_images": len(examples), "category_ids": scorer.category_ids}
    outcome.load, outcome.weights = report.as_dict(), file
    return outcome


def _evaluate_only(job: Job) -> Outcome:
    values: DetectionValues = job.task.values
    assert job.options.weights is not None, "the command line asks for it"
    encoder = untrained_encoder(job.backbone, values)
    model = build_model(encoder, values, len(job.dataset.classes), job.backbone.input)
    load_model(model, job.options.weights, _identity(job))
    device = distributed.device(job.options)
    scorer = _Scorer(job)
    outcome = _outcome(model, scorer(model.to(device)), scorer)
    outcome.effective = {
        "world_size": distributed.world_size(),
        "precision": "fp32",
        "device": device.type,
        "category_ids": scorer.category_ids,
    }
    return outcome


class _Scorer:
    """The one evaluation of a job: all images of the validation split, whether they show objects or not."""

    def __init__(self, job: Job) -> None:
        self.split: CocoSplit = job.dataset.coco("val")
        if not self.split.objects:
            raise UserError(f"{self.split.annotations} has no object to find; average precision is undefined there")
        self.examples = evaluation_examples(read_split(self.split), job.task.values)
        self.shard = list(ExactShard(len(self.examples), distributed.rank(), distributed.world_size()))
        self.batch = evaluation_batch(job.task.values)
        self.workers = job.options.workers
        self.quiet = job.options.quiet or not distributed.main_process()

    @property
    def category_ids(self) -> list[int]:
        """The data's category ids in the order of the model's classes; for the record."""
        return list(self.split.ids)

    def __call__(self, model: nn.Module) -> Evaluation:
        return evaluate(
            model,
            self.examples,
            self.split,
            shard=self.shard,
            batch=self.batch,
            workers=self.workers,
            quiet=self.quiet,
        )


def _identity(job: Job) -> dict[str, str]:
    """What a trained model's file must say for it to be evaluated by this job."""
    return {
        "task": job.task.task.name,
        "backbone": job.backbone.name,
        "classes": json.dumps(job.dataset.classes),
        **job.identity,
    }


def _outcome(model: nn.Module, evaluation: Evaluation, scorer: _Scorer) -> Outcome:
    return Outcome(
        metrics=evaluation.metrics,
        best=dict(evaluation.metrics),
        per_class=evaluation.per_class,
        baseline=evaluation.baseline,
        parameters=count_parameters(model),
        samples=partial(samples.draw, model, scorer.examples, scorer.split.names),
    )
