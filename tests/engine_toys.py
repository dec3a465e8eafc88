"""A small model, data set and job for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.model import BaseModel
from torch import nn
from torch.nn import functional as F

from mae_bench.data import Dataset
from mae_bench.data.decode import Oddities
from mae_bench.engine import distributed, optim, runner
from mae_bench.engine.job import Job, Options
from mae_bench.engine.plan import Plan, make_plan
from mae_bench.recipes import ResolvedTask
from mae_bench.schema import Architecture, Backbone, ClassificationValues, DataSpec, Input, NoWeights, Task

IMAGES = 20
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make_values(**changes: Any) -> ClassificationValues:
    """Fine-tuning for three epochs of two steps; ``changes`` replace or add values."""
    base: dict[str, Any] = {
        "mode": "finetune",
        "image_size": 8,
        "pool": "cls",
        "head_init_std": 0.1,
        "epochs": 3,
        "batch": 8,
        "base_lr": 0.01,
        "weight_decay": 0.1,
    }
    if "steps" in changes:
        del base["epochs"]
    return ClassificationValues.model_validate(base | changes)


def make_backbone(**changes: Any) -> Backbone:
    """Two blocks of width 16 on 8-pixel pictures with 4-pixel patches, from scratch."""
    shape: dict[str, Any] = {"patch": 4, "width": 16, "depth": 2, "heads": 2, "image_size": 8}
    return Backbone(
        name="toy",
        size="t",
        init="scratch",
        summary="for tests",
        architecture=Architecture(**(shape | changes)),
        input=Input(mean=MEAN, std=STD),
        weights=NoWeights(kind="none"),
    )


def make_job(folder: Path, values: ClassificationValues, dataset: Dataset | None = None, **options: Any) -> Job:
    """A job in ``folder``; by default on the CPU, without workers, quiet, with data that only have a fingerprint."""
    spec = dataset.spec if dataset else DataSpec(format="image_folder", train="train", val="val")
    task = Task.model_validate(
        {
            "name": "toy",
            "engine": "classification",
            "protocol": "toy@1",
            "metric": "top1",
            "summary": "for tests",
            "reference": "none",
            "data": spec,
            "layer": [{"source": "ours", "values": {}}],
        }
    )
    dataset = dataset or Dataset(spec, folder, ("a", "b", "c"), {"train": IMAGES, "val": 0}, "f" * 64, False, True, {})
    settings = {"device": "cpu", "workers": 0, "quiet": True} | options
    return Job(ResolvedTask(task, values, {}), make_backbone(), 3, Options(**settings), folder, dataset, None)


class Model(BaseModel):
    """Four numbers to three classes; dropout and BatchNorm make it depend on random numbers and on micro batches."""

    def __init__(self, noisy: bool = True) -> None:
        super().__init__()
        middle = [nn.Dropout(0.5), nn.BatchNorm1d(8)] if noisy else [nn.Tanh()]
        self.blocks = nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor, data_samples: Any = None, mode: str = "tensor") -> Any:
        logits = self.blocks(inputs)
        return {"loss": F.cross_entropy(logits, data_samples)} if mode == "loss" else logits


class Noise:
    """Pictures that are noise around their index, drawn from torch's global generator."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.broken:
            return torch.full((4,), float("nan")), 0
        return torch.full((4,), index / IMAGES) + torch.rand(4), index % 3


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    return {
        "inputs": torch.stack([image for image, _ in samples]),
        "data_samples": torch.tensor([label for _, label in samples]),
    }


def weight_sum(model: nn.Module) -> dict[str, float]:
    """An "evaluation" that tells weights apart."""
    return {"sum": sum(float(parameter.detach().double().sum()) for parameter in model.parameters())}


def plan_for(job: Job) -> Plan:
    return make_plan(job.task.values, IMAGES, job.options, distributed.world_size())


def train(
    job: Job,
    *,
    noisy: bool = True,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = weight_sum,
    dataset: Noise | None = None,
    kind: type[Model] = Model,
    oddities: Oddities | None = None,
) -> tuple[Model, runner.Fit]:
    """Fit the same initial model on the job's values."""
    values: ClassificationValues = job.task.values
    torch.manual_seed(0)
    model = kind(noisy)
    groups = optim.parameter_groups(model, values, encoder_prefix="", depth=len(model.blocks))
    fitted = runner.fit(
        model,
        dataset or Noise(),
        collate,
        job=job,
        values=values,
        plan=plan_for(job),
        optimizer=optim.build_optimizer(groups, values),
        evaluate=evaluate,
        metric="sum" if evaluate else "loss",
        unit="epoch",
        describe=lambda index: f"picture {index}",
        oddities=oddities,
    )
    return model, fitted


def same_state(a: nn.Module, b: nn.Module) -> bool:
    """Bit for bit, buffers included."""
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)
