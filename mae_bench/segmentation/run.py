"""The segmentation pipeline: train UperNet on a backbone and evaluate it, or evaluate a trained model alone.

Protocol: MAE appendix A.4 (arXiv 2111.06377) as re-implemented by BEiT's and mmsegmentation's ADE20K configs.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import cv2
from mmengine.dataset import pseudo_collate

from mae_bench.checkpoints.load import build_encoder, load_model, save_model
from mae_bench.encoders.vit import Encoder, EncoderOptions
from mae_bench.engine import distributed, onednn
from mae_bench.engine.job import Job, Outcome
from mae_bench.engine.logs import mm_logs
from mae_bench.engine.optim import build_optimizer, count_parameters, parameter_groups
from mae_bench.engine.plan import Plan, make_plan
from mae_bench.engine.runner import fit
from mae_bench.engine.seeds import Stream, derive
from mae_bench.errors import UserError
from mae_bench.schema import Backbone, SegmentationValues
from mae_bench.segmentation import samples
from mae_bench.segmentation.adapter import ENCODER_PREFIX, Norm, Segmenter, build_segmenter, check_values
from mae_bench.segmentation.data import eval_set, train_set
from mae_bench.segmentation.evaluate import Evaluator

MODEL_FILE = "model.safetensors"


def run(job: Job) -> Outcome:
    """Train and evaluate, or, with ``eval_only``, evaluate the trained model in ``options.weights``."""
    values: SegmentationValues = job.task.values
    cv2.setNumThreads(0)  # inherited by data loading processes, each of which would otherwise use every core
    check_values(values, job.backbone, len(job.dataset.classes))
    _note_own(job)
    zero_is_other = job.task.task.data.zero_is_other
    pairs = job.dataset.masks("val")
    evaluator = Evaluator(
        eval_set(pairs, job.dataset.classes, zero_is_other, values),
        job.options.workers,
        job.options.quiet or not distributed.main_process(),
    )
    outcome = _evaluate_only(job, evaluator) if job.options.eval_only else _train(job, evaluator)
    if evaluator.scores.absent:
        job.note(
            f"{evaluator.scores.absent} of {len(evaluator.names)} classes are neither in the validation labels nor "
            "predicted: mIoU is the mean over the others"
        )
    outcome.per_class, outcome.baseline = evaluator.scores.per_class, evaluator.baseline
    return outcome


def smoke(values: SegmentationValues, backbone: Backbone) -> dict[str, Any]:
    """Sizes that keep a smoke run of a large model within memory and a minute: crops of 4 x 4 patches, and pictures
    resized to about one crop, so that sliding still slides."""
    size = 4 * backbone.architecture.patch
    stride = max(1, size * values.stride // values.image_size) if values.test_mode == "slide" else 0
    longest = 2 * size if values.test_mode == "slide" else size
    return {"image_size": size, "resize": (longest, size), "stride": stride}


def _note_own(job: Job) -> None:
    """The task adds relative positions and layer scale where an encoder lacks them; weights that have them win."""
    values, architecture = job.task.values, job.backbone.architecture
    for name, own in (("rel_pos", architecture.rel_pos == "bias"), ("layer_scale", architecture.layer_scale)):
        if own and (asked := getattr(values, name)):
            job.note(f"{name} {str(asked).lower()} of the task is not used: the weights bring their own")


def _encoder_options(values: SegmentationValues, patch: int) -> EncoderOptions:
    side = values.image_size // patch
    return {
        "grid": (side, side),
        "final_norm": False,
        "rel_pos": "bias" if values.rel_pos else "none",
        "layer_scale": values.layer_scale,
        "drop_path": values.drop_path,
    }


def _build(job: Job, encoder: Encoder, norm: Norm) -> Segmenter:
    with mm_logs(job.folder):  # mmengine tells at length how it initialised what
        model = build_segmenter(
            encoder,
            job.task.values,
            job.backbone.input,
            len(job.dataset.classes),
            norm=norm,
            seed=derive(Stream.INIT, job.seed),
        )
    model.to(distributed.device(job.options))
    return model


def _identity(job: Job) -> dict[str, str]:
    """What a trained model must have in common with the run that evaluates it, beside names and shapes of tensors."""
    values: SegmentationValues = job.task.values
    return {
        "task": job.task.task.name,
        "backbone": job.backbone.name,
        "classes": json.dumps(job.dataset.classes),
        "model": json.dumps({"taps": values.taps, "pool_scales": values.pool_scales}),
        **job.identity,
    }


def _evaluate_only(job: Job, evaluator: Evaluator) -> Outcome:
    architecture = job.backbone.architecture
    assert job.options.weights is not None
    model = _build(job, Encoder(architecture, **_encoder_options(job.task.values, architecture.patch)), "BN")
    load_model(model, job.options.weights, _identity(job))
    device = distributed.device(job.options)
    onednn.place(model, device)
    metrics = evaluator(model)
    effective = {"device": device.type, "world_size": distributed.world_size()} | onednn.effective(device)
    drawn = partial(samples.draw, model, evaluator)
    return Outcome(metrics, effective=effective, parameters=count_parameters(model), samples=drawn)


def _train(job: Job, evaluator: Evaluator) -> Outcome:
    values: SegmentationValues = job.task.values
    architecture = job.backbone.architecture
    pairs = job.dataset.masks("train")
    plan = make_plan(values, len(pairs), job.options, distributed.world_size())
    encoder, report = build_encoder(
        job.backbone, job.encoder_file, seed=job.seed, **_encoder_options(values, architecture.patch)
    )
    model = _build(job, encoder, _norm(job, plan))
    report.complete(model, ENCODER_PREFIX)
    distributed.say(job.options, report.line())
    groups = parameter_groups(model, values, encoder_prefix=ENCODER_PREFIX, depth=architecture.depth)
    trained = fit(
        model,
        train_set(pairs, job.dataset.classes, job.task.task.data.zero_is_other, values),
        pseudo_collate,
        job=job,
        values=values,
        plan=plan,
        optimizer=build_optimizer(groups, values),
        evaluate=evaluator,
        metric="mIoU",
        unit="epoch" if values.epochs else "step",
        describe=lambda index: str(pairs[index][0]),
    )
    weights = job.folder / MODEL_FILE
    if distributed.main_process():
        save_model(weights, model.state_dict(), _identity(job))
    return Outcome(
        metrics=trained.last,
        best=trained.best,
        history=trained.history,
        effective=trained.effective,
        load=report.as_dict(),
        parameters=count_parameters(model),
        weights=weights,
        samples=partial(samples.draw, model, evaluator),
    )


def _norm(job: Job, plan: Plan) -> Norm:
    """SyncBN, which the protocol asks for, where processes on GPUs can share statistics; plain BN elsewhere. The number
    of images behind a statistic is noted where it is not the protocol's whole batch."""
    synchronised = plan.world_size > 1 and distributed.device(job.options).type == "cuda"
    images = plan.micro_batch * (plan.world_size if synchronised else 1)
    if images == 1:
        raise UserError(
            "batch norm over a single image has no statistic (its pooled maps are one pixel): raise --micro-batch or "
            "--set batch to give each process 2 images or more at once"
        )
    if not synchronised:
        job.note(f"BatchNorm instead of SyncBatchNorm: statistics over {images} images, batch {plan.batch}")
    elif images != plan.batch:
        job.note(f"SyncBatchNorm over {images} images at once, batch {plan.batch} by accumulation")
    return "SyncBN" if synchronised else "BN"
