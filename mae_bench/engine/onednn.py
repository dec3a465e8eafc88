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
from timm.layers import Mlp
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula


@torch.compiler.assume_constant_result
def preferred() -> bool:
    """Whether float32 linear layers go to oneDNN on this machine's CPU."""
    return _preferred()


@cache
def _preferred() -> bool:
    available: bool = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not available or platform.machine() != "x86_64" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # no Linux
        return False


# An operation of our own, which torch.compile leaves whole: it would take mkldnn's for one with constant weights.
@torch.library.custom_op("mae_bench::multiply", mutates_args=())
def _multiply(x_MK: Tensor, y_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ y.T + bias."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, y_NK, bias_N, "none", [], "")
    return product


@_multiply.register_fake
def _shape(x_MK: Tensor, y_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """What torch.compile knows of it."""
    return x_MK.new_empty(*x_MK.shape[:-1], len(y_NK))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        product: Tensor = _multiply(x, weight_OI, bias_O)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_MO = grad.flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        # What stays is made before what passes on, which leaves fewer gaps between them in memory.
        grad_OI = _multiply(grad_MO.t(), x.flatten(0, -2).t()) if needs_weight else None
        grad_O = grad_MO.sum(dim=0) if needs_bias else None
        return _multiply(grad_MO, weight_OI.t()).view(x.shape) if needs_x else None, grad_OI, grad_O


class _GeluLinear(torch.autograd.Function):
    """A linear layer of gelu(h). The activation is computed again in the backward pass, where it is used, and not kept:
    one pass over it against a quarter of what a transformer block keeps."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(h, weight_OI)
        product: Tensor = _multiply(F.gelu(h), weight_OI, bias_O)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        h, weight_OI = ctx.saved_tensors
        grad_MO = grad.flatten(0, -2)
        needs_h, needs_weight, needs_bias = ctx.needs_input_grad
        grad_OI = _multiply(grad_MO.t(), F.gelu(h).flatten(0, -2).t()) if needs_weight else None
        grad_O = grad_MO.sum(dim=0) if needs_bias else None
        if not needs_h:
            return None, grad_OI, grad_O
        grad_h = _multiply(grad_MO, weight_OI.t()).view(h.shape)
        torch.ops.aten.gelu_backward.grad_input(grad_h, h, grad_input=grad_h)
        return grad_h, grad_OI, grad_O


def _fits(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether a linear layer goes to oneDNN: float32 on the CPU, outside autocast."""
    if x.dtype != torch.float32 or weight_OI.dtype != torch.float32 or x.device.type != "cpu":
        return False
    return x.dim() > 1 and x.numel() > 0 and preferred() and not torch.is_autocast_enabled("cpu")


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``F.linear``, by oneDNN where that is preferred."""
    if _fits(x, weight_OI):
        out: Tensor = _Linear.apply(x, weight_OI, bias_O)
        return out
    return F.linear(x, weight_OI, bias_O)


class Linear(nn.Linear):
    """``nn.Linear`` through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class GeluMlp(Mlp):
    """timm's MLP of linear, GELU and linear, which keeps one activation in the place of two."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc1(x)
        if _fits(h, self.fc2.weight) and not torch.compiler.is_compiling():  # torch.compile has its own judgement
            out: Tensor = _GeluLinear.apply(h, self.fc2.weight, self.fc2.bias)
            return out
        return self.fc2(F.gelu(h))  # type: ignore[no-any-return]


def _is_gelu_mlp(module: nn.Module) -> bool:
    """timm's MLP with nothing but an exact GELU between plain linear layers, and no hooks on what is not called."""
    if type(module) is not Mlp or type(module.act) is not nn.GELU or module.act.approximate != "none":
        return False
    if any(_hooked(module.get_submodule(name)) for name in ("act", "drop1", "norm", "fc2", "drop2")):
        return False
    dropped = any(part.p for part in module.modules() if isinstance(part, nn.Dropout))
    return not dropped and type(module.norm) is nn.Identity and type(module.fc2) in (nn.Linear, Linear)


def _hooked(module: nn.Module) -> bool:
    """Whether a call of ``module`` does more than its ``forward``, such as pruning or an older spectral norm."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in kinds)


def accelerate(model: nn.Module) -> None:
    """Let every plain ``nn.Linear`` of a model, and the MLPs made of them, compute here; parameters and names stay.

    Hooks that are put on the parts of an MLP afterwards are called for ``fc1`` alone.
    """
    if preferred():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
            elif _is_gelu_mlp(module):
                module.__class__ = GeluMlp


def place(model: nn.Module, device: torch.device) -> None:
    """Bring a model to the device where it trains or is evaluated; on a CPU its linear layers go to oneDNN."""
    model.to(device)
    if device.type == "cpu":
        accelerate(model)


def effective(device: torch.device) -> dict[str, str]:
    """What the record of a model that was placed on ``device`` says of it."""
    return {"linear": "oneDNN"} if device.type == "cpu" and preferred() else {}


@register_flop_formula(torch.ops.mae_bench.multiply)
def _flops(x_shape: list[int], weight_shape: list[int], *_: Any, **__: Any) -> int:
    """For torch's flop counter, which does not know the operation."""
    rows = 1
    for size in x_shape[:-1]:
        rows *= size
    return 2 * rows * weight_shape[0] * weight_shape[1]
