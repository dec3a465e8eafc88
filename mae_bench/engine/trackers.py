"""Curves for other programs, beside log.txt: TensorBoard's event files and Weights & Biases. Only where asked for.

Values arrive when a point of the curve is due, at most a few hundred times a run, and are written by threads of their
own: no step waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from mae_bench.engine import distributed
from mae_bench.engine.job import Job
from mae_bench.errors import UserError, nearest


class Tracker(Protocol):
    """One program's curves of a run. ``step`` may go back; what lies beyond it then no longer counts."""

    def go_on_from(self, step: int) -> None: ...

    def add(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder: ``tensorboard --logdir runs`` names the run as its folder."""

    def __init__(self, job: Job) -> None:
        self._folder = str(job.folder)
        self._writer: Any = None

    def go_on_from(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(self._folder, purge_step=step + 1)

    def add(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A Weights & Biases run, the same one after --resume; project and account are wandb's own settings."""

    def __init__(self, job: Job) -> None:
        wandb: Any = import_module("wandb")
        labels = {"task": job.task.task.name, "backbone": job.backbone.name, "seed": job.seed}
        config = labels | job.task.values.model_dump(mode="json")
        name = "-".join(map(str, (*labels.values(), job.folder.name)))
        self._run = wandb.init(dir=str(job.folder), id=name, name=name, config=config, resume="allow")
        self._run.define_metric("*", step_metric="step")

    def go_on_from(self, step: int) -> None:
        """Points with the same step replace the ones before in its charts."""

    def add(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Job], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check(names: Iterable[str]) -> None:
    """Raises UserError for a tracker that is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--log {name}: expected {' or '.join(TRACKERS)}{nearest(name, TRACKERS)}")
        if find_spec(name) is None:
            raise UserError(f"--log {name}: {name} is not installed; pip install {name}")


class Trackers:
    """The trackers that the job asks for, in the main process; none in the others."""

    def __init__(self, job: Job) -> None:
        check(job.options.log)
        self._all = [TRACKERS[name](job) for name in job.options.log] if distributed.main_process() else []

    def go_on_from(self, step: int) -> None:
        for tracker in self._all:
            tracker.go_on_from(step)

    def add(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._all:
            tracker.add(step, values)

    def close(self) -> None:
        for tracker in self._all:
            tracker.close()
