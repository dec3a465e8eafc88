"""Run under torchrun by test_engine_distributed: what two processes do alike, replicated and sharded."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_toys import Model, Noise, make_job, make_values, same_state, train, weight_sum

from mae_bench.data import open_dataset
from mae_bench.engine import distributed, sharding
from mae_bench.engine.job import Job, Options
from mae_bench.engine.signals import StoppedError
from mae_bench.pretraining.run import run
from mae_bench.recipes import load_backbone, resolve_task
from mae_bench.schema import NoWeights

LONG: dict[str, Any] = {"batch": 2, "clip_grad": 0.5, "ema": 0.9, "eval_every_steps": 10}  # 30 steps of two images


def pretraining_job(folder: Path, *settings: str, **options: Any) -> Job:
    """Twenty steps of 64 pictures of the tiny recipe, on smoke data."""
    backbone = load_backbone("vit_t_mae")
    task = resolve_task("tiny_pretrain", backbone, ["steps=20", "warmup_steps=2", "batch=64", *settings])
    backbone = backbone.model_copy(update={"weights": NoWeights(kind="none")})
    folder.mkdir(parents=True, exist_ok=True)
    chosen = replace(Options(out=folder, quiet=True, device="cpu", workers=0), **options)
    return Job(task, backbone, 0, chosen, folder, open_dataset(task.task.data, None, smoke=True), None)


class OnOne(Noise):
    """Something happens in the second process alone: a signal at its ``sample``-th picture, or a broken picture."""

    def __init__(self, sample: int = 0, broken: int = -1) -> None:
        super().__init__(broken)
        self.left = sample

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.left -= 1
        if self.left == 0 and distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def losses(folder: Path, **options: Any) -> list[float]:
    """The training curve of a pre-training run, all of whose points are single steps."""
    return [point["loss"] for point in run(pretraining_job(folder, **options)).history if "lr" in point]


def stops_and_goes_on(folder: Path, **options: Any) -> dict[str, Any]:
    """A signal to one process ends both after the same step; resumed, they do what two uninterrupted ones do."""
    values = make_values(**LONG)
    whole, fitted = train(make_job(folder / "whole", values, **options), noisy=False)
    try:
        train(make_job(folder / "cut", values, **options), noisy=False, dataset=OnOne(sample=13))
    except StoppedError as stopped:
        line = str(stopped)
    model, rest = train(make_job(folder / "cut", values, resume=True, **options), noisy=False)
    assert same_state(model, whole)
    assert rest == fitted
    return {"line": line, "history": fitted.history, "sum": weight_sum(model), "effective": fitted.effective}


def goes_back(folder: Path, **options: Any) -> dict[str, Any]:
    """A picture that is broken is met by one process at a time; both leave out its steps."""
    job = make_job(folder / "back", make_values(**(LONG | {"on_nonfinite": "rewind"})), **options)
    model, fitted = train(job, noisy=False, dataset=Noise(broken=7))
    return {"skipped": fitted.effective["skipped_steps"], "notes": job.notes, "sum": weight_sum(model)}


def shares() -> list[int]:
    """Numbers that each process holds of a sharded model, and of the whole."""
    model = Model(noisy=False)
    optimizer = torch.optim.AdamW(model.parameters())
    sharding.shard(model, optimizer, torch.device("cpu"))
    held = sum(sharding.own(parameter).numel() for parameter in optimizer.param_groups[0]["params"])
    return [*distributed.gather_objects(held), sum(parameter.numel() for parameter in model.parameters())]


def main(folder: Path) -> None:
    distributed.init(Options(device="cpu"))
    seen: dict[str, Any] = {
        "shares": shares(),
        "replicated": losses(folder / "replicated"),
        "accumulated": losses(folder / "accumulated", micro_batch=8),
        "sharded": losses(folder / "sharded", fsdp=True),
    }
    for name, fsdp in (("ddp", False), ("fsdp", True)):
        for inner in ("whole", "cut", "back"):
            (folder / name / inner).mkdir(parents=True, exist_ok=True)
        distributed.barrier()
        seen[name] = stops_and_goes_on(folder / name, fsdp=fsdp) | goes_back(folder / name, fsdp=fsdp)
    (folder / f"seen_{distributed.rank()}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
