"""The classification pipeline: linear probe, fine-tuning, and supervised training from scratch."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

from mae_bench.checkpoints.load import LoadReport, build_encoder, load_model, save_encoder, save_model
from mae_bench.classification import samples
from mae_bench.classification.adapter import Classifier, check_pooling, needs_fc_norm
from mae_bench.classification.data import Pictures, collate, training_transform
from mae_bench.classification.evaluate import Evaluation
from mae_bench.encoders.vit import Encoder, EncoderOptions
from mae_bench.engine import distributed, onednn
from mae_bench.engine.job import Job, Outcome
from mae_bench.engine.oddities import note_oddities
from mae_bench.engine.optim import build_optimizer, count_parameters, parameter_groups
from mae_bench.engine.plan import Plan, make_plan
from mae_bench.engine.runner import Fit, fit
from mae_bench.errors import UserError
from mae_bench.recipes import digest
from mae_bench.schema import Backbone, ClassificationValues


def smoke(values: ClassificationValues, backbone: Backbone) -> dict[str, Any]:
    """Values that a smoke run reduces: the image size, to 8 x 8 patches, or 4 x 4 for wide encoders."""
    patches = 8 if backbone.architecture.width < 1024 else 4
    return {"image_size": min(values.image_size, patches * backbone.architecture.patch)}


def run(job: Job) -> Outcome:
    """Train and evaluate, or with ``eval_only`` evaluate the trained model ``options.weights``.

    Leaves ``model.safetensors`` in the run folder, with the weights that were evaluated last. A run that trains an
    encoder from nothing on labels, and keeps it whole (its own image size, class token and final norm), also leaves it
    as ``encoder.safetensors``.
    """
    values: ClassificationValues = job.task.values
    _refuse_idle(values, job.backbone)
    check_pooling(values, job.backbone)
    with closing(Evaluation(job, values)) as evaluation:
        return (_evaluate_only if job.options.eval_only else _train)(job, values, evaluation)


def _train(job: Job, values: ClassificationValues, evaluation: Evaluation) -> Outcome:
    pictures = Pictures(job.dataset.labelled("train"), training_transform(values, job.backbone.input))
    plan = make_plan(values, len(pictures), job.options, distributed.world_size())
    _refuse_unpaired(values, plan)
    encoder, report = build_encoder(
        job.backbone, job.encoder_file, seed=job.seed, **_encoder_options(values, job.backbone)
    )
    model = _classifier(job, values, encoder)
    report.complete(model, "encoder.")
    distributed.say(job.options, report.line())
    groups = parameter_groups(model, values, encoder_prefix="encoder.", depth=encoder.depth)
    fitted = fit(
        model,
        pictures,
        collate,
        job=job,
        values=values,
        plan=plan,
        optimizer=build_optimizer(groups, values),
        evaluate=evaluation,
        metric=job.task.task.metric,
        unit="epoch",
        describe=pictures.source.name,
        oddities=pictures.oddities,
    )
    note_oddities(job, training=pictures.oddities, validation=evaluation.pictures.oddities)
    return _outcome(job, model, evaluation, fitted, report)


def _encoder_options(values: ClassificationValues, backbone: Backbone) -> EncoderOptions:
    side = values.image_size // backbone.architecture.patch
    return {"grid": (side, side), "final_norm": not needs_fc_norm(values), "drop_path": values.drop_path}


def _classifier(job: Job, values: ClassificationValues, encoder: Encoder) -> Classifier:
    return Classifier(encoder, values, len(job.dataset.classes), job.backbone.input, job.seed)


def _metadata(job: Job, values: ClassificationValues) -> dict[str, str]:
    """What a trained model must share with the run that evaluates it."""
    classes = job.dataset.classes
    return {
        "engine": "classification",
        "backbone": job.backbone.name,
        "mode": values.mode,
        "pool": values.pool,
        "classes": f"{len(classes)} ({digest(list(classes))[:8]})",
        **job.identity,
    }


def _evaluate_only(job: Job, values: ClassificationValues, evaluation: Evaluation) -> Outcome:
    if job.options.weights is None:
        raise UserError("--eval-only needs --weights FILE, the model.safetensors that a run left")
    encoder = Encoder(job.backbone.architecture, **_encoder_options(values, job.backbone))
    model = _classifier(job, values, encoder)
    load_model(model, job.options.weights, _metadata(job, values))
    onednn.place(model, evaluation.device)
    metrics = evaluation(model)
    note_oddities(job, validation=evaluation.pictures.oddities)
    return Outcome(
        metrics=metrics,
        best=dict(metrics),
        effective={"precision": evaluation.precision, "device": evaluation.device.type}
        | onednn.effective(evaluation.device),
        parameters=count_parameters(model),
        per_class=evaluation.per_class(),
        images=evaluation.images(),
        baseline=evaluation.baseline(),
        samples=partial(samples.draw, model, evaluation),
    )


def _outcome(job: Job, model: Classifier, evaluation: Evaluation, fitted: Fit, report: LoadReport) -> Outcome:
    values: ClassificationValues = job.task.values
    file = job.folder / "model.safetensors"
    if distributed.main_process():
        save_model(file, model.state_dict(), _metadata(job, values))
        trained_here = job.backbone.weights.kind == "none" and values.mode == "finetune"
        if trained_here and not needs_fc_norm(values) and values.image_size == job.backbone.architecture.image_size:
            save_encoder(job.folder / "encoder.safetensors", model.encoder, job.origin | {"target": "labels"})
    return Outcome(
        metrics=fitted.last,
        best=fitted.best,
        history=fitted.history,
        effective=fitted.effective,
        load=report.as_dict(),
        parameters=count_parameters(model),
        per_class=evaluation.per_class(),
        images=evaluation.images(),
        baseline=evaluation.baseline(),
        weights=file,
        samples=partial(samples.draw, model, evaluation),
    )


def _refuse_idle(values: ClassificationValues, backbone: Backbone) -> None:
    """A value that this mode or augmentation would ignore is an error, and so are images of broken patches."""
    if values.image_size % backbone.architecture.patch:
        raise UserError(
            f"image_size {values.image_size} is not a multiple of {backbone.name}'s patch {backbone.architecture.patch}"
        )
    if values.mode == "linear" and (values.drop_path or values.layer_decay != 1):
        raise UserError("mode 'linear' freezes the encoder: drop_path and layer_decay have no effect; leave them out")
    if values.randaug and values.color_jitter:
        raise UserError("color_jitter has no effect beside randaug (timm turns it off); leave one of them out")


def _refuse_unpaired(values: ClassificationValues, plan: Plan) -> None:
    if (values.mixup or values.cutmix) and plan.micro_batch % 2:
        raise UserError(
            f"mixup and cutmix mix pairs, but the micro batch is {plan.micro_batch}; "
            "choose an even --micro-batch, or a batch that the processes share evenly"
        )
