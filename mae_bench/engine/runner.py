"""One training run on mmengine's Runner, iteration based.

The Runner brings the model contract (`train_step`, `data_preprocessor`), accumulation and distributed wrapping. Ours
are the loop (it thinks in optimiser steps, mmengine's in forward passes), the schedule, evaluation and resume files, so
that a run cut at any step and resumed equals the uninterrupted one bit for bit on a CPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from mmengine.logging import MMLogger
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mae_bench.data.decode import Oddities
from mae_bench.engine import compiling, distributed, onednn, recovery, resume, sharding, signals
from mae_bench.engine.averaging import WeightAverage
from mae_bench.engine.job import Job
from mae_bench.engine.logs import mm_logs
from mae_bench.engine.loop import CURVE_POINTS, StepLoop
from mae_bench.engine.plan import Plan
from mae_bench.engine.precision import StepWrapper, effective_precision
from mae_bench.engine.progress import Progress
from mae_bench.engine.samplers import Indexed, SeededDataset, StepSampler
from mae_bench.engine.state import Evaluate, Metrics, Run
from mae_bench.engine.trackers import Trackers
from mae_bench.errors import UserError
from mae_bench.schema import Optimisation


@dataclass
class Fit:
    """What training left behind; the model itself then holds the weights that were evaluated last."""

    history: list[Metrics]  # {"step", "loss", "lr"} points, each loss a mean since the point before, and evaluations
    last: Metrics  # metrics after the last step; without an evaluation {"loss"} of the last curve point
    best: Metrics  # per metric the best of all evaluations (lowest for names that contain "loss")
    effective: dict[str, Any]


class _Runner(Runner):
    """The Runner without habits that reach beyond one run: terminal logs, folders by date, process-wide settings,
    weights initialised or moved behind our back."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        loader: DataLoader[Any],
        loop: Callable[[Runner, DataLoader[Any]], StepLoop],
        name: str,
    ) -> None:
        self._run, self._make_loop = run, loop
        defaults = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
        super().__init__(
            model,
            str(run.job.folder),
            train_dataloader=loader,
            train_cfg={},
            optim_wrapper=run.wrapper,
            default_hooks=dict.fromkeys(defaults),
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
        return loop if isinstance(loop, StepLoop) else self._make_loop(self, self._train_dataloader)

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
    oddities: Oddities | None = None,
) -> Fit:
    """Train ``model`` as ``values`` and ``plan`` say, and leave in it the weights that were evaluated last.

    ``model`` arrives initialised and loaded; its ``forward(inputs, data_samples, mode="loss")`` returns a dict whose
    ``loss`` entries are means over the micro batch. ``dataset[index]`` may draw from the global generators of random,
    numpy and torch: they are seeded per sample. ``evaluate(module)`` is called on every process, in eval mode without
    gradients and on the averaged weights when there are any, and returns the same metrics (``metric`` among them) on
    all. ``describe(index)`` names an image in messages. ``oddities`` is where ``dataset`` notes odd pictures; a resumed
    run goes on with those met before.

    Raises:
        UserError: something is not finite and the protocol stops there, or leaving steps out has not helped; the state
            cannot be written or read; an option does not fit.
        StoppedError: SIGTERM or SIGUSR1 came; the state is written.
    """
    device = distributed.device(job.options)
    precision = effective_precision(job, values, device)
    if job.options.fsdp:
        sharding.check(values, precision)
    onednn.place(model, device)
    trained = sharding.shard(model, optimizer, device) if job.options.fsdp else model
    label = f"{job.task.task.name} {job.backbone.name} seed {job.seed}"
    quiet = job.options.quiet or not distributed.main_process()
    with (
        mm_logs(job.folder) as name,
        closing(Trackers(job)) as trackers,
        Progress(plan.steps, label, quiet) as progress,
        signals.heeded() as request,
        compiling.compiled(trained, job.options.compile),
    ):
        run = Run(
            job=job,
            values=values,
            plan=plan,
            module=trained,
            whole=model,
            wrapper=StepWrapper(optimizer, device, precision, plan.accumulation, values.clip_grad),
            average=WeightAverage(trained, values.ema),
            sampler=StepSampler(
                len(dataset), plan, job.seed, rank=distributed.rank(), repeats=getattr(dataset, "repeats", 1)
            ),
            evaluate=evaluate,
            describe=describe,
            unit=unit,
            oddities=oddities,
        )
        if job.options.resume and (state := resume.load(job)) is not None:
            run.restore(state)
            del state  # as large as model and optimiser together
        loader = _loader(dataset, collate, run.sampler, job, device)
        loop = partial(StepLoop, run=run, progress=progress, trackers=trackers, request=request)
        _Runner(run, trained if job.options.fsdp else _replicated(model, device), loader, loop, name).train()
        run.average.keep()
        if job.options.fsdp:
            sharding.gather(trained, model)
    recovery.note(run)
    return _summary(run, metric, precision, device)


def _replicated(model: nn.Module, device: torch.device) -> nn.Module:
    """Buffers stay each process's own until they are evaluated or saved (`distributed.broadcast_buffers`)."""
    if distributed.world_size() == 1:
        return model
    known = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # its name before 2.14
    ids = [device.index] if device.type == "cuda" else None
    replicated: nn.Module = MMDistributedDataParallel(model, device_ids=ids, **{sync: False})
    return replicated


def _loader(
    dataset: Indexed, collate: Callable[[list[Any]], Any], sampler: StepSampler, job: Job, device: torch.device
) -> DataLoader[Any]:
    return DataLoader(
        SeededDataset(dataset, job.seed),
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=job.options.workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=signals.leave_to_main_process,
        generator=torch.Generator(),  # its base seed must not come from, and so change, a global generator
    )


def _summary(run: Run, metric: str, precision: str, device: torch.device) -> Fit:
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
    effective = plan.effective(run.values.lr, precision, device.type)
    if run.values.on_nonfinite == "rewind":
        effective["skipped_steps"] = sorted(run.skipped)
    if run.job.options.fsdp:
        effective["fsdp"] = True
    if run.job.options.compile:
        effective["compile"] = True
    return Fit(history, last, best, effective | onednn.effective(device))


def _thin(points: list[Metrics]) -> list[Metrics]:
    """At most CURVE_POINTS of ``points``, evenly spread, the last one included."""
    stride = math.ceil(len(points) / CURVE_POINTS)
    return points[::-1][::stride][::-1] if stride > 1 else points
