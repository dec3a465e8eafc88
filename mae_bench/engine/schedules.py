"""Learning rates, set before every optimiser step.

`cosine` is FAIR's (arXiv 2111.06377, `util/lr_sched.py`): linear warmup from 0, then half a cosine down to min_lr, over
fractional epochs; the value of a step is that at the step's first micro batch. `poly` is that of mmcv 1.x, with which
the published UperNet numbers were made, and `steps` detectron2's: both run over the whole length, and the warmup
multiplies them. FAIR multiplies the whole value, min_lr included, by a group's layer-decay factor (``min_lr_scaled``);
mmpretrain keeps min_lr absolute.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

from mae_bench.engine.plan import Plan
from mae_bench.schema import Optimisation

if TYPE_CHECKING:
    from torch.optim import Optimizer


def lr_at(step: int, values: Optimisation, plan: Plan, scale: float = 1.0) -> float:
    """Learning rate of the optimiser step ``step`` (0-based) for a group with layer-decay factor ``scale``."""
    peak = values.lr * scale
    floor = values.min_lr * (scale if values.min_lr_scaled else 1.0)
    warmup = 1.0
    if step < plan.warmup_steps:
        warmup = values.warmup_factor + (1 - values.warmup_factor) * step / plan.warmup_steps
    return warmup * (floor + (peak - floor) * _remaining(step, values, plan))


def _remaining(step: int, values: Optimisation, plan: Plan) -> float:
    """Share of the way from min_lr to the peak that is left at ``step``: 1 at first."""
    if values.schedule == "cosine":
        progress = max(0, step - plan.warmup_steps) / (plan.steps - plan.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))
    if values.schedule == "poly":
        return float((1 - step / plan.steps) ** values.poly_power)
    if values.schedule == "steps":
        milestones = [round(fraction * plan.steps) for fraction in sorted(values.milestones)]
        return float(0.1 ** bisect.bisect_right(milestones, step))
    return 1.0


def apply_lr(optimizer: Optimizer, step: int, values: Optimisation, plan: Plan) -> None:
    """Set every group's ``lr`` for ``step``; groups carry ``lr_scale`` (`optim.parameter_groups`)."""
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, values, plan, group["lr_scale"])
