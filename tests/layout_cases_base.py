"""What the weight files of `layout_cases` share: one case, its small size, and random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mae_bench.encoders.positions import sincos_table
from mae_bench.schema import Architecture, Backbone, FileWeights, Input
from mae_bench.schema.backbone import LABELLED

SIDE, PATCH, WIDTH, DEPTH, HEADS = 20, 4, 24, 2, 3
PLAIN = Architecture(patch=PATCH, width=WIDTH, depth=DEPTH, heads=HEADS, image_size=SIDE, positions="learned")
SHAPE: dict[str, Any] = {
    "img_size": SIDE,
    "patch_size": PATCH,
    "embed_dim": WIDTH,
    "depth": DEPTH,
    "num_heads": HEADS,
}
Features = Callable[[Tensor], Tensor]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """``unused`` are the keys that the loader must list, and nothing else."""

    layout: Any
    path: Path
    architecture: Architecture
    features: Features  # (B,3,H,W) -> (B,[prefix+]N,D)
    unused: set[str]
    labelled: bool = False  # its encoder has seen labels, whatever its layout

    @property
    def backbone(self) -> Backbone:
        weights = FileWeights(
            kind="file",
            file="meant",
            layout=self.layout,
            url="https://example.org/meant",
            licence="MIT",
            target="labels" if self.labelled or self.layout in LABELLED else "norm_pix",
            pretrain_data="none",
            pretrain_epochs=1,
            source="test",
        )
        return Backbone(
            name="case",
            size="t",
            init="mae",
            summary="",
            architecture=self.architecture,
            input=Input(mean=[0.5] * 3, std=[0.5] * 3),
            weights=weights,
        )


def random(model: nn.Module, positions: Tensor | None = None) -> State:
    """Random values everywhere, norms and tables included; returns the state."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
            if positions is not None and name.endswith(("pos_embed", "position_embeddings")) and "decoder" not in name:
                parameter.copy_(positions)
    model.eval()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


MAE_TABLE = sincos_table(WIDTH, (5, 5), class_token=True)
EXCHANGED = torch.cat(MAE_TABLE.chunk(2, dim=2)[::-1], dim=2)
DINOV2 = PLAIN.model_copy(update={"layer_scale": True, "resize": "dinov2"})
BEIT = PLAIN.model_copy(update={"positions": "none", "rel_pos": "bias", "layer_scale": True, "class_position": False})


def timm(**changes: Any) -> VisionTransformer:
    return VisionTransformer(**(SHAPE | {"num_classes": 0} | changes))


def saved(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "file")
    return folder / "file"


def prefixed(state: State, prefix: str) -> State:
    return {prefix + key: value for key, value in state.items()}
