"""With the same weights, our encoder gives what timm's, detectron2's and mmsegmentation's own ViTs give."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from encoders_cases import close, randomised
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mae_bench.encoders import Encoder
from mae_bench.schema import Architecture

ARCHITECTURE = Architecture(patch=4, width=48, depth=3, heads=4, image_size=32)


def test_tokens_and_maps_equal_timm() -> None:
    theirs = randomised(
        VisionTransformer(
            img_size=32,
            patch_size=4,
            embed_dim=48,
            depth=3,
            num_heads=4,
            num_classes=0,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
        )
    )
    ours = Encoder(ARCHITECTURE).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32)
    close(ours.tokens(images), theirs.forward_features(images))
    maps = theirs.forward_intermediates(images, indices=[0, 2], norm=False, intermediates_only=True)
    for one, other in zip(ours.maps(images, [0, 2]), maps, strict=True):
        close(one, other)


@pytest.mark.parametrize(
    ("image", "window", "global_blocks"),
    [
        ((32, 32), 0, ()),  # the pre-training grid, every block global
        ((40, 40), 4, (1,)),  # 10 x 10 tokens in windows of 4, which pads to 12
        ((40, 56), 3, (0, 2)),  # not square: tables and positions are resized on the fly
        ((24, 40), 4, (1,)),  # smaller than the tables on one side
    ],
)
def test_maps_and_gradients_equal_detectron2(
    image: tuple[int, int], window: int, global_blocks: tuple[int, ...]
) -> None:
    from detectron2.modeling.backbone.vit import ViT

    theirs = randomised(
        ViT(
            img_size=40,
            patch_size=4,
            embed_dim=48,
            depth=3,
            num_heads=4,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            window_size=window,
            window_block_indexes=[block for block in range(3) if block not in global_blocks and window],
            use_rel_pos=True,
            pretrain_img_size=32,
            out_feature="last_feat",
        )
    )
    ours = Encoder(
        ARCHITECTURE,
        class_token=False,
        final_norm=False,
        window=window,
        global_blocks=global_blocks,
        rel_pos="decomposed",
        rel_pos_grid=(10, 10),
    ).eval()
    state = dict(theirs.state_dict())
    state["pos_embed"] = state["pos_embed"][:, 1:]
    ours.load_state_dict(state, strict=True)
    images = torch.randn(2, 3, *image)
    (one,), other = ours.maps(images, [2]), theirs(images)["last_feat"]
    close(one, other)

    weight = torch.randn_like(one) / one.numel() ** 0.5
    (one * weight).sum().backward()
    (other * weight).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected["pos_embed"] = expected["pos_embed"][:, 1:]
    for name, parameter in ours.named_parameters():
        close(parameter.grad, expected[name])


def _from_mmseg(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """mmsegmentation's names of its MAE backbone -> ours."""
    renames = {
        "projection": "proj",
        "layers": "blocks",
        "ln1": "norm1",
        "ln2": "norm2",
        "ffn.blocks.0.0": "mlp.fc1",
        "ffn.blocks.1": "mlp.fc2",
        "gamma_1": "ls1.gamma",
        "gamma_2": "ls2.gamma",
    }
    renamed = {}
    for key, value in state.items():
        for old, new in renames.items():
            key = key.replace(old, new)
        if not key.endswith("relative_position_index"):  # derived from the grid
            renamed[key] = value
    return renamed


@pytest.mark.parametrize("image", [(32, 32), (24, 40)])
def test_maps_and_gradients_equal_mmsegmentation(image: tuple[int, int]) -> None:
    from mmseg.models.backbones import MAE

    theirs: Any = MAE(
        img_size=image,
        patch_size=4,
        embed_dims=48,
        num_layers=3,
        num_heads=4,
        out_indices=[0, 1, 2],
        norm_cfg={"type": "LN", "eps": 1e-6},
        init_values=1.0,
    )
    randomised(theirs)
    ours = Encoder(
        ARCHITECTURE, grid=(image[0] // 4, image[1] // 4), final_norm=False, rel_pos="bias", layer_scale=1.0
    ).eval()
    ours.load_state_dict(_from_mmseg(theirs.state_dict()), strict=True)
    images = torch.randn(2, 3, *image)
    maps, expected = ours.maps(images, [0, 1, 2]), theirs(images)
    for one, other in zip(maps, expected, strict=True):
        close(one, other)

    weight = torch.randn_like(maps[2]) / maps[2].numel() ** 0.5
    (maps[2] * weight).sum().backward()
    (expected[2] * weight).sum().backward()
    gradients = _from_mmseg({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradients[name])
