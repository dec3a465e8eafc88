"""The one evaluation of a classifier: exact integer counts over all processes, each image once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from mae_bench.classification.adapter import Classifier
from mae_bench.classification.data import Pictures, Sample, collate, evaluation_transform
from mae_bench.engine import distributed, signals
from mae_bench.engine.job import Job
from mae_bench.engine.precision import autocast, effective_precision
from mae_bench.engine.progress import Progress
from mae_bench.engine.samplers import ExactShard
from mae_bench.errors import UserError
from mae_bench.schema import ClassificationValues

TOP = 5  # also reported where there are more classes than that
LARGEST_BATCH = 256


@dataclass
class Counts:
    """What an evaluation counts, (K,) integers per class: images, hits among the first 1 and 5 predictions; and the
    summed loss."""

    images: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    @classmethod
    def zeros(cls, classes: int) -> Counts:
        return cls(*(torch.zeros(classes, dtype=torch.int64) for _ in range(3)))

    def add(self, logits_BK: torch.Tensor, labels_B: torch.Tensor) -> None:
        """Count a batch. Among equal logits, which one counts as predicted is up to torch's sort, as for any argmax."""
        logits_BK, labels_B = logits_BK.float().cpu(), labels_B.cpu()
        if not logits_BK.isfinite().all():
            raise UserError("the model's predictions are not finite; use --set precision=bf16 or fp32")
        classes = len(self.images)
        hits_BT = logits_BK.topk(min(TOP, classes)).indices == labels_B[:, None]
        self.images += labels_B.bincount(minlength=classes)
        self.top1 += labels_B[hits_BT[:, 0]].bincount(minlength=classes)
        self.top5 += labels_B[hits_BT.any(dim=1)].bincount(minlength=classes)
        self.loss += F.cross_entropy(logits_BK.double(), labels_B, reduction="sum")

    def over_processes(self) -> Counts:
        summed = (self.images, self.top1, self.top5, self.loss)
        return Counts(*(distributed.sum_over_processes(count) for count in summed))

    def metrics(self) -> dict[str, float]:
        """``top1``, with more than five classes ``top5``, in percent; ``val_loss`` is the mean plain cross entropy."""
        total = int(self.images.sum())
        found = {"top1": 100 * int(self.top1.sum()) / total}
        if len(self.images) > TOP:
            found["top5"] = 100 * int(self.top5.sum()) / total
        return found | {"val_loss": float(self.loss) / total}

    def per_class(self, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """Class name -> ``top1`` in percent, for the classes that have images."""
        counts = zip(names, self.top1.tolist(), self.images.tolist(), strict=True)
        return {name: {"top1": 100 * hits / images} for name, hits, images in counts if images}


class Evaluation:
    """``evaluation(classifier)`` measures it on the validation split, on every process with the same result."""

    def __init__(self, job: Job, values: ClassificationValues) -> None:
        self.job = job
        self.items = job.dataset.labelled("val")
        self.classes = job.dataset.classes
        self.counts = Counts.zeros(len(self.classes))  # of the latest evaluation
        self.device = distributed.device(job.options)
        self.precision = effective_precision(job, values, self.device)
        shard = ExactShard(len(self.items), distributed.rank(), distributed.world_size())
        self._loader: DataLoader[Sample] = DataLoader(
            Pictures(self.items, evaluation_transform(values)),  # type: ignore[arg-type]
            batch_size=min(job.options.micro_batch or values.batch, LARGEST_BATCH),
            sampler=shard,
            collate_fn=collate,
            num_workers=job.options.workers,
            persistent_workers=job.options.workers > 0,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
            worker_init_fn=signals.leave_to_main_process,
        )

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """``model`` is a Classifier on the run's device."""
        assert isinstance(model, Classifier)
        model.eval()
        counts = Counts.zeros(len(self.classes))
        quiet = self.job.options.quiet or not distributed.main_process()
        with Progress(len(self._loader), "evaluate", quiet) as progress, torch.no_grad():
            for number, batch in enumerate(self._loader, 1):
                data = model.data_preprocessor(batch)
                with autocast(self.device, self.precision):
                    logits_BK = model(data["inputs"])
                counts.add(logits_BK, batch["data_samples"])
                progress.update(number)
        self.counts = counts.over_processes()
        return self.counts.metrics()

    def per_class(self) -> dict[str, dict[str, float]]:
        return self.counts.per_class(self.classes)

    def baseline(self) -> dict[str, float]:
        """Always predicting the most frequent classes of the validation split."""
        counts = np.bincount([label for _, label in self.items], minlength=len(self.classes))
        shares = 100 * np.sort(counts)[::-1] / len(self.items)
        found = {"top1": float(shares[0])}
        if len(self.classes) > TOP:
            found["top5"] = float(shares[:TOP].sum())
        return found
