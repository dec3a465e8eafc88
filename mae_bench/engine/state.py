"""The state of a training run between two steps: all that a resumed run needs, and what a step works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mae_bench.data.decode import Oddities
from mae_bench.engine import distributed, sharding
from mae_bench.engine.averaging import WeightAverage
from mae_bench.engine.job import Job
from mae_bench.engine.oddities import gather_oddities
from mae_bench.engine.plan import Plan
from mae_bench.engine.precision import StepWrapper
from mae_bench.engine.samplers import StepSampler
from mae_bench.schema import Optimisation

Metrics = dict[str, float]
Evaluate = Callable[[nn.Module], Metrics]


@dataclass
class Run:
    """``module`` is trained and ``whole`` evaluated: they are the same but for a sharded run."""

    job: Job
    values: Optimisation
    plan: Plan
    module: nn.Module
    whole: nn.Module
    wrapper: StepWrapper
    average: WeightAverage
    sampler: StepSampler
    evaluate: Evaluate | None
    describe: Callable[[int], str]
    unit: str
    oddities: Oddities | None  # of the training pictures met so far
    step: int = 0
    curve: list[Metrics] = field(default_factory=list)
    evaluations: list[Metrics] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)  # steps that are left out, and why
    loss_sum: float = 0.0  # of this process's forward passes since the last curve point
    loss_count: int = 0
    seconds: float = 0.0  # in steps since the last curve point, and of these
    waited: float = 0.0  # for data

    def state(self) -> dict[str, Any]:
        """What a resumed run needs. Collective; complete in the main process."""
        if self.oddities is not None:
            gather_oddities(self.oddities)
        return {
            "model": sharding.whole(self.module.state_dict()),
            "optimizer": sharding.whole(self.wrapper.optimizer.state_dict()),
            "scaler": self.wrapper.scaler.state_dict(),
            "average": sharding.whole(self.average.state_dict()),
            "curve": self.curve,
            "evaluations": self.evaluations,
            "skipped": self.skipped,
            "pending_loss": self._pending_loss().tolist(),
            # Copied: loaders write to the memory of the flags while the file is written.
            "oddities": None if self.oddities is None else self.oddities.flags.clone(),
        }

    def _pending_loss(self) -> torch.Tensor:
        """Row per process: loss sum and count. Sums over processes are taken in the end, always in the same order."""
        rows = torch.zeros(distributed.world_size(), 2, dtype=torch.float64)
        rows[distributed.rank()] = torch.tensor([self.loss_sum, self.loss_count], dtype=torch.float64)
        return distributed.sum_over_processes(rows)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, in any number of processes. Collective."""
        self.module.load_state_dict(sharding.spread(state["model"], self.module.state_dict()))
        optimizer = self.wrapper.optimizer
        optimizer.load_state_dict(sharding.spread_optimizer(state["optimizer"], optimizer))
        self.wrapper.scaler.load_state_dict(state["scaler"])
        self.average.load_state_dict(sharding.spread(state["average"], self.average.state_dict()))
        self.curve, self.evaluations = state["curve"], state["evaluations"]
        if self.oddities is not None:
            self.oddities.flags |= state["oddities"]
        self.skipped = state["skipped"] | self.skipped
        self.sampler.skipped = self.skipped.keys()
        self.step = self.sampler.start_step = state["step"]
        pending = state["pending_loss"]
        if len(pending) != distributed.world_size():
            total = [sum(column) for column in zip(*pending, strict=True)]
            pending = [total] + [[0.0, 0]] * (distributed.world_size() - 1)
        self.loss_sum, self.loss_count = pending[distributed.rank()][0], int(pending[distributed.rank()][1])
        self.seconds = self.waited = 0.0

    def add_point(self, lr: float) -> Metrics | None:
        """A point of the curve, its loss the mean over all processes since the one before; None where every step since
        was left out. Collective."""
        total, count = self._pending_loss().sum(dim=0).tolist()
        self.loss_sum, self.loss_count = 0.0, 0
        if not count:
            return None
        self.curve.append({"step": self.step, "loss": total / count, "lr": lr})
        return self.curve[-1]
