"""Mixed precision: autocast on GPUs, and an mmengine optimiser wrapper that scales, clips and checks the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from torch import nn

from mae_bench.engine.job import Job
from mae_bench.schema import Optimisation

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class NonFiniteLossError(Exception):
    """The loss of a forward pass is NaN or infinite; the weights have not been touched by it."""


def effective_precision(job: Job, values: Optimisation, device: torch.device) -> str:
    """The protocol's precision on a GPU, fp32 on a CPU; the difference is noted."""
    if device.type == "cuda" or values.precision == "fp32":
        return values.precision
    job.note(f"precision {values.precision} is the protocol's on a GPU; this run computed in fp32 on a CPU")
    return "fp32"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Context for forward passes, the same in training and evaluation."""
    enabled = device.type == "cuda" and precision != "fp32"
    return torch.autocast(device.type, dtype=_TYPES[precision] if enabled else torch.bfloat16, enabled=enabled)


class StepWrapper(OptimWrapper):
    """OptimWrapper with autocast, fp16 loss scaling on GPUs, and a loss that must be finite.

    mmengine's own AmpOptimWrapper refuses to exist without a GPU.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, precision: str, accumulation: int, clip: float
    ) -> None:
        clipping = {"max_norm": clip} if clip else None
        super().__init__(optimizer, accumulative_counts=accumulation, clip_grad=clipping)
        self.device = device
        self.precision = precision
        self.scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and precision == "fp16")

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(self.device, self.precision):
            yield

    def update_params(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        if not bool(torch.isfinite(loss)):
            raise NonFiniteLossError(f"{loss.item()}")
        super().update_params(loss, *arguments, **options)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        super().backward(self.scaler.scale(loss), **options)

    def step(self, **options: Any) -> None:
        if self.clip_grad_kwargs:
            self.scaler.unscale_(self.optimizer)
            self._clip_grad()
        self.scaler.step(self.optimizer, **options)
        self.scaler.update()
