"""The loop of a training run: optimiser steps, evaluations, resume files, and the ways out of the ordinary."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from mmengine.runner import BaseLoop, Runner
from torch import nn
from torch.utils.data import DataLoader

from mae_bench.engine import compiling, distributed, recovery, resume, schedules, sharding, signals
from mae_bench.engine.precision import Gradient
from mae_bench.engine.progress import Progress
from mae_bench.engine.seeds import seed_step
from mae_bench.engine.state import Run
from mae_bench.engine.trackers import Trackers

CURVE_POINTS = 500  # training loss points kept, and as many evaluations
CHECKPOINTS = 50  # resume files written over a run, at the least


class StepLoop(BaseLoop):
    """Optimiser steps of ``plan.accumulation`` forward passes each, and evaluations where they are due.

    Ends with StoppedError, in all processes after the same step, once one of them has been asked to.
    """

    max_epochs, epoch = 1, 0  # mmengine's words: one long epoch

    def __init__(
        self,
        runner: Runner,
        dataloader: DataLoader[Any],
        run: Run,
        progress: Progress,
        trackers: Trackers,
        request: signals.Request,
    ) -> None:
        super().__init__(runner, dataloader)
        self._run, self._progress, self._trackers, self._request = run, progress, trackers, request
        self._point_every = math.ceil(run.plan.steps / CURVE_POINTS)
        self._save_every = math.ceil(run.plan.steps / CHECKPOINTS)
        self._batches: Iterator[Any] | None = None
        self._saved = time.monotonic()
        self.max_iters = run.plan.steps * run.plan.accumulation
        self.iter = run.step * run.plan.accumulation

    @property
    def _files(self) -> bool:
        """A smoke run resumes nothing, but may have to go back."""
        return not self._run.job.options.smoke or self._run.values.on_nonfinite == "rewind"

    def run(self) -> nn.Module:
        model: nn.Module = self.runner.model
        model.train()
        try:
            self._run_all()
        finally:
            self._batches = None  # ends the data loading processes now, and not when the loop is collected
        return model

    def _run_all(self) -> None:
        run = self._run
        if run.values.on_nonfinite == "rewind" and run.step == 0:
            self._save()
        self._trackers.go_on_from(run.step)
        while True:
            if run.step in run.plan.eval_at and not any(seen["step"] == run.step for seen in run.evaluations):
                if not self._weights_hold():
                    continue
                self._evaluate()
            if run.step == run.plan.steps:
                return
            if run.step in run.skipped:
                self._finish(None)
            else:
                self._step()

    def _step(self) -> None:
        run = self._run
        if self._batches is None:
            with signals.held_back():
                self._batches = iter(self.dataloader)
        schedules.apply_lr(run.wrapper.optimizer, run.step, run.values, run.plan)
        seed_step(run.job.seed, run.step, distributed.rank())
        started = time.perf_counter()
        for _ in range(run.plan.accumulation):
            waiting = time.perf_counter()
            batch = next(self._batches)
            run.waited += time.perf_counter() - waiting
            self.runner.model.train_step(batch, optim_wrapper=run.wrapper)
        due = distributed.main_process() and time.monotonic() - self._saved > resume.SECONDS
        gradient = run.wrapper.measure([self._request.number, due])
        if not gradient.sound:
            self._go_back(recovery.of_step(run, gradient))
            return
        run.wrapper.step()
        run.average.update()
        run.loss_sum += sum(gradient.losses)
        run.loss_count += len(gradient.losses)
        run.seconds += time.perf_counter() - started
        self._finish(gradient)

    def _finish(self, gradient: Gradient | None) -> None:
        """After a step, or one left out (None): the point of the curve, the bar, the resume file, and the end if a
        signal asked for it."""
        run = self._run
        lr = schedules.lr_at(run.step, run.values, run.plan)
        run.step += 1
        last = run.step == run.plan.steps
        shown = {"epoch": run.plan.epoch(run.step)} if run.unit == "epoch" else {}
        if run.loss_count:
            shown["loss"] = run.loss_sum / run.loss_count
        if last or run.step % self._point_every == 0:
            self._add_point(lr, gradient)
        self._progress.update(run.step, **shown, lr=lr)
        asked, due = map(int, gradient.requests) if gradient else (0, 0)
        regular = self._files and (last or due or run.step % self._save_every == 0)
        if (regular or asked) and self._weights_hold():
            self._save()
            if asked:
                raise signals.StoppedError(asked, run.step)

    def _add_point(self, lr: float, gradient: Gradient | None) -> None:
        run = self._run
        seconds, waited = run.seconds, run.waited
        steps = run.loss_count // run.plan.accumulation
        point = run.add_point(lr)
        run.seconds = run.waited = 0.0
        if point is None:
            return
        speed = {"images_per_second": steps * run.plan.batch / seconds, "waiting_share": waited / seconds}
        self.runner.logger.info(
            f"step {run.step}/{run.plan.steps}  loss {point['loss']:.6g}  lr {lr:.4g}  "
            f"{speed['images_per_second']:.4g} images/s  {speed['waiting_share']:.1%} waiting for data"
        )
        measured = {"gradient_norm": gradient.norm} if gradient and math.isfinite(gradient.norm) else {}
        self._trackers.add(run.step, {"loss": point["loss"], "lr": lr, **speed, **measured})

    def _save(self) -> None:
        run = self._run
        distributed.broadcast_buffers(run.module)
        state = run.state()
        if distributed.main_process():
            resume.save(run.job, run.step, state)
        self._saved = time.monotonic()

    def _weights_hold(self) -> bool:
        """The weights may be evaluated and saved; else the run has gone back."""
        fault = recovery.of_weights(self._run)
        if fault is not None:
            self._go_back(fault)
        return fault is None

    def _go_back(self, fault: recovery.Fault) -> None:
        """To the newest resume file, and from there without the step that made ``fault``."""
        run = self._run
        recovery.leave_out(run, fault)
        run.wrapper.discard()
        state = resume.load(run.job)
        assert state is not None, "a run that may go back has saved its first state"
        run.restore(state)
        self._batches = None
        line = f"the {fault.what} at step {fault.step}{fault.images}; going on from step {run.step} without that step"
        self.runner.logger.warning(line)
        distributed.say(run.job.options, line)
        self._trackers.go_on_from(run.step)

    def _evaluate(self) -> None:
        run = self._run
        if run.evaluate is None:
            return
        distributed.broadcast_buffers(run.module)
        with run.average.applied(), torch.no_grad(), compiling.plainly():
            if run.whole is not run.module:
                sharding.gather(run.module, run.whole)
            run.whole.eval()
            metrics = run.evaluate(run.whole)
        self.runner.model.train()
        run.evaluations.append({"step": run.step, **metrics})
        self.runner.logger.info(f"evaluation after step {run.step}: {metrics}")
        self._trackers.add(run.step, metrics)
