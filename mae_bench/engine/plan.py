"""From a protocol's values to numbers of steps and batches on this machine.

The batch of a protocol is kept exactly: what does not fit into memory is accumulated, and what cannot be divided is
refused. Epochs follow FAIR's loaders (arXiv 2111.06377, `main_finetune.py`): shuffled, the incomplete last batch is
dropped. Protocols given in steps follow detectron2's and mmengine's infinite samplers: one epoch's order runs into the
next, nothing is dropped.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from mae_bench.engine.job import Options
from mae_bench.errors import UserError
from mae_bench.schema import Optimisation


@dataclass(frozen=True)
class Plan:
    """A run in optimiser steps. Steps are counted from 0; "after step count n" means that n steps are done."""

    steps: int
    steps_per_epoch: float  # whole when the protocol is given in epochs
    epoch_images: int  # images that one epoch consumes
    warmup_steps: int
    eval_at: tuple[int, ...]  # rising step counts after which to evaluate; the last one is `steps`
    batch: int  # images per optimiser step, all processes and micro batches together
    micro_batch: int  # images per forward pass and process
    accumulation: int  # forward passes per optimiser step
    world_size: int

    def effective(self, lr: float, precision: str, device: str) -> dict[str, Any]:
        """What the recipe came to on this machine, for the record."""
        shown = asdict(self) | {"lr": lr, "precision": precision, "device": device}
        return {key: value for key, value in shown.items() if key not in ("eval_at", "epoch_images")}

    def epoch(self, step: int) -> float:
        """Epochs done after ``step`` steps."""
        return step / self.steps_per_epoch


def make_plan(values: Optimisation, images: int, options: Options, world_size: int) -> Plan:
    """Plan a run over ``images`` training images; refuses what would silently change the protocol."""
    refuse_idle(values)
    if images < 1:
        raise UserError("the training split holds no image; check the data folder with `python -m mae_bench doctor`")
    if values.epochs:
        if images < values.batch:
            raise UserError(
                f"batch {values.batch} is larger than the {images} training images, so an epoch has no whole step; "
                f"use --set batch={images} or less"
            )
        steps_per_epoch = float(images // values.batch)
        epoch_images = images // values.batch * values.batch
        steps = max(1, round(values.epochs * steps_per_epoch))
    else:
        steps_per_epoch = images / values.batch
        epoch_images = images
        steps = values.steps
    warmup = values.warmup_steps or round(values.warmup_epochs * steps_per_epoch)
    if warmup >= steps and warmup:
        raise UserError(
            f"warmup takes {warmup} of {steps} steps; lower --set warmup_epochs (or warmup_steps), or train longer"
        )
    micro_batch, accumulation = _divide(values.batch, options.micro_batch, world_size)
    every = values.eval_every_steps or values.eval_every_epochs * steps_per_epoch
    return Plan(
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        epoch_images=epoch_images,
        warmup_steps=warmup,
        eval_at=_evaluations(steps, every),
        batch=values.batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        world_size=world_size,
    )


def _divide(batch: int, limit: int, world_size: int) -> tuple[int, int]:
    """(micro batch, accumulation): the largest equal parts of at most ``limit`` images; 0 = no limit."""
    if batch % world_size:
        raise UserError(
            f"batch {batch} cannot be shared equally by {world_size} processes; start a number that divides it"
        )
    per_process = batch // world_size
    largest = min(limit, per_process) if limit > 0 else per_process
    micro = next(size for size in range(largest, 0, -1) if per_process % size == 0)
    return micro, per_process // micro


def _evaluations(steps: int, every: float) -> tuple[int, ...]:
    if not every:
        return (steps,)
    count = math.floor(steps / every)
    return tuple(sorted({max(1, round(number * every)) for number in range(1, count + 1)} | {steps}))


def refuse_idle(values: Optimisation) -> None:
    """Every value is consumed or refused: one that the chosen schedule or optimiser would ignore is an error."""
    default = {name: field.default for name, field in Optimisation.model_fields.items()}
    read = {
        "schedule": {
            "milestones": values.schedule == "steps",
            "poly_power": values.schedule == "poly",
            "min_lr": values.schedule in ("cosine", "poly"),
        },
        "optimizer": {"betas": values.optimizer == "adamw", "momentum": values.optimizer in ("lars", "sgd")},
    }
    for choice, keys in read.items():
        for key, used in keys.items():
            if not used and getattr(values, key) != default[key]:
                raise UserError(f"{choice} '{getattr(values, choice)}' does not read {key}; leave {key} out")
    if values.schedule == "steps" and not values.milestones:
        raise UserError("schedule 'steps' needs milestones, e.g. milestones = [0.89, 0.96]")
    if not all(0 < milestone < 1 for milestone in values.milestones):
        raise UserError(f"milestones are fractions of the length between 0 and 1, not {list(values.milestones)}")
    if values.warmup_factor and not (values.warmup_epochs or values.warmup_steps):
        raise UserError("warmup_factor needs warmup_epochs or warmup_steps")
