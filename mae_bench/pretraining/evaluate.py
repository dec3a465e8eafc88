"""The loss on validation pictures under fixed masks, and what predicting nothing would cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mae_bench.engine import distributed, signals
from mae_bench.engine.job import Job
from mae_bench.engine.precision import autocast, effective_precision
from mae_bench.engine.samplers import ExactShard, SeededDataset
from mae_bench.pretraining.images import TrainingSamples, ValidationSamples, collate
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.schema import PretrainingValues

LARGEST_BATCH = 256
BASELINE_PICTURES = 1000  # training pictures, of the first epoch, that the baseline of `loss` looks at


class Evaluation:
    """``evaluation(model)`` is {"val_loss"}: the objective over the validation split, each picture once, on every
    process with the same result. Data loading processes stay from one evaluation to the next, until ``close``."""

    def __init__(self, job: Job, values: PretrainingValues, validation: ValidationSamples) -> None:
        self.job = job
        self.device = distributed.device(job.options)
        self.precision = effective_precision(job, values, self.device)
        self._batch = min(job.options.micro_batch or values.batch, LARGEST_BATCH)
        self._samples = validation
        self._kept: DataLoader[Any] | None = None

    def close(self) -> None:
        """End the data loading processes now, and not when the runner that refers to this object is collected."""
        self._kept = None

    @property
    def _validation(self) -> DataLoader[Any]:
        if self._kept is None:
            self._kept = self._loader(self._samples, range(len(self._samples)))
        return self._kept

    def _loader(self, samples: Any, keys: Any) -> DataLoader[Any]:
        shard = ExactShard(len(keys), distributed.rank(), distributed.world_size())
        return DataLoader(
            samples,
            batch_size=self._batch,
            sampler=[keys[number] for number in shard],
            collate_fn=collate,
            num_workers=self.job.options.workers,
            persistent_workers=self.job.options.workers > 0,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
            worker_init_fn=signals.leave_to_main_process,
        )

    def __call__(self, model: nn.Module) -> dict[str, float]:
        return {"val_loss": self._mean(model, self._validation, lambda data: model(**data, mode="loss")["loss"])}

    def baseline(self, model: MaskedAutoencoder, training: TrainingSamples) -> dict[str, float]:
        """The loss of predicting zeros, which is the mean colour: of each patch under ``norm_pix``, else of the
        backbone's statistics. For ``loss`` measured on the first training pictures, as the first epoch crops them."""
        keys = [(0, index) for index in range(min(len(training), BASELINE_PICTURES))]
        first_epoch = self._loader(SeededDataset(training, self.job.seed), keys)

        return {
            "loss": self._mean(model, first_epoch, lambda data: model.blank_loss(**data)),
            "val_loss": self._mean(model, self._validation, lambda data: model.blank_loss(**data)),
        }

    @torch.no_grad()
    def _mean(self, model: Any, loader: DataLoader[Any], measure: Callable[[dict[str, Tensor]], Tensor]) -> float:
        """Mean of ``measure`` over the pictures of all processes."""
        total = torch.zeros(2, dtype=torch.float64)
        for batch in loader:
            data = model.data_preprocessor(batch)
            with autocast(self.device, self.precision):
                loss = measure(data).item()
            count = len(data["inputs"])
            total += torch.tensor([loss * count, count], dtype=torch.float64)
        summed, count = distributed.sum_over_processes(total).tolist()
        return float(summed / count)
