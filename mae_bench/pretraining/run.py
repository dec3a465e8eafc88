"""The pre-training pipeline: He et al., arXiv 2111.06377, appendix A.1 and Table 8; FAIR's ``main_pretrain.py``."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mae_bench.checkpoints.load import build_encoder, save_encoder, save_model
from mae_bench.data import drawing
from mae_bench.encoders.positions import sincos_table
from mae_bench.encoders.vit import Encoder
from mae_bench.engine import distributed
from mae_bench.engine.job import Job, Outcome
from mae_bench.engine.oddities import note_oddities
from mae_bench.engine.optim import build_optimizer, count_parameters, parameter_groups
from mae_bench.engine.plan import make_plan
from mae_bench.engine.runner import Fit, fit
from mae_bench.pretraining.evaluate import Evaluation
from mae_bench.pretraining.images import Pictures, TrainingSamples, ValidationSamples, collate
from mae_bench.pretraining.mae import MaskedAutoencoder, patchify
from mae_bench.pretraining.objectives import build_model, refuse_idle, refuse_variants, training_grid
from mae_bench.pretraining.pictures import reconstruct
from mae_bench.pretraining.targets import Components, Pixels
from mae_bench.schema import Backbone, PretrainingValues

TAIL = 0.1  # share of the steps, the last ones, whose mean loss is the metric `loss`
COMPONENT_PICTURES = 1000  # training pictures whose patches give the principal components of target "pca"
SHOWN, LONGEST = 4, 160  # validation pictures in samples.png, and the longest side of one there, in pixels


def smoke(values: PretrainingValues, backbone: Backbone) -> dict[str, Any]:
    """Values that a smoke run reduces: none, since the weights and not the pictures take the memory."""
    return {}


def run(job: Job) -> Outcome:
    """Pre-train an encoder on the training pictures; their labels, if any, are not read.

    Leaves in the run folder ``encoder.safetensors`` and ``mae.safetensors`` (with the decoder). ``loss`` is the
    training objective over the last tenth of the steps, ``val_loss`` the same on validation pictures under masks that
    no run changes; both in units of the target.
    """
    values: PretrainingValues = job.task.values
    architecture = job.backbone.architecture
    refuse_variants(job.backbone)
    refuse_idle(values)
    grid = training_grid(values, architecture)
    encoder, report = build_encoder(
        job.backbone,
        job.encoder_file,
        seed=job.seed,
        grid=grid,
        drop_path=values.drop_path,
        frozen_positions=architecture.positions == "sincos",
    )
    model = build_model(encoder, job.backbone.input, values, job.seed)
    pictures = Pictures(job.dataset.source("train"))
    if isinstance(model.target, Components):
        _fit_components(model.target, pictures, model, values)
    training = TrainingSamples(pictures, grid, encoder.patch, values)
    validation = ValidationSamples(Pictures(job.dataset.source("val")), grid, encoder.patch, values)
    groups = parameter_groups(model, values, encoder_prefix="encoder.", depth=encoder.depth)
    with closing(Evaluation(job, values, validation)) as evaluation:
        fitted = fit(
            model,
            training,
            collate,
            job=job,
            values=values,
            plan=make_plan(values, len(training), job.options, distributed.world_size()),
            optimizer=build_optimizer(groups, values),
            evaluate=evaluation,
            metric="val_loss",
            unit="epoch" if values.epochs else "step",
            describe=training.name,
            oddities=pictures.oddities,
        )
        baseline = evaluation.baseline(model, training)
    note_oddities(job, training=pictures.oddities, validation=validation.pictures.oddities)
    if distributed.main_process():
        _save(job, model)
    return Outcome(
        metrics={"loss": _tail_loss(fitted), **fitted.last},
        best=fitted.best,
        history=fitted.history,
        effective=fitted.effective,
        load=report.as_dict(),
        parameters=count_parameters(model),
        baseline=baseline,
        weights=job.folder / "encoder.safetensors",
        # Components and tokens are no pictures.
        samples=partial(_samples, model, validation) if type(model.target) is Pixels else None,
    )


def _tail_loss(fitted: Fit) -> float:
    """Mean training loss over the last tenth of the steps; each point of the curve is a mean since the one before."""
    start = total = count = 0.0
    first = fitted.effective["steps"] * (1 - TAIL)
    for point in fitted.history:
        if "lr" in point:  # a point of the training curve, not an evaluation
            if point["step"] > first:
                total += point["loss"] * (point["step"] - start)
                count += point["step"] - start
            start = point["step"]
    if not count:  # all of them were left out after losses that were not finite
        return next(point["loss"] for point in reversed(fitted.history) if "lr" in point)
    return total / count


def _as_declared(encoder: Encoder) -> Encoder:
    """The encoder with the position table of its architecture, where it was trained on images of another shape: a
    sin-cos table is a function of the grid."""
    architecture = encoder.architecture
    grid = (architecture.grid, architecture.grid)
    if encoder.grid == grid:
        return encoder
    with torch.device("meta"):
        declared = Encoder(architecture)
    table = sincos_table(encoder.width, grid, bool(encoder.position_prefix))
    declared.load_state_dict(encoder.state_dict() | {"pos_embed": table}, strict=True, assign=True)
    return declared


def _fit_components(
    target: Components, pictures: Pictures, model: MaskedAutoencoder, values: PretrainingValues
) -> None:
    """Principal components of the patches of training pictures, evenly spread over the set, each as in validation."""
    count = min(COMPONENT_PICTURES, len(pictures))
    samples = ValidationSamples(pictures, model.encoder.grid, model.encoder.patch, values)
    batch = collate([samples[number * len(pictures) // count] for number in range(count)])
    images = model.data_preprocessor(batch)["inputs"]
    target.fit(patchify(images, model.encoder.patch).flatten(0, 1))


def _save(job: Job, model: MaskedAutoencoder) -> None:
    values: PretrainingValues = job.task.values
    metadata = {
        **job.origin,
        "engine": "pretraining",
        "objective": values.objective,
        "target": {"pixels": "norm_pix" if values.norm_pix else "pixel"}.get(values.target, values.target),
        "mask_ratio": str(values.mask_ratio),
    }
    save_encoder(job.folder / "encoder.safetensors", _as_declared(model.encoder), metadata)
    # Heads, epsilon and the axes of the objective are in no tensor's shape.
    architecture = job.backbone.architecture
    whole = {"values": values.model_dump_json(), "architecture": architecture.model_dump_json()}
    save_model(job.folder / "mae.safetensors", model.state_dict(), metadata | whole)


def _samples(model: MaskedAutoencoder, validation: ValidationSamples) -> Image.Image:
    """Reconstructions of a few validation pictures, under the masks that ``val_loss`` is measured with."""
    numbers = drawing.spread(len(validation), SHOWN)
    batch = collate([validation[number] for number in numbers])
    names = [Path(validation.pictures.name(number)).name for number in numbers]
    return reconstruct(model, batch["inputs"], batch["data_samples"]).sheet(names, LONGEST)
