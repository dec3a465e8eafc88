"""Mixed precision: autocast on GPUs, and an mmengine optimiser wrapper that scales, measures and clips gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mae_bench.engine import distributed, sharding
from mae_bench.engine.job import Job
from mae_bench.errors import UserError
from mae_bench.schema import Optimisation

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class NonFiniteLossError(Exception):
    """The loss or the gradient of a step is NaN or infinite; the weights have not been touched by it."""


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


OVERFLOW = "finite, but its fp16 gradients overflow at every scale"


def exhausted(scaler: torch.amp.GradScaler) -> bool:
    """The scale has been halved below any use: the scaler would skip each further step, for ever and silently."""
    return scaler.is_enabled() and scaler.get_scale() < SMALLEST_SCALE


def check_scale(scaler: torch.amp.GradScaler) -> None:
    """Stop a run whose fp16 gradients overflow at every scale.

    Raises:
        NonFiniteLossError: it is so.
    """
    if exhausted(scaler):
        raise NonFiniteLossError(OVERFLOW)


def broken_weights(model: nn.Module) -> str:
    """Name of the first parameter that is not finite, in this process's part of a sharded model; "" = all are."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(sharding.own(parameter)).all()):
            return name
    return ""


def check_parameters(model: nn.Module, step: int) -> None:
    """Refuse to evaluate weights that are not finite: metrics of nothing look like a bad model, not like a fault.

    Raises:
        UserError: names the first such parameter.
    """
    if name := broken_weights(model):
        raise UserError(
            f"after step {step} the weights of {name} are not finite; lower base_lr, set clip_grad, or use "
            "--set precision=bf16 or fp32"
        )


@dataclass(frozen=True)
class Gradient:
    """What is known of a step once its backward passes are done."""

    losses: list[float]  # of this process's forward passes
    norm: float  # of the whole gradient, before clipping; nan where fp16 does not measure it
    sound: bool  # the same in every process: the step may be taken
    fault: str  # what this process has found wrong, e.g. "loss is nan"; "" where it is another's
    requests: list[float]  # the largest of all processes


class StepWrapper(OptimWrapper):
    """Optimiser of a step that is taken in two parts: ``measure`` after the last backward pass, then ``step`` or
    ``discard``. In between the caller decides, in all processes alike.

    One transfer from the device and one exchange between processes per optimiser step, however many forward passes it
    has. mmengine's own AmpOptimWrapper refuses to exist without a GPU.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, precision: str, accumulation: int, clip: float
    ) -> None:
        super().__init__(optimizer, accumulative_counts=accumulation)
        self.device = device
        self.precision = precision
        self.clip = clip
        self.scaler = self._new_scaler()
        self._losses: list[torch.Tensor] = []
        self._norm: torch.Tensor | None = None

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, enabled=self.device.type == "cuda" and self.precision == "fp16")

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """mmengine counts down to the last forward pass, which a run that goes back would meet twice. Not here."""

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(self.device, self.precision):
            yield

    def update_params(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """The backward pass of one forward pass; mmengine's ``train_step`` calls it so."""
        self._losses.append(loss.detach().double())
        self.backward(self.scale_loss(loss))

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        super().backward(self.scaler.scale(loss), **options)

    def measure(self, requests: Sequence[float] = ()) -> Gradient:
        """Losses and gradient norm of the step, and each of ``requests`` at its largest over all processes. Collective.

        A norm that is not finite is a fault but in fp16, whose scaler lowers its scale and leaves the step out; there
        a scale lowered beyond use is one.
        """
        scaled = self.scaler.is_enabled()
        if scaled and self.clip:
            self.scaler.unscale_(self.optimizer)
        losses = torch.stack(self._losses)
        self._norm = None if scaled and not self.clip else self._gradient_norm()
        norm = losses.new_tensor(math.nan) if self._norm is None else self._norm.to(losses)
        broken = ~torch.isfinite(losses).all()
        shared = distributed.largest(torch.cat([broken.reshape(1), losses.new_tensor(requests)]))
        measured = torch.cat([losses, norm.reshape(1), shared]).tolist()
        found, (size, elsewhere, *asked) = measured[: len(losses)], measured[len(losses) :]
        fault = self._fault(found, size)  # of norm and scale, which are every process's, or of its own losses
        return Gradient(found, size, not elsewhere and not fault, fault, asked)

    def _fault(self, losses: list[float], norm: float) -> str:
        scaled = self.scaler.is_enabled()
        for loss in losses:
            if not math.isfinite(loss):
                return f"loss is {loss}"
        if exhausted(self.scaler):
            return f"loss is {OVERFLOW}"
        return "" if scaled or math.isfinite(norm) else f"gradient norm is {norm}"

    def _gradient_norm(self) -> torch.Tensor:
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        return sharding.whole_tensor(get_total_norm(gradients))

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def step(self, **options: Any) -> None:
        """Clip by the measured norm and update the weights; fp16 leaves out a step that overflows."""
        if self.clip:
            assert self._norm is not None
            clip_grads_with_norm_(self._parameters(), self.clip, self._norm)
        self.scaler.step(self.optimizer, **options)
        self.scaler.update()
        self._forget()

    def discard(self) -> None:
        """Forget the step: its losses and gradients, and what the scaler has seen of it."""
        scale = self.scaler.state_dict()
        self.scaler = self._new_scaler()
        self.scaler.load_state_dict(scale)
        self._forget()

    def _forget(self) -> None:
        self.zero_grad()
        self._losses = []
