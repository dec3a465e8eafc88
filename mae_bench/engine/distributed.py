"""Processes and devices: one process per device, started by torchrun; gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from mae_bench.engine.job import Options
from mae_bench.errors import UserError

TIMEOUT = timedelta(minutes=60)  # processes wait for the first one, e.g. while it scores detections


def device(options: Options) -> torch.device:
    """The device of this process: ``auto`` takes a GPU where there is one."""
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def init(options: Options) -> None:
    """Join the other processes that torchrun started; nothing to do in a single process or when already joined."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    where = device(options)
    if where.type == "cuda":
        if where.index >= torch.cuda.device_count():
            raise UserError(f"process {where.index} has no GPU of its own; start one process per GPU, or --device cpu")
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo", timeout=TIMEOUT)


def shutdown() -> None:
    """Leave the group of processes, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def say(options: Options, line: str) -> None:
    """Print a line, once for all processes, unless the run is quiet."""
    if main_process() and not options.quiet:
        print(line, flush=True)


def main_process() -> bool:
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def _group_device() -> torch.device:
    """Where tensors must be for the group's collectives."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def sum_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Sum of ``values`` over all processes, on the CPU. Exact for integer types."""
    if world_size() == 1:
        return values.cpu()
    total = values.to(_group_device(), copy=True)
    dist.all_reduce(total)
    return total.cpu()


def largest(values: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum of ``values`` over all processes, on the group's device."""
    if world_size() == 1:
        return values
    shared = values.to(_group_device(), copy=True)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared


def gather_objects(value: Any) -> list[Any]:
    """Every process's ``value``, in the order of ranks, on every process. For small picklable things of our own."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def check_same(what: str, value: str, mend: str) -> None:
    """Every process calls it with its own ``value``, of which the first process's stands for all in the record.

    Raises:
        UserError: in every process, where one has another value.
    """
    first, *others = gather_objects((value, socket.gethostname()))
    for number, other in enumerate(others, 1):
        if other[0] != first[0]:
            raise UserError(
                f"process {number} on {other[1]} has another {what} ({other[0]:.8}) than process 0 on {first[1]} "
                f"({first[0]:.8}); {mend}"
            )


def broadcast_buffers(module: nn.Module) -> None:
    """Give every process the first one's buffers (running averages), as DistributedDataParallel does in FAIR's code."""
    if world_size() == 1:
        return
    for buffer in module.buffers():
        shared = buffer.detach().to(_group_device(), copy=True)
        dist.broadcast(shared, 0)
        buffer.copy_(shared)
