"""``--compile``: the blocks of a model by torch.compile, in training alone.

Every block is compiled by itself: parameters keep their names, blocks that are alike share one compilation, and what
surrounds them (masking, heads, the parts of detectron2 and mmsegmentation, FSDP's communication) computes as always. So
do the first and last block of a pre-training decoder where less than the whole of them is computed. Random numbers are
drawn as without it. Evaluations compute plainly, so that a run's metrics are those that an evaluation of its file
gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.exc import TorchDynamoException

from mae_bench.errors import UserError

VARIANTS = 64  # of a block: one for each rate of drop_path; beyond them torch would silently compute plainly


@contextmanager
def compiled(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Within, the children of every module called ``blocks`` or ``…_blocks`` are compiled when first called; nothing
    happens unless ``wanted``.

    Raises:
        UserError: there is no compiler on this machine, or it fails.
    """
    blocks = _blocks(model) if wanted else []
    for block in blocks:
        vars(block)["forward"] = torch.compile(block.forward, options={"fallback_random": True})
    try:
        with config.patch(recompile_limit=VARIANTS):
            yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())
        raise UserError(
            "--compile needs a C++ compiler (g++, or what $CXX names) and Python's headers on a CPU, triton and gcc on "
            f"a GPU; install them, or leave out --compile. torch says: {type(error).__name__}: {reason:.200}"
        ) from error
    finally:
        for block in blocks:
            del vars(block)["forward"]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """
    Raises:
        ValueError: there are none.
    """
    stacks = [module for name, module in model.named_modules() if name.rpartition(".")[2].endswith("blocks")]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no blocks to compile")
    return [block for stack in stacks for block in stack.children()]


def plainly() -> AbstractContextManager[object]:
    """Within, what is compiled computes as if it were not."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
