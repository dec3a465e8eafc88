"""Values that every training protocol shares: length, batch, optimiser, schedule, precision."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from mae_bench.schema.base import Sparse


class Optimisation(Sparse):
    """How a protocol trains. Lengths are in epochs or in optimiser steps, never both."""

    FEATURES: ClassVar[frozenset[str]] = frozenset(["on_nonfinite"])

    # Length. One of the two is positive.
    epochs: float = Field(0.0, ge=0)
    steps: int = Field(0, ge=0)
    eval_every_epochs: float = Field(0.0, ge=0)  # 0 (both) = evaluate once, at the end
    eval_every_steps: int = Field(0, ge=0)
    # Images per optimiser step over all devices and accumulation: part of the protocol, kept on any hardware.
    batch: int = Field(gt=0)
    # lr = base_lr * batch / lr_per, or base_lr itself where lr_per = 0 (MAE divides by 256, DeiT by 512).
    base_lr: float = Field(gt=0)
    lr_per: int = Field(0, ge=0)
    optimizer: Literal["adamw", "lars", "sgd"] = "adamw"
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False)
    momentum: float = Field(0.9, ge=0, lt=1)  # lars and sgd
    weight_decay: float = Field(ge=0)
    # Kinds of parameter exempt from weight decay: `norm` and `bias` by module and name, `map_norm` = detectron2's own
    # LayerNorm of maps, `positions` = pos_embed, `tokens` = class, register and mask tokens, `rel_pos` = relative
    # position tables, `layer_scale` = gamma.
    no_decay: tuple[Literal["norm", "map_norm", "bias", "positions", "tokens", "rel_pos", "layer_scale"], ...] = Field(
        ("norm", "bias"), strict=False
    )
    layer_decay: float = Field(1.0, gt=0, le=1)  # lr factor per block, from the head down; 1 = none
    # Schedule, set before every optimiser step.
    schedule: Literal["cosine", "poly", "steps", "constant"] = "cosine"
    warmup_epochs: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    warmup_factor: float = Field(0.0, ge=0, le=1)  # lr at step 0 as a fraction of the peak; rises linearly
    min_lr: float = Field(0.0, ge=0)
    min_lr_scaled: bool = True  # min_lr is multiplied by each group's layer-decay factor (FAIR), or is absolute
    poly_power: float = Field(1.0, gt=0)
    milestones: tuple[float, ...] = Field((), strict=False)  # fractions of the length at which lr is multiplied by 0.1
    drop_path: float = Field(0.0, ge=0, lt=1)  # rate at the last block, growing linearly from 0
    ema: float = Field(0.0, ge=0, lt=1)  # decay of the weight average that is evaluated; 0 = none
    clip_grad: float = Field(0.0, ge=0)  # largest global gradient norm; 0 = no clipping
    precision: Literal["fp16", "bf16", "fp32"] = "fp32"  # autocast type on a GPU; a CPU runs fp32 and says so
    # At a loss that is not finite: end the run, or go back to the last checkpoint and leave out the step that made it.
    on_nonfinite: Literal["stop", "rewind"] = "stop"

    @model_validator(mode="after")
    def _one_unit(self) -> Optimisation:
        for epochs, steps, what, needed in (
            (self.epochs, self.steps, "epochs or steps", True),
            (self.warmup_epochs, self.warmup_steps, "warmup_epochs or warmup_steps", False),
            (self.eval_every_epochs, self.eval_every_steps, "eval_every_epochs or eval_every_steps", False),
        ):
            if (epochs and steps) or (needed and not (epochs or steps)):
                raise ValueError(f"give {what}: {'exactly' if needed else 'at most'} one of the two")
        return self

    @property
    def lr(self) -> float:
        """Peak learning rate of the group with factor 1."""
        return self.base_lr * self.batch / self.lr_per if self.lr_per else self.base_lr
