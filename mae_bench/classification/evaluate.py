"""The one evaluation of a classifier: exact integer counts over all processes, each image once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

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

    def add(self, logits_BK: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Count a batch, and say of each picture whether the first prediction is right, (B,) bool.

        Among equal logits, which one counts as predicted is up to torch's sort, as for any argmax.
        """
        logits_BK, labels_B = logits_BK.float().cpu(), labels_B.cpu()
        if not logits_BK.isfinite().all():
            raise UserError("the model's predictions are not finite; use --set precision=bf16 or fp32")
        classes = len(self.images)
        hits_BT = logits_BK.topk(min(TOP, classes)).indices == labels_B[:, None]
        self.images += labels_B.bincount(minlength=classes)
        self.top1 += labels_B[hits_BT[:, 0]].bincount(minlength=classes)
        self.top5 += labels_B[hits_BT.any(dim=1)].bincount(minlength=classes)
        self.loss += F.cross_entropy(logits_BK.double(), labels_B, reduction="sum")
        return hits_BT[:, 0]

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
    """``evaluation(classifier)`` measures it on the validation split, on every process with the same result. Data
    loading processes stay from one evaluation to the next, until ``close``."""

    def __init__(self, job: Job, values: ClassificationValues) -> None:
        self.job = job
        self.source = job.dataset.labelled("val")
        self.pictures = Pictures(self.source, evaluation_transform(values))
        self.classes = job.dataset.classes
        self.counts = Counts.zeros(len(self.classes))  # of the latest evaluation
        self.right_N = torch.zeros(len(self.source), dtype=torch.bool)  # its top predictions, in the data set's order
        self.device = distributed.device(job.options)
        self.precision = effective_precision(job, values, self.device)
        self._shard = ExactShard(len(self.source), distributed.rank(), distributed.world_size())
        self._batch = min(job.options.micro_batch or values.batch, LARGEST_BATCH)
        self._loader: DataLoader[Sample] | None = None

    def close(self) -> None:
        """End the data loading processes now, and not when the runner that refers to this object is collected."""
        self._loader = None

    def _load(self) -> DataLoader[Sample]:
        workers = self.job.options.workers
        return DataLoader(
            self.pictures,  # type: ignore[arg-type]
            batch_size=self._batch,
            sampler=self._shard,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
            worker_init_fn=signals.leave_to_main_process,
        )

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """``model`` is a Classifier on the run's device."""
        assert isinstance(model, Classifier)
        model.eval()
        if self._loader is None:
            self._loader = self._load()
        counts, right_N, order = Counts.zeros(len(self.classes)), torch.zeros_like(self.right_N), iter(self._shard)
        quiet = self.job.options.quiet or not distributed.main_process()
        with Progress(len(self._loader), "evaluate", quiet) as progress, torch.no_grad():
            for number, batch in enumerate(self._loader, 1):
                data = model.data_preprocessor(batch)
                with autocast(self.device, self.precision):
                    logits_BK = model(data["inputs"])
                hits_B = counts.add(logits_BK, batch["data_samples"])
                right_N[list(islice(order, len(hits_B)))] = hits_B
                progress.update(number)
        self.counts = counts.over_processes()
        self.right_N = distributed.sum_over_processes(right_N.long()).bool()
        return self.counts.metrics()

    def per_class(self) -> dict[str, dict[str, float]]:
        return self.counts.per_class(self.classes)

    def images(self) -> tuple[str, list[bool]]:
        """Digest of the validation pictures' names, and in the same order whether each one was right at last."""
        names = (self.source.name(index) for index in range(len(self.source)))
        return names_digest(names, self.job.dataset.root), self.right_N.tolist()

    def baseline(self) -> dict[str, float]:
        """Always predicting the most frequent classes of the validation split."""
        counts = np.bincount(self.source.labels, minlength=len(self.classes))
        shares = 100 * np.sort(counts)[::-1] / len(self.source)
        found = {"top1": float(shares[0])}
        if len(self.classes) > TOP:
            found["top5"] = float(shares[:TOP].sum())
        return found


def names_digest(names: Iterable[str], root: Path) -> str:
    """sha256 (hex) of the names below ``root``, joined by NUL: the same wherever the data lie, another in any other
    order."""
    text = "\0".join(name.removeprefix(f"{root}/") for name in names)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
