"""Parameter groups with layer-wise lr decay and decay exemptions, and the optimisers.

Layer ids and the factor decay^(depth + 1 - id) are FAIR's (arXiv 2111.06377, `util/lr_decay.py`, after BEiT). LARS is
the variant of MoCo v3 and MAE (`util/lars.py`; You et al., arXiv 1708.03888): 1-D parameters are neither decayed nor
adapted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from mae_bench.errors import UserError
from mae_bench.schema import Optimisation

Group = dict[str, Any]
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def layer_id(name: str, encoder_prefix: str | None, depth: int) -> int:
    """0 = stem (tokens, positions, patch embedding), i + 1 = block i of the encoder, depth + 1 = everything else."""
    if encoder_prefix is None or not name.startswith(encoder_prefix):
        return depth + 1
    inner = name.removeprefix(encoder_prefix)
    if inner in ("cls_token", "reg_token", "pos_embed") or inner.startswith("patch_embed."):
        return 0
    block = re.match(r"blocks\.(\d+)\.", inner)
    return int(block.group(1)) + 1 if block else depth + 1


def parameter_kind(module: nn.Module, leaf: str) -> str:
    """What a parameter is, in the words of ``Optimisation.no_decay``; ``weight`` for all that is never exempt.

    Weight and bias of torch's norms and their subclasses are ``norm``; those of any other norm class are ``map_norm``:
    detectron2's LayerNorm over the channels of a map, which its own optimiser does not know as a norm.
    """
    parameter = module.get_parameter(leaf)
    if isinstance(module, NORMS):
        return "norm"
    if "norm" in type(module).__name__.lower() and parameter.ndim == 1:
        return "map_norm"
    if leaf.startswith(("rel_pos", "relative_position_bias")):
        return "rel_pos"
    if leaf.endswith("pos_embed"):
        return "positions"
    if leaf in ("cls_token", "reg_token", "mask_token"):
        return "tokens"
    if leaf == "gamma":
        return "layer_scale"
    return "bias" if leaf.endswith("bias") else "weight"


def parameter_groups(model: nn.Module, values: Optimisation, *, encoder_prefix: str | None, depth: int) -> list[Group]:
    """Groups of equal weight decay and lr factor: ``params``, ``weight_decay``, ``lr_scale``, ``lr``, ``name``.

    ``encoder_prefix`` is the path of the encoder in ``model`` with its final dot (``"encoder."``; ``""`` when the model
    is the encoder; None when there is none). Frozen parameters are left out. Groups come in the order of layer ids.
    """
    if encoder_prefix is None and values.layer_decay != 1:
        raise UserError("layer_decay has no effect on a model without an encoder; leave it out")
    groups: dict[tuple[int, bool], Group] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parent, _, leaf = name.rpartition(".")
        exempt = parameter_kind(model.get_submodule(parent), leaf) in values.no_decay
        layer = layer_id(name, encoder_prefix, depth)
        scale = values.layer_decay ** (depth + 1 - layer)
        group = groups.setdefault(
            (layer, exempt),
            {
                "params": [],
                "weight_decay": 0.0 if exempt else values.weight_decay,
                "lr_scale": scale,
                "lr": values.lr * scale,
                "name": f"layer_{layer}_{'no_decay' if exempt else 'decay'}",
            },
        )
        group["params"].append(parameter)
    ordered = [groups[key] for key in sorted(groups)]
    _assert_complete(model, ordered)
    return ordered


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Numbers of all and of trainable parameters, for the record."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return {"total": sum(size for size, _ in sizes), "trainable": sum(size for size, trains in sizes if trains)}


def _assert_complete(model: nn.Module, groups: list[Group]) -> None:
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if len(grouped) != len(trainable) or set(grouped) != trainable:
        raise AssertionError(f"{len(trainable)} trainable parameters, but {len(grouped)} in optimiser groups")


def build_optimizer(groups: list[Group], values: Optimisation) -> Optimizer:
    """The protocol's optimiser over groups of `parameter_groups`."""
    if values.optimizer == "adamw":
        return AdamW(groups, lr=values.lr, betas=values.betas, fused=True)
    if values.optimizer == "lars":
        return LARS(groups, lr=values.lr, momentum=values.momentum)
    return SGD(groups, lr=values.lr, momentum=values.momentum)


class LARS(Optimizer):
    """SGD with momentum whose updates are rescaled per tensor to trust * |w| / |update| (trust ratio 0.001).

    Weight decay is added to the gradient before the ratio is taken. 1-D parameters get plain momentum SGD. A tensor or
    gradient of norm 0 is not rescaled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        update = parameter.grad
        if parameter.ndim > 1:
            update = update.add(parameter, alpha=group["weight_decay"])
            weight_norm = torch.linalg.vector_norm(parameter)
            update_norm = torch.linalg.vector_norm(update)
            ratio = group["trust"] * weight_norm / update_norm
            update = update * torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].mul_(group["momentum"]).add_(update)
        parameter.sub_(state["momentum"], alpha=group["lr"])
