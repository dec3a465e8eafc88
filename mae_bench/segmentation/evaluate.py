"""Evaluation: mmseg's counts per picture, summed over the split, and the scores that follow from the sums.

Counts come from mmseg's ``IoUMetric.intersect_and_union`` and scores from its ``total_area_to_metrics``: mIoU is the
mean over classes of summed intersection / summed union, never a mean over pictures. Two things differ from running
``IoUMetric`` whole: sums are integers (mmseg's float32 stops counting single pixels above 2^24), and scores are not
rounded to two digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.dataset import pseudo_collate
from mmseg.evaluation import IoUMetric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mae_bench.engine import distributed, signals
from mae_bench.engine.progress import Progress
from mae_bench.engine.samplers import ExactShard
from mae_bench.errors import UserError
from mae_bench.segmentation.adapter import IGNORE, Segmenter
from mae_bench.segmentation.data import PairDataset

_PIXELS_AT_ONCE = 1 << 22  # mmseg's histogram counts in float32, exact up to 2^24


@dataclass(frozen=True)
class Scores:
    """Percentages. ``per_class`` lacks what is undefined: Acc of a class without labelled pixels, IoU of a class that
    is also never predicted (such classes are ``absent`` and left out of mIoU)."""

    metrics: dict[str, float]  # mIoU, mAcc, aAcc
    per_class: dict[str, dict[str, float]]  # class name -> IoU, Acc
    absent: int


def count_areas(predicted_HW: Tensor, labels_HW: Tensor, classes: int) -> Tensor:
    """(4,C) int64 pixel counts per class: intersection, union, predicted, labelled. Label 255 counts nowhere."""
    areas_4C = torch.zeros(4, classes, dtype=torch.long)
    predicted_N, labels_N = predicted_HW.flatten(), labels_HW.flatten().to(predicted_HW)
    for start in range(0, len(labels_N), _PIXELS_AT_ONCE):
        chunk = slice(start, start + _PIXELS_AT_ONCE)
        counts = IoUMetric.intersect_and_union(predicted_N[chunk], labels_N[chunk], classes, IGNORE)
        areas_4C += torch.stack(counts).long()
    return areas_4C


def score(areas_4C: Tensor, names: Sequence[str]) -> Scores:
    """Scores from summed counts. Raises UserError where no pixel is labelled."""
    if not areas_4C[3].sum():
        raise UserError("the validation labels hold no labelled pixel: check the task recipe's zero_is_other")
    result = IoUMetric.total_area_to_metrics(*areas_4C.double(), metrics=["mIoU"])
    columns = {key: [100 * value for value in result[key].tolist()] for key in ("IoU", "Acc")}
    defined = {key: [value for value in column if not math.isnan(value)] for key, column in columns.items()}
    return Scores(
        metrics={f"m{key}": math.fsum(values) / len(values) for key, values in defined.items()}
        | {"aAcc": 100 * float(result["aAcc"])},
        per_class={
            # a name that several classes share carries the class's number
            (f"{name} ({number})" if names.count(name) > 1 else name): {
                key: column[number] for key, column in columns.items() if not math.isnan(column[number])
            }
            for number, name in enumerate(names)
        },
        absent=len(names) - len(defined["IoU"]),
    )


def majority(areas_4C: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Metrics of predicting the most frequent class of the labels at every pixel."""
    labels_C = areas_4C[3]
    top = int(labels_C.argmax())
    intersection_C, predicted_C = torch.zeros_like(labels_C), torch.zeros_like(labels_C)
    intersection_C[top], predicted_C[top] = labels_C[top], labels_C.sum()
    union_C = predicted_C + labels_C - intersection_C
    return score(torch.stack([intersection_C, union_C, predicted_C, labels_C]), names).metrics


class Evaluator:
    """The one evaluation, called during training and by ``--eval-only``. One picture at a time (sizes differ), in fp32
    as mmengine's evaluation is, scored at the native size; every process takes an uneven share and counts are added.

    After a call, ``scores`` and ``baseline`` hold its details.
    """

    def __init__(self, dataset: PairDataset, workers: int, quiet: bool) -> None:
        self.dataset, self.workers, self.quiet = dataset, workers, quiet
        self.names: tuple[str, ...] = dataset.metainfo["classes"]
        self.scores = Scores({}, {}, 0)
        self.baseline: dict[str, float] = {}

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """mIoU, mAcc and aAcc of ``model``, the same in every process; it is left in the mode that it came in."""
        assert isinstance(model, Segmenter)
        training = model.training
        model.eval()
        areas_4C = torch.zeros(4, len(self.names), dtype=torch.long)
        shard = ExactShard(len(self.dataset), distributed.rank(), distributed.world_size())
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            sampler=shard,
            num_workers=self.workers,
            collate_fn=pseudo_collate,
            generator=torch.Generator(),  # its base seed must not come from, and so change, a global generator
            worker_init_fn=signals.leave_to_main_process,
        )
        with Progress(len(shard), "evaluation", self.quiet) as progress:
            for number, data in enumerate(loader, 1):
                (predicted_HW,) = model.val_step(data)
                labels_HW = data["data_samples"][0].gt_sem_seg.data[0]
                areas_4C += count_areas(predicted_HW, labels_HW.to(predicted_HW.device), len(self.names))
                progress.update(number)
        model.train(training)
        areas_4C = distributed.sum_over_processes(areas_4C)
        self.scores, self.baseline = score(areas_4C, self.names), majority(areas_4C, self.names)
        return self.scores.metrics
