"""Weights, gradients and optimiser state spread over the processes: torch's FSDP2, for models like ViT-H.

Each block's parameters are gathered for its own forward and backward pass alone, in the precision that they are stored
in, so that the numbers are DistributedDataParallel's up to rounding. Resume files hold whole tensors: a run may go on
in any number of processes, with or without sharding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from mae_bench.engine import distributed
from mae_bench.errors import UserError
from mae_bench.schema import Optimisation


def check(values: Optimisation, precision: str) -> None:
    """Refuse what sharding does not cover, before anything is built."""
    if distributed.world_size() == 1:
        raise UserError("--fsdp spreads a model over processes, and there is one; start several with torchrun")
    if precision == "fp16":
        raise UserError("--fsdp has no loss scaling, which fp16 needs; add --set precision=bf16 or fp32")
    if values.optimizer == "lars":
        raise UserError("--fsdp: LARS needs the norms of whole tensors; leave out --fsdp")


def shard(model: nn.Module, optimizer: Optimizer, device: torch.device) -> nn.Module:
    """A sharded copy of ``model``, whose parameters ``optimizer`` holds from now on; ``model`` stays whole.

    The units are the blocks of an encoder (the children of every module called "blocks", each of which computes as a
    whole) and, together, all the rest.
    """
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh(device.type, (distributed.world_size(),))
    for name, module in sharded.named_modules():
        if name.rpartition(".")[2] == "blocks":
            for block in module.children():
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    parameters = dict(sharded.named_parameters())
    replaced = {id(parameter): parameters[name] for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [replaced[id(parameter)] for parameter in group["params"]]
    return sharded


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor, any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered, on every process; any other as it is. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(state: Any) -> Any:
    """``state`` (nested dicts and lists) with sharded tensors whole, on the CPU of the main process. Collective."""
    if isinstance(state, DTensor):
        full = state.full_tensor()
        return full.cpu() if distributed.main_process() else None
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, list) else state


def spread(state: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors sharded as their namesakes in ``like`` are. Collective."""
    return {name: _as(value, like[name]) if name in like else value for name, value in state.items()}


def spread_optimizer(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A whole ``state_dict`` of an optimiser, on the devices of the parameters and sharded as they are. Collective.

    Tensors are copies: the file that ``state`` may be mapped from is deleted while the run goes on.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        index: {
            key: _as(value, parameters[index]) if isinstance(value, torch.Tensor) and value.ndim else copy.copy(value)
            for key, value in entry.items()
        }
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _as(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    value = value.to(like.device, copy=True)
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


@torch.no_grad()
def gather(sharded: nn.Module, model: nn.Module) -> None:
    """Weights and buffers of ``sharded`` into the whole ``model`` that it was copied from. Collective."""
    source = sharded.state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(whole_tensor(source[name]))
