"""Small weight files in the layouts that the loader knows, for its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from mae_bench.checkpoints.load import save_encoder
from mae_bench.encoders.positions import sincos_table
from mae_bench.encoders.vit import Encoder
from mae_bench.schema import Architecture, Backbone, FileWeights, Input, MadeWeights, NoWeights

ARCHITECTURE = Architecture(patch=4, width=24, depth=2, heads=3, image_size=20)
INPUT = Input(mean=[0.5] * 3, std=[0.25] * 3)


def backbone(kind: Literal["fair_mae", "vit_classifier", "made", "none"] = "fair_mae", **changes: Any) -> Backbone:
    """A small recipe. ``changes`` go to its weights."""
    if kind == "none":
        weights: Any = NoWeights(kind="none")
    elif kind == "made":
        weights = MadeWeights(kind="made", task="tiny_pretrain")
    else:
        stated: dict[str, Any] = {
            "kind": "file",
            "file": "meant.pth",
            "layout": kind,
            "url": "https://example.org/meant.pth",
            "licence": "CC-BY-NC-4.0",
            "target": "labels" if kind == "vit_classifier" else "norm_pix",
            "pretrain_data": "IN1K",
            "pretrain_epochs": 1600,
            "source": "test",
        }
        weights = FileWeights(**(stated | changes))
    positions: Any = "learned" if kind == "vit_classifier" else "sincos"
    architecture = ARCHITECTURE.model_copy(update={"positions": positions})
    return Backbone(
        name=f"small_{kind}", size="t", init="mae", summary="", architecture=architecture, input=INPUT, weights=weights
    )


def timm_state(*, fixed_positions: bool = True, classes: int = 0) -> dict[str, Tensor]:
    """Random weights of timm's own ViT, with MAE's fixed table."""
    generator = torch.Generator().manual_seed(3)
    model = timm_model(classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        if fixed_positions:
            model.pos_embed.copy_(sincos_table(24, (5, 5), class_token=True))
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def timm_model(classes: int = 0) -> VisionTransformer:
    return VisionTransformer(img_size=20, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=classes).eval()


def decoder() -> dict[str, Tensor]:
    """Names of FAIR's decoder (one block, width 8)."""
    shapes: dict[str, tuple[int, ...]] = {
        "mask_token": (1, 1, 8),
        "decoder_pos_embed": (1, 26, 8),
        "decoder_embed.weight": (8, 24),
        "decoder_embed.bias": (8,),
        "decoder_blocks.0.attn.qkv.weight": (24, 8),
        "decoder_norm.weight": (8,),
        "decoder_pred.weight": (48, 8),
    }
    return {key: torch.ones(shape) for key, shape in shapes.items()}


def save_pth(path: Path, tensors: dict[str, Tensor], **beside: Any) -> Path:
    torch.save({"model": tensors, **beside}, path)
    return path


def own(folder: Path) -> tuple[Path, Backbone, str, set[str]]:
    encoder = Encoder(ARCHITECTURE)
    encoder.load_state_dict(timm_state(), strict=True)
    save_encoder(folder / "h.safetensors", encoder, {"task": "tiny_pretrain"})
    return folder / "h.safetensors", backbone("made"), "mae_bench encoder made by 'tiny_pretrain'", set()
