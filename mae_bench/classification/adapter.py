"""The encoder with a classification head, as mmengine's model.

Linear probe (He et al., arXiv 2111.06377, A.1; FAIR `main_linprobe.py`): frozen encoder, its final norm included, then
an affine-free BatchNorm and a linear layer. Fine-tuning (FAIR `main_finetune.py`, `models_vit.py`): mean of the patch
tokens, a new norm in place of the final one, and a linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import nn
from torch.nn import functional as F

from mae_bench.encoders.vit import Encoder, refuse_vitdet
from mae_bench.engine.seeds import Stream, generator
from mae_bench.errors import UserError
from mae_bench.schema import Backbone, ClassificationValues, Input

HEAD_NORM_EPS = 1e-6


class Preprocessor(BaseDataPreprocessor):
    """On the device: uint8 (B,3,H,W) to normalised float; in training then random erasing and mixing.

    Erasing fills with N(0, 1) after normalisation (timm's pixel mode). Mixup and CutMix mix whole micro batches, one
    mixing a batch, and smooth the labels: the targets become (B,K) probabilities. Smoothing happens here and nowhere
    else.
    """

    def __init__(self, values: ClassificationValues, classes: int, statistics: Input) -> None:
        super().__init__(non_blocking=True)
        self.register_buffer("mean_3", torch.tensor(statistics.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std_3", torch.tensor(statistics.std).view(3, 1, 1), persistent=False)
        self.erasing = values.erasing
        self.smoothing = values.label_smoothing
        self.classes = classes
        self.mixup: Mixup | None = None
        if values.mixup or values.cutmix:
            self.mixup = Mixup(
                mixup_alpha=values.mixup,
                cutmix_alpha=values.cutmix,
                label_smoothing=values.label_smoothing,
                num_classes=classes,
            )

    def forward(self, data: dict[str, torch.Tensor], training: bool = False) -> dict[str, torch.Tensor]:
        data = self.cast_data(data)
        images, targets = data["inputs"], data["data_samples"]
        images = (images.float() / 255 - self.mean_3) / self.std_3
        if training and self.erasing:
            images = RandomErasing(self.erasing, mode="pixel", device=images.device)(images)
        if training and self.mixup is not None:
            images, targets = self.mixup(images, targets)
        elif training and self.smoothing:
            targets = F.one_hot(targets, self.classes) * (1 - self.smoothing) + self.smoothing / self.classes
        return {"inputs": images, "data_samples": targets}


class Classifier(BaseModel):
    """Images (B,3,H,W), normalised, to logits (B,K).

    ``linear`` freezes the encoder and keeps it in eval mode; nothing in it is random, because mean pooling then takes
    the encoder's own final norm (`check_pooling`). ``finetune`` with mean pooling needs an encoder without final norm.
    """

    def __init__(
        self, encoder: Encoder, values: ClassificationValues, classes: int, statistics: Input, seed: int
    ) -> None:
        super().__init__(Preprocessor(values, classes, statistics))
        normed = not (isinstance(encoder.norm, nn.Identity) and isinstance(encoder.fc_norm, nn.Identity))
        if normed == needs_fc_norm(values):
            raise ValueError("an encoder has its final norm, unless a fine-tuned fc_norm takes its place")
        self.encoder = encoder
        self.pool = values.pool
        self.frozen = values.mode == "linear"
        if self.frozen:
            encoder.requires_grad_(False)
        eps = encoder.architecture.norm_eps
        self.fc_norm = nn.LayerNorm(encoder.width, eps=eps) if needs_fc_norm(values) else nn.Identity()
        self.head_norm = (
            nn.BatchNorm1d(encoder.width, eps=HEAD_NORM_EPS, affine=False) if values.head_norm else nn.Identity()
        )
        self.head = nn.Linear(encoder.width, classes)
        nn.init.trunc_normal_(self.head.weight, std=values.head_init_std, generator=generator(Stream.INIT, seed))
        nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """(B,3,H,W) to what the head sees, (B,D)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            pooled_BD = self.encoder.pooled(self.encoder.tokens(images), self.pool)
        normed_BD: torch.Tensor = self.head_norm(self.fc_norm(pooled_BD))
        return normed_BD

    def forward(self, inputs: torch.Tensor, data_samples: torch.Tensor | None = None, mode: str = "tensor") -> Any:
        """``tensor``: logits; ``loss``: their cross entropy with class indices (B,) or probabilities (B,K)."""
        logits_BK = self.head(self.features(inputs))
        if mode == "loss":
            assert data_samples is not None
            return {"loss": F.cross_entropy(logits_BK.float(), data_samples)}
        return logits_BK


def check_pooling(values: ClassificationValues, backbone: Backbone) -> None:
    """Refuse a backbone without the token or the trained norm that the protocol reads."""
    architecture, name = backbone.architecture, backbone.name
    refuse_vitdet(backbone)
    if values.pool == "cls" and not architecture.class_token:
        raise UserError(f"'{name}' has no class token (class_token = false), but pool is cls; --set pool=mean")
    if needs_fc_norm(values):
        return
    if architecture.final_norm == "none":
        raise UserError(
            f"'{name}' has no final norm (final_norm = none), which mode {values.mode} with pool {values.pool} reads; "
            "fine-tune with pool = mean, which trains a new one"
        )
    if architecture.final_norm == "pooled" and values.pool == "cls":
        raise UserError(
            f"the norm of '{name}' was trained on the mean of the patch tokens (final_norm = pooled), "
            "but pool is cls; --set pool=mean"
        )


def needs_fc_norm(values: ClassificationValues) -> bool:
    """Whether a new norm after the pooling takes the place of the encoder's final norm."""
    return values.mode == "finetune" and values.pool == "mean"
