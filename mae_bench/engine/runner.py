"""One training run on mmengine's Runner, iteration based.

The Runner brings the model contract (`train_step`, `data_preprocessor`), hooks, gradient accumulation and distributed
wrapping. Ours are the loop (it thinks in optimiser steps, mmengine's in forward passes), the schedule, evaluation and
resume files, so that a run cut at any step and resumed equals the uninterrupted one bit for bit on a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.runner import BaseLoop, Runner
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mae_bench.engine import distributed, resume, schedules
from mae_bench.engine.averaging import WeightAverage
from mae_bench.engine.job import Job
from mae_bench.engine.logs import mm_logs
from mae_bench.engine.plan import Plan
from mae_bench.engine.precision import NonFiniteLossError, StepWrapper, check_parameters, effective_precision
from mae_bench.engine.progress import Progress
from mae_bench.engine.samplers import Indexed, SeededDataset, StepSampler
from mae_bench.engine.seeds import seed_step
from mae_bench.errors import UserError
from mae_bench.schema import Optimisation

Metrics = dict[str, float]
Evaluate = Callable[[nn.Module], Metrics]

CURVE_POINTS = 500  # training loss points kept, and as many evaluations
CHECKPOINTS = 50  # resume files written over a run


@dataclass
class Fit:
    """What training left behind; the model itself then holds the weights that were evaluated last."""

    history: list[Metrics]  # {"step", "loss", "lr"} points, each loss a mean since the point before, and evaluations
    last: Metrics  # metrics after the last step; without an evaluation {"loss"} of the last curve point
    best: Metrics  # per metric the best of all evaluations (lowest for names that contain "loss")
    effective: dict[str, Any]


@dataclass
class _Run:
    """State of a run between steps, and what a step needs."""

    job: Job
    values: Optimisation
    plan: Plan
    module: nn.Module
    wrapper: StepWrapper
    average: WeightAverage
    sampler: StepSampler
    evaluate: Evaluate | None
    describe: Callable[[int], str]
    progress: Progress
    unit: str
    step: int = 0
    curve: list[Metrics] = field(default_factory=list)
    evaluations: list[Metrics] = field(default_factory=list)
    loss_sum: float = 0.0  # of this process since the last curve point
    loss_count: int = 0
    waited: float = 0.0  # seconds for data since the last curve point

    def state(self) -> dict[str, Any]:
        """What a resumed run needs. Collective: sums over processes end up in the first one."""
        total = distributed.sum_over_processes(torch.tensor([self.loss_sum, self.loss_count], dtype=torch.float64))
        return {
            "model": self.module.state_dict(),
            "optimizer": self.wrapper.optimizer.state_dict(),
            "scaler": self.wrapper.scaler.state_dict(),
            "average": self.average.state_dict(),
            "curve": self.curve,
            "evaluations": self.evaluations,
            "pending_loss": total.tolist(),
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self.module.load_state_dict(state["model"])
        self.wrapper.optimizer.load_state_dict(state["optimizer"])
        self.wrapper.scaler.load_state_dict(state["scaler"])
        self.average.load_state_dict(state["average"])
        self.curve, self.evaluations = state["curve"], state["evaluations"]
        if distributed.main_process():
            self.loss_sum, self.loss_count = state["pending_loss"][0], int(state["pending_loss"][1])
        self.step = self.sampler.start_step = state["step"]


class StepHook(Hook):
    """Before a step its learning rates and random state; after it the average, the curve, the bar and resume files."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.point_every = math.ceil(run.plan.steps / CURVE_POINTS)
        self.save_every = math.ceil(run.plan.steps / CHECKPOINTS)

    def before_train_step(self, runner: Runner) -> None:
        run = self.run
        schedules.apply_lr(run.wrapper.optimizer, run.step, run.values, run.plan)
        seed_step(run.job.seed, run.step, distributed.rank())

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, torch.Tensor] | None = None
    ) -> None:
        assert outputs is not None
        self.run.loss_sum += outputs["loss"].item()
        self.run.loss_count += 1

    def after_train_step(self, runner: Runner) -> None:
        run = self.run
        lr = schedules.lr_at(run.step, run.values, run.plan)
        loss = run.loss_sum / run.loss_count
        run.step += 1
        run.average.update()
        if run.step % self.point_every == 0 or run.step == run.plan.steps:
            self._add_point(runner, lr)
        shown = {"epoch": run.plan.epoch(run.step)} if run.unit == "epoch" else {}
        run.progress.update(run.step, **shown, loss=loss, lr=lr)
        if not run.job.options.smoke and (run.step % self.save_every == 0 or run.step == run.plan.steps):
            distributed.broadcast_buffers(run.module)
            state = run.state()
            if distributed.main_process():
                resume.save(run.job, run.step, state)

    def _add_point(self, runner: Runner, lr: float) -> None:
        run = self.run
        total = distributed.sum_over_processes(torch.tensor([run.loss_sum, run.loss_count], dtype=torch.float64))
        loss = (total[0] / total[1]).item()
        run.curve.append({"step": run.step, "loss": loss, "lr": lr})
        waited = f"waited {run.waited:.3g} s for data"
        runner.logger.info(f"step {run.step}/{run.plan.steps}  loss {loss:.6g}  lr {lr:.4g}  {waited}")
        run.loss_sum, run.loss_count, run.waited = 0.0, 0, 0.0


class StepLoop(BaseLoop):
    """Optimiser steps of ``plan.accumulation`` forward passes each, and evaluations where they are due."""

    def __init__(self, runner: Runner, dataloader: DataLoader[Any], run: _Run) -> None:
        super().__init__(runner, dataloader)
        self._run = run
        self.max_epochs = 1  # mmengine's words: one long epoch
        self.epoch = 0
        self.max_iters = run.plan.steps * run.plan.accumulation
        self.iter = run.step * run.plan.accumulation

    def run(self) -> nn.Module:
        run = self._run
        self.runner.call_hook("before_train")
        self.runner.model.train()
        batches = iter(self.dataloader)
        while True:
            if run.step in run.plan.eval_at and not any(seen["step"] == run.step for seen in run.evaluations):
                self._evaluate()
            if run.step == run.plan.steps:
                break
            self.runner.call_hook("before_train_step")
            for micro in range(run.plan.accumulation):
                started = time.perf_counter()
                batch = next(batches)
                run.waited += time.perf_counter() - started
                self._forward_backward(micro, batch)
            self.runner.call_hook("after_train_step")
        self.runner.call_hook("after_train")
        model: nn.Module = self.runner.model
        return model

    def _forward_backward(self, micro: int, batch: Any) -> None:
        self.runner.call_hook("before_train_iter", batch_idx=self.iter, data_batch=batch)
        try:
            outputs = self.runner.model.train_step(batch, optim_wrapper=self.runner.optim_wrapper)
        except NonFiniteLossError as error:
            run = self._run
            images = [run.describe(index) for _, index in run.sampler.keys(run.step, micro)]
            shown = ", ".join(images[:8]) + (f" and {len(images) - 8} more" if len(images) > 8 else "")
            raise UserError(
                f"the loss is {error} at step {run.step}, images {shown}; lower base_lr, set clip_grad, or use "
                "--set precision=bf16 or fp32"
            ) from error
        self.runner.call_hook("after_train_iter", batch_idx=self.iter, data_batch=batch, outputs=outputs)
        self.iter += 1

    def _evaluate(self) -> None:
        run = self._run
        if run.evaluate is None:
            return
        distributed.broadcast_buffers(run.module)
        check_parameters(run.module, run.step)
        run.module.eval()
        with run.average.applied(), torch.no_grad():
            metrics = run.evaluate(run.module)
        self.runner.model.train()
        run.evaluations.append({"step": run.step, **metrics})
        self.runner.logger.info(f"evaluation after step {run.step}: {metrics}")


class _Runner(Runner):
    """The Runner without habits that reach beyond one run: terminal logs, folders by date, process-wide settings,
    weights initialised or moved behind our back."""

    def __init__(self, run: _Run, dataloader: DataLoader[Any], model: nn.Module, name: str) -> None:
        self._run = run
        defaults = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
        super().__init__(
            model,
            str(run.job.folder),
            train_dataloader=dataloader,
            train_cfg={},
            optim_wrapper=run.wrapper,
            default_hooks=dict.fromkeys(defaults),
            custom_hooks=[StepHook(run)],
            launcher="pytorch" if distributed.world_size() > 1 else "none",
            default_scope=None,
            experiment_name=name,
        )

    def setup_env(self, env_cfg: dict[str, Any]) -> None:
        self._rank, self._world_size = distributed.rank(), distributed.world_size()
        self._timestamp = ""

    def set_randomness(self, seed: Any, diff_rank_seed: bool = False, deterministic: bool = False) -> None:
        self._seed, self._deterministic = self._run.job.seed, deterministic

    def build_logger(self, log_level: int | str = "INFO", log_file: str | None = None, **options: Any) -> Any:
        return MMLogger.get_current_instance()

    def build_visualizer(self, visualizer: Any = None) -> None:
        return None

    def build_train_loop(self, loop: Any) -> StepLoop:
        return loop if isinstance(loop, StepLoop) else StepLoop(self, self._train_dataloader, self._run)

    def wrap_model(self, model_wrapper_cfg: Any, model: nn.Module) -> nn.Module:
        return model

    def _init_model_weights(self) -> None:
        """A model arrives initialised and loaded."""

    def _log_env(self, env_cfg: dict[str, Any]) -> None:
        """The record holds versions and hardware."""

    def dump_config(self) -> None:
        """The record holds the recipe."""


def fit(
    model: BaseModel,
    dataset: Indexed,
    collate: Callable[[list[Any]], Any],
    *,
    job: Job,
    values: Optimisation,
    plan: Plan,
    optimizer: Optimizer,
    evaluate: Evaluate | None,
    metric: str,
    unit: Literal["epoch", "step"],
    describe: Callable[[int], str] = str,
) -> Fit:
    """Train ``model`` as ``values`` and ``plan`` say, and leave in it the weights that were evaluated last.

    ``model`` arrives initialised and loaded; its ``forward(inputs, data_samples, mode="loss")`` returns a dict whose
    ``loss`` entries are means over the micro batch. ``dataset[index]`` may draw from the global generators of random,
    numpy and torch: they are seeded per sample. ``evaluate(module)`` is called on every process, in eval mode without
    gradients and on the averaged weights when there are any, and returns the same metrics (``metric`` among them) on
    all. ``describe(index)`` names an image in error messages. Raises UserError on a loss that is not finite.
    """
    device = distributed.device(job.options)
    precision = effective_precision(job, values, device)
    model.to(device)
    label = f"{job.task.task.name} {job.backbone.name} seed {job.seed}"
    quiet = job.options.quiet or not distributed.main_process()
    with mm_logs(job.folder) as name, Progress(plan.steps, label, quiet) as progress:
        run = _Run(
            job=job,
            values=values,
            plan=plan,
            module=model,
            wrapper=StepWrapper(optimizer, device, precision, plan.accumulation, values.clip_grad),
            average=WeightAverage(model, values.ema),
            sampler=StepSampler(len(dataset), plan, job.seed, rank=distributed.rank()),
            evaluate=evaluate,
            describe=describe,
            progress=progress,
            unit=unit,
        )
        if job.options.resume:
            run.restore(resume.load(job))  # kept by no name: it is as large as model and optimiser together
        loader = _loader(dataset, collate, run.sampler, job, device)
        _Runner(run, loader, _wrapped(model, device), name).train()
        run.average.keep()
    return _summary(run, metric, precision, device)


def _wrapped(model: nn.Module, device: torch.device) -> nn.Module:
    if distributed.world_size() > 1:
        ids = [device.index] if device.type == "cuda" else None
        model = MMDistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
    return model


def _loader(
    dataset: Indexed, collate: Callable[[list[Any]], Any], sampler: StepSampler, job: Job, device: torch.device
) -> DataLoader[Any]:
    return DataLoader(
        SeededDataset(dataset, job.seed),
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=job.options.workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its base seed must not come from, and so change, a global generator
    )


def _summary(run: _Run, metric: str, precision: str, device: torch.device) -> Fit:
    plan = run.plan
    last = {key: value for key, value in run.evaluations[-1].items() if key != "step"} if run.evaluations else {}
    if run.evaluate is None:
        last = {"loss": run.curve[-1]["loss"]}
    if metric not in last:
        raise UserError(f"the task's metric '{metric}' is none of what is measured: {', '.join(sorted(last))}")
    best = {}
    for key in last:
        seen = [evaluation[key] for evaluation in run.evaluations if key in evaluation] or [last[key]]
        best[key] = min(seen) if "loss" in key else max(seen)
    history = sorted(run.curve + _thin(run.evaluations), key=lambda point: point["step"])
    return Fit(history, last, best, plan.effective(run.values.lr, precision, device.type))


def _thin(points: list[Metrics]) -> list[Metrics]:
    """At most CURVE_POINTS of ``points``, evenly spread, the last one included."""
    stride = math.ceil(len(points) / CURVE_POINTS)
    return points[::-1][::stride][::-1] if stride > 1 else points
