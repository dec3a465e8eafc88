"""Training on detectron2's own ``SimpleTrainer`` and ``AMPTrainer``; one of their iterations is one optimiser step.

What they leave to others is here: the step's random state and lr, accumulation up to the protocol's batch, clipping,
weight average, progress, evaluations, resume files. The losses of Mask R-CNN are means over the images and regions of
a forward pass; a step takes the mean of its forward passes, as ViTDet did with one image on each of 64 GPUs.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from detectron2.engine import AMPTrainer, HookBase, SimpleTrainer, create_ddp_model
from detectron2.modeling.meta_arch import GeneralizedRCNN
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from mae_bench.detection.adapter import ENCODER_PREFIX
from mae_bench.detection.data import Example, Examples, together
from mae_bench.detection.evaluate import Evaluation
from mae_bench.engine import compiling, distributed, resume
from mae_bench.engine.averaging import WeightAverage
from mae_bench.engine.job import Job
from mae_bench.engine.optim import build_optimizer, parameter_groups
from mae_bench.engine.plan import Plan
from mae_bench.engine.precision import NonFiniteLossError, check_parameters, check_scale, effective_precision
from mae_bench.engine.progress import Progress
from mae_bench.engine.samplers import SeededDataset, StepSampler
from mae_bench.engine.schedules import apply_lr, lr_at
from mae_bench.engine.seeds import seed_step
from mae_bench.errors import UserError
from mae_bench.schema import DetectionValues

CURVE_POINTS = 500  # training loss points kept
CHECKPOINTS = 50  # resume files written over a run
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Metrics = dict[str, float]


class StepLoss(nn.Module):
    """Losses of one optimiser step: list of micro batches -> losses of the last one, divided by their number.

    The gradients of the earlier micro batches are already in the parameters, so that no more than one graph is in
    memory; the trainer runs the last backward pass and the optimiser. ``total`` is the whole step's loss.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        super().__init__()
        self.model = model
        self.scaler = scaler
        self.step = 0  # for the error message
        self.total = 0.0

    def forward(self, micro_batches: list[list[Example]]) -> dict[str, Tensor]:
        self.total = 0.0
        for examples in micro_batches[:-1]:
            with self._unsynchronised():
                losses = self._losses(examples, len(micro_batches))
                with torch.autocast("cuda", enabled=False):  # only forward passes are cast
                    torch.autograd.backward(self.scaler.scale(torch.stack(list(losses.values())).sum()))
        return self._losses(micro_batches[-1], len(micro_batches))

    def _losses(self, examples: list[Example], parts: int) -> dict[str, Tensor]:
        try:
            losses: dict[str, Tensor] = self.model(examples)
        except FloatingPointError as error:  # detectron2's, where proposals are not finite
            raise self._not_finite(str(error), examples) from error
        total = sum(loss.item() for loss in losses.values())
        if not math.isfinite(total):
            terms = ", ".join(f"{name} {loss.item():.4g}" for name, loss in losses.items())
            raise self._not_finite(terms, examples)
        self.total += total / parts
        return {name: loss / parts for name, loss in losses.items()}

    def _not_finite(self, details: str, examples: list[Example]) -> UserError:
        images = ", ".join(str(example["image_id"]) for example in examples)
        return UserError(
            f"the loss is not finite at step {self.step}, image ids {images} ({details}); lower base_lr, set "
            "clip_grad, or use --set precision=bf16 or fp32"
        )

    def _unsynchronised(self) -> contextlib.AbstractContextManager[None]:
        """Gradients are averaged over processes once a step, with those of the last micro batch."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else contextlib.nullcontext()


class Steps:
    """A loader's micro batches in groups of one optimiser step."""

    def __init__(self, micro_batches: Iterable[list[Example]], accumulation: int) -> None:
        self.micro_batches = micro_batches
        self.accumulation = accumulation

    def __iter__(self) -> Iterator[list[list[Example]]]:
        micro_batches = iter(self.micro_batches)
        while group := list(islice(micro_batches, self.accumulation)):
            yield group


@dataclass(frozen=True)
class Trained:
    """What training left behind; the model itself then holds the weights that were evaluated last."""

    last: Evaluation  # after the last step
    best: Metrics  # per metric the best of all evaluations
    history: list[Metrics]  # {"step", "loss", "lr"} points, each loss a mean since the point before, and evaluations
    effective: dict[str, Any]


class Training(HookBase):
    """One run, as a hook of detectron2's trainer. ``train`` leaves the model with the weights that were evaluated."""

    def __init__(
        self, model: GeneralizedRCNN, job: Job, plan: Plan, evaluate: Callable[[nn.Module], Evaluation]
    ) -> None:
        self.job, self.plan, self.model, self.evaluate = job, plan, model, evaluate
        self.values: DetectionValues = job.task.values
        self.device = distributed.device(job.options)
        self.precision = effective_precision(job, self.values, self.device)
        model.to(self.device)
        depth = job.backbone.architecture.depth
        groups = parameter_groups(model, self.values, encoder_prefix=ENCODER_PREFIX, depth=depth)
        self.optimizer = build_optimizer(groups, self.values)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.average = WeightAverage(model, self.values.ema)
        self.loss = StepLoss(_distributed(model, self.device, self.precision), self.scaler)
        self.curve: list[Metrics] = []
        self.evaluations: list[Metrics] = []
        self.loss_sum, self.loss_count = 0.0, 0  # of all processes, since the last curve point
        quiet = job.options.quiet or not distributed.main_process()
        self.progress = Progress(plan.steps, f"{job.task.task.name} {job.backbone.name} seed {job.seed}", quiet)

    def train(self, examples: Examples) -> Trained:
        """Run from the first step, or with ``job.options.resume`` from the newest resume file, to the last."""
        state = resume.load(self.job) if self.job.options.resume else None
        start = state["step"] if state else 0
        loader = DataLoader(
            SeededDataset(examples, self.job.seed),
            batch_sampler=StepSampler(len(examples), self.plan, self.job.seed, start, distributed.rank()),
            num_workers=self.job.options.workers,
            collate_fn=together,
            generator=torch.Generator(),  # its base seed must not come from, and so change, a global generator
        )
        trainer = self._trainer(Steps(loader, self.plan.accumulation))
        trainer.register_hooks([self])
        if state:
            self.model.load_state_dict(state["model"])
            self.average.load_state_dict(state["average"])
            trainer.load_state_dict(state["trainer"])
            self.curve, self.evaluations = state["curve"], state["evaluations"]
            self.loss_sum, self.loss_count = state["loss"]
        del state  # as large as model and optimiser together
        with self.progress, compiling.compiled(self.model, self.job.options.compile):
            trainer.train(start, self.plan.steps)
            last = self._evaluate(self.plan.steps)
        self.average.keep()
        effective = self.plan.effective(self.values.lr, self.precision, self.device.type)
        if self.job.options.compile:
            effective["compile"] = True
        return Trained(last, self._best(), self._history(), effective)

    def _trainer(self, steps: Steps) -> SimpleTrainer:
        """detectron2's trainer; it gathers no metrics, which `after_step` does."""
        never = sys.maxsize
        if self.precision == "fp32":
            return SimpleTrainer(self.loss, steps, self.optimizer, never, zero_grad_before_forward=True)
        return AMPTrainer(
            self.loss,
            steps,
            self.optimizer,
            never,
            zero_grad_before_forward=True,
            grad_scaler=self.scaler,
            precision=DTYPES[self.precision],
        )

    def before_step(self) -> None:
        step = self.trainer.iter
        if step in self.plan.eval_at and not any(seen["step"] == step for seen in self.evaluations):
            self._evaluate(step)
        apply_lr(self.optimizer, step, self.values, self.plan)
        seed_step(self.job.seed, step, distributed.rank())
        self.loss.step = step

    def after_backward(self) -> None:
        if self.values.clip_grad:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.values.clip_grad)

    def after_step(self) -> None:
        step, lr = self.trainer.iter + 1, lr_at(self.trainer.iter, self.values, self.plan)
        self.average.update()
        try:
            check_scale(self.scaler)
        except NonFiniteLossError as error:
            raise UserError(f"the loss is {error} at step {step}; use --set precision=bf16 or fp32") from error
        total = distributed.sum_over_processes(torch.tensor([self.loss.total], dtype=torch.float64))
        self.loss_sum += total.item() / self.plan.world_size
        self.loss_count += 1
        self.progress.update(step, loss=self.loss_sum / self.loss_count, lr=lr)
        last = step == self.plan.steps
        if last or step % math.ceil(self.plan.steps / CURVE_POINTS) == 0:
            self.curve.append({"step": step, "loss": self.loss_sum / self.loss_count, "lr": lr})
            self.loss_sum, self.loss_count = 0.0, 0
        due = last or step % math.ceil(self.plan.steps / CHECKPOINTS) == 0
        if due and distributed.main_process() and not self.job.options.smoke:
            resume.save(self.job, step, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "trainer": self.trainer.state_dict(),
            "curve": self.curve,
            "evaluations": self.evaluations,
            "loss": [self.loss_sum, self.loss_count],
        }

    def _evaluate(self, step: int) -> Evaluation:
        check_parameters(self.model, step)
        with self.average.applied(), compiling.plainly():
            evaluation = self.evaluate(self.model)
        self.evaluations.append({"step": step, **evaluation.metrics})
        return evaluation

    def _best(self) -> Metrics:
        names = {name for seen in self.evaluations for name in seen if name != "step"}
        return {name: max(seen[name] for seen in self.evaluations if name in seen) for name in sorted(names)}

    def _history(self) -> list[Metrics]:
        stride = math.ceil(len(self.evaluations) / CURVE_POINTS)
        thinned = self.evaluations[::-1][::stride][::-1]  # the last one stays
        return sorted(self.curve + thinned, key=lambda point: point["step"])


def _distributed(model: GeneralizedRCNN, device: torch.device, precision: str) -> nn.Module:
    """The model for several processes, with ViTDet's fp16 gradient compression where it trains in fp16."""
    wrapped: nn.Module = create_ddp_model(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        broadcast_buffers=False,
        fp16_compression=precision == "fp16",
    )
    return wrapped
