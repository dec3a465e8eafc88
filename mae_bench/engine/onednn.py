"""Linear layers by oneDNN on CPUs where PyTorch's own choice, Intel's MKL, leaves half of the speed unused.

PyTorch multiplies float32 matrices on x86 with MKL, which takes its fast kernels on Intel's processors alone; oneDNN,
which PyTorch brings along for convolutions, takes them on every processor (twice the speed on an AMD EPYC with
AVX-512). The result is the same sum in another order, as with any other BLAS. The choice depends on the processor only,
so that a run and its continuation make the same one.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula


@cache
def preferred() -> bool:
    """Whether float32 linear layers go to oneDNN on this machine's CPU."""
    available: bool = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not available or platform.machine() != "x86_64" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # no Linux
        return False


def _multiply(x_MK: Tensor, y_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ y.T + bias."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, y_NK, bias_N, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _multiply(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_MO, x_MI = grad.flatten(0, -2), x.flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _multiply(grad_MO, weight_OI.t()).view(x.shape) if needs_x else None,
            _multiply(grad_MO.t(), x_MI.t()) if needs_weight else None,
            grad_MO.sum(dim=0) if needs_bias else None,
        )


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``F.linear``, by oneDNN where that is preferred: float32 on the CPU, outside autocast."""
    fits = x.dtype == weight_OI.dtype == torch.float32 and x.device.type == "cpu" and x.dim() > 1 and x.numel() > 0
    if fits and preferred() and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling():
        out: Tensor = _Linear.apply(x, weight_OI, bias_O)
        return out
    return F.linear(x, weight_OI, bias_O)


class Linear(nn.Linear):
    """``nn.Linear`` through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def accelerate(model: nn.Module) -> None:
    """Let every plain ``nn.Linear`` of a model compute through `linear`; parameters and names stay."""
    if preferred():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


@register_flop_formula(torch.ops.mkldnn._linear_pointwise if hasattr(torch.ops.mkldnn, "_linear_pointwise") else [])
def _flops(x_shape: list[int], weight_shape: list[int], *_: Any, **__: Any) -> int:
    """For torch's flop counter, which does not know the operation."""
    rows = 1
    for size in x_shape[:-1]:
        rows *= size
    return 2 * rows * weight_shape[0] * weight_shape[1]
