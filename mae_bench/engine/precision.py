"""Mixed precision: autocast on GPUs, and an mmengine optimiser wrapper that scales, clips and checks the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from torch import nn

from mae_bench.engine.job import Job
from mae_bench.errors import UserError
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


SMALLEST_SCALE = 2.0**-10  # a healthy fp16 run stays far above 1


def check_scale(scaler: torch.amp.GradScaler) -> None:
    """Stop a run whose fp16 gradients overflow at every scale: the scaler would skip each step, for ever and silently.

    Raises:
        NonFiniteLossError: the scale has been halved below any use.
    """
    if scaler.is_enabled() and scaler.get_scale() < SMALLEST_SCALE:
        raise NonFiniteLossError("finite, but its fp16 gradients overflow at every scale")


def check_parameters(model: nn.Module, step: int) -> None:
    """Refuse to evaluate weights that are not finite: metrics of nothing look like a bad model, not like a fault.

    Raises:
        UserError: names the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(
                f"after step {step} the weights of {name} are not finite; lower base_lr, set clip_grad, or use "
                "--set precision=bf16 or fp32"
            )


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
        check_scale(self.scaler)
