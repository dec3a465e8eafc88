"""With the same weights, variants of the ViT give what timm's and transformers' own implementations give.

Features are compared on the pre-training grid and on another, not square one. There the originals resize their tables
in their own ways; the architecture's `resize` names the matching one, and BEiT's tables are random for every grid.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from encoders_cases import Interp2d, close, randomised
from timm.layers import SwiGLUPacked
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import (
    BeitConfig,
    BeitModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
)

from mae_bench.encoders import Encoder
from mae_bench.encoders.attention import bias_index
from mae_bench.encoders.positions import resize_bias_table
from mae_bench.encoders.vit import random_encoder
from mae_bench.errors import UserError
from mae_bench.schema import Architecture

SIZES: dict[str, Any] = {"patch": 4, "width": 48, "depth": 3, "heads": 4, "image_size": 24}
IMAGES = [(24, 24), (24, 40), (36, 16)]  # 6 x 6 patches as in pre-training, 6 x 10, 9 x 4
LAYER_NORM = partial(nn.LayerNorm, eps=1e-6)


def architecture(**features: Any) -> Architecture:
    return Architecture.model_validate(SIZES | {"positions": "learned"} | features)


def same_features(ours: Encoder, theirs: Any, size: tuple[int, int]) -> None:
    """``theirs``: images -> all tokens after the final norm."""
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(images)
        assert expected.std() > 0.1, "zeros would show nothing"
        close(ours.eval()(images), expected)


def timm_vit(**options: Any) -> Any:
    sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 0}
    return randomised(VisionTransformer(**sizes, norm_layer=LAYER_NORM, dynamic_img_size=True, **options))


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize(
    ("features", "options"),
    [
        ({}, {}),
        ({"layer_scale": True}, {"init_values": 1e-5}),  # DINOv2
        (  # DINOv2 with registers: timm adds the class token's position to the class token itself
            {"layer_scale": True, "registers": 4, "class_position": False},
            {"init_values": 1e-5, "reg_tokens": 4, "no_embed_class": True},
        ),
        ({"layer_scale": True, "class_position": False}, {"init_values": 1e-6, "no_embed_class": True}),  # DeiT III
        (  # DINOv2 giant: gate and value in one matrix
            {"layer_scale": True, "mlp": "swiglu", "mlp_ratio": 8 / 3},
            {"init_values": 1e-5, "mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 2 * 8 / 3 + 1e-9},
        ),
        (
            {"class_token": False, "class_position": False},
            {"class_token": False, "global_pool": "avg", "fc_norm": False},
        ),
    ],
    ids=["plain", "dinov2", "registers", "deit3", "swiglu", "no_class_token"],
)
def test_features_equal_timms_vit(features: dict[str, Any], options: dict[str, Any], size: tuple[int, int]) -> None:
    theirs = timm_vit(**options)
    ours = Encoder(architecture(resize="timm", **features))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    same_features(ours, theirs.forward_features, size)


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_the_pooled_vector_equals_timms(pool: Any, size: tuple[int, int]) -> None:
    """Fine-tuned files: no norm of the tokens, one of the pooled vector; registers are not averaged."""
    kind = {"mean": "avg", "cls": "token"}[pool]
    theirs = timm_vit(reg_tokens=2, no_embed_class=True, global_pool=kind, fc_norm=True)
    ours = Encoder(architecture(resize="timm", registers=2, class_position=False, final_norm="pooled"))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    same_features(ours, theirs.forward_features, size)
    images = torch.randn(2, 3, *size)
    close(ours.eval().pooled(ours(images), pool), theirs.forward_head(theirs.forward_features(images), pre_logits=True))


def beit_state(state: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """timm's names of BEiT -> ours. A shared table goes to every block."""
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        if key == "rel_pos_bias.relative_position_bias_table":
            renamed |= {f"blocks.{block}.attn.relative_position_bias_table": value for block in range(depth)}
        elif key.endswith("q_bias"):
            parts = [value, torch.zeros_like(value), state[key.replace("q_bias", "v_bias")]]
            renamed[key.replace("q_bias", "qkv.bias")] = torch.cat(parts)
        elif not key.endswith("v_bias"):
            renamed[re.sub(r"gamma_(\d)", r"ls\1.gamma", key)] = value
    return renamed


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("table", ["use_rel_pos_bias", "use_shared_rel_pos_bias"])
@pytest.mark.parametrize("final_norm", ["tokens", "pooled"])
def test_features_equal_timms_beit(table: str, final_norm: Any, size: tuple[int, int]) -> None:
    theirs = Beit(
        img_size=size,
        patch_size=4,
        embed_dim=48,
        depth=3,
        num_heads=4,
        num_classes=0,
        init_values=0.1,
        use_abs_pos_emb=False,
        norm_layer=LAYER_NORM,
        use_fc_norm=final_norm == "pooled",
        **{table: True},
    )
    randomised(theirs)
    features: dict[str, Any] = {"positions": "none", "layer_scale": True, "rel_pos": "bias", "final_norm": final_norm}
    ours = Encoder(architecture(**features), grid=(size[0] // 4, size[1] // 4)).eval()
    ours.load_state_dict(beit_state(theirs.state_dict(), 3), strict=True)
    assert not hasattr(ours, "pos_embed")
    same_features(ours, theirs.forward_features, size)
    images = torch.randn(2, 3, *size)
    if final_norm == "pooled":
        close(ours.pooled(ours(images), "mean"), theirs(images))

    # Both names of a tied table get the whole gradient.
    weight = torch.randn(48, generator=torch.Generator().manual_seed(2))
    (theirs.forward_features(images) @ weight).sum().backward()
    (ours(images) @ weight).sum().backward()
    tables = [block.attn.relative_position_bias_table.grad for block in ours.blocks]
    if table == "use_shared_rel_pos_bias":
        relative_close(sum(tables), theirs.rel_pos_bias.relative_position_bias_table.grad)
    else:
        for ours_grad, block in zip(tables, theirs.blocks, strict=True):
            relative_close(ours_grad, block.attn.relative_position_bias_table.grad)


def relative_close(ours: Any, theirs: Tensor) -> None:
    assert theirs.abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("size", [(36, 36), (24, 40), (16, 16)])
def test_beit_on_another_grid_equals_timms(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's own way of taking a BEiT from 6 x 6 patches to another input size, with BEiT's cubic spline."""
    monkeypatch.setattr("timm.layers.pos_embed_rel._USE_SCIPY", True)
    monkeypatch.setattr("scipy.interpolate.interp2d", Interp2d, raising=False)
    sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 0}
    options: dict[str, Any] = {"init_values": 0.1, "use_abs_pos_emb": False, "use_rel_pos_bias": True}
    theirs = randomised(Beit(**sizes, **options, use_fc_norm=False, norm_layer=LAYER_NORM))
    state, grid = beit_state(theirs.state_dict(), 3), (size[0] // 4, size[1] // 4)
    for key in (key for key in state if key.endswith("bias_table")):
        state[key] = resize_bias_table(state[key], (6, 6), grid)
    ours = Encoder(architecture(positions="none", layer_scale=True, rel_pos="bias"), grid=grid)
    ours.load_state_dict(state, strict=True)
    theirs.set_input_size(size)
    same_features(ours, theirs.forward_features, size)


def hf_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' names (version 5) of Dinov2 and Beit -> ours."""
    renames = {
        r"embeddings\.(cls_token)": r"\1",
        r"embeddings\.register_tokens": "reg_token",
        r"embeddings\.position_embeddings": "pos_embed",
        r"embeddings\.patch_embeddings\.projection": "patch_embed.proj",
        r"(encoder\.)?layers?\.(\d+)\.": r"blocks.\2.",
        r"layernorm_before": "norm1",
        r"layernorm_after": "norm2",
        r"pooler\.layernorm\.": "fc_norm.",
        r"^layernorm\.": "norm.",
        r"\.relative_position_bias\.": ".attn.",
        r"attention\.([qkv])_proj\.": r"attn.\1.",
        r"attention\.o_proj\.": "attn.proj.",
        r"layer_scale(\d)\.lambda1|lambda_(\d)": r"ls\1\2.gamma",
        r"mlp\.gate_proj\.": "mlp.gate.",
        r"mlp\.up_proj\.": "mlp.up.",
        r"mlp\.down_proj\.": "mlp.fc2.",
    }
    named = {}
    for key, value in state.items():
        for old, new in renames.items():
            key = re.sub(old, new, key)
        if key.startswith("shared_position_bias."):
            named |= {f"blocks.{block}.attn.relative_position_bias_table": value for block in range(3)}
        elif key != "embeddings.mask_token":
            named[key] = value
    for whole, parts in (("attn.qkv", ("attn.q", "attn.k", "attn.v")), ("mlp.fc1", ("mlp.gate", "mlp.up"))):
        for key in [key for key in named if f".{parts[0]}." in key]:
            values = [named.pop(key.replace(parts[0], part), None) for part in parts]
            zeros = torch.zeros_like(values[0])  # BEiT's key has no bias
            joined = torch.cat([zeros if value is None else value for value in values])
            named[key.replace(parts[0], whole)] = joined
    return named


HF: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
    "layer_norm_eps": 1e-6,
    "attn_implementation": "eager",
}


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize(
    ("config", "model", "features"),
    [
        (Dinov2Config(**HF), Dinov2Model, {}),
        (Dinov2Config(**HF, use_swiglu_ffn=True), Dinov2Model, {"mlp": "swiglu", "mlp_ratio": 128 / 48}),
        (
            Dinov2WithRegistersConfig(**HF, num_register_tokens=4),
            Dinov2WithRegistersModel,
            {"registers": 4, "resize": "dinov2_registers"},
        ),
    ],
    ids=["dinov2", "swiglu", "registers"],
)
def test_features_equal_transformers_dinov2(config: Any, model: Any, features: dict[str, Any], size: Any) -> None:
    """transformers resizes the table of models without registers as MAE does, not as DINOv2's own code."""
    theirs = randomised(model(config))
    ours = Encoder(architecture(layer_scale=True, **features))
    ours.load_state_dict(hf_state(theirs.state_dict()), strict=True)
    same_features(ours, lambda images: theirs(images).last_hidden_state, size)


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("table", ["use_relative_position_bias", "use_shared_relative_position_bias"])
@pytest.mark.parametrize("mean", [False, True])
def test_features_equal_transformers_beit(table: str, mean: bool, size: tuple[int, int]) -> None:
    """transformers resizes a table on its own way, bilinearly, and only that of a square grid: ours is given the same
    values."""
    config = BeitConfig(**HF, intermediate_size=192, use_mean_pooling=mean, **{table: True})
    theirs = randomised(BeitModel(config, add_pooling_layer=mean))
    state, grid = hf_state(theirs.state_dict()), (size[0] // 4, size[1] // 4)
    for key in (key for key in state if key.endswith("bias_table")):
        offsets = state[key][:-3].T.view(1, 4, 11, 11)
        resized = F.interpolate(offsets, size=(2 * grid[0] - 1, 2 * grid[1] - 1), mode="bilinear").view(4, -1).T
        state[key] = torch.cat([resized, state[key][-3:]])
    norm = "pooled" if mean else "tokens"
    features: dict[str, Any] = {"positions": "none", "layer_scale": True, "rel_pos": "bias", "final_norm": norm}
    ours = Encoder(architecture(**features), grid=grid).eval()
    ours.load_state_dict(state, strict=True)
    same_features(ours, lambda images: theirs(images).last_hidden_state, size)
    if mean:
        images = torch.randn(2, 3, *size)
        close(ours.pooled(ours(images), "mean"), theirs(images).pooler_output)


def test_a_key_bias_changes_nothing() -> None:
    """What stands in for BEiT's missing key bias could be any number: the softmax takes a constant out again."""
    encoder = random_encoder(architecture(positions="none", rel_pos="bias"), 0).eval()
    images = torch.randn(1, 3, 24, 24)
    before = encoder(images)
    with torch.no_grad():
        for block in encoder.blocks:
            block.attn.qkv.bias[48:96] += 3
    close(encoder(images), before)


def test_every_feature_changes_the_features() -> None:
    """Nothing of an architecture is silently left out."""
    images = torch.randn(1, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    outputs = []
    for features in (
        {},
        {"resize": "timm"},
        {"resize": "dino"},
        {"class_position": False},
        {"registers": 2},
        {"layer_scale": True},
        {"mlp": "swiglu"},
        {"positions": "none"},
        {"final_norm": "none"},
        {"class_token": False},
    ):
        encoder = randomised(random_encoder(architecture(**features), 0))
        outputs.append(encoder(images)[:, -60:])
    for number, one in enumerate(outputs):
        assert all((one - other).abs().max() > 1e-3 for other in outputs[:number]), number


def test_a_tasks_bias_serves_registers_as_the_class_token() -> None:
    index = bias_index((2, 3), (2, 3), 3, torch.device("cpu"))
    alone = bias_index((2, 3), (2, 3), 1, torch.device("cpu"))
    assert torch.equal(index[2:, 2:], alone)
    assert (index[:3, :3] == 17).all() and (index[:3, 3:] == 15).all() and (index[3:, :3] == 16).all()
    plain = random_encoder(architecture(registers=2), 0).eval()
    biased = random_encoder(architecture(registers=2), 0, rel_pos="bias").eval()
    images = torch.randn(1, 3, 24, 24)
    close(biased(images), plain(images))  # tables start at zero
    for block in biased.blocks:
        nn.init.normal_(block.attn.relative_position_bias_table)
    assert (biased(images) - plain(images)).abs().max() > 1e-3


def test_without_class_token_registers_go_too() -> None:
    encoder = random_encoder(architecture(registers=4), 0, class_token=False)
    assert (encoder.prefix, encoder.position_prefix) == (0, 0)
    assert not {"cls_token", "reg_token"} & encoder.state_dict().keys()
    assert encoder.pos_embed.shape == (1, 36, 48)
    with pytest.raises(UserError, match="no class token to pool"):
        encoder.pooled(encoder(torch.randn(1, 3, 24, 24)), "cls")


def test_initialise_covers_every_feature() -> None:
    features: dict[str, Any] = {"registers": 2, "layer_scale": True, "mlp": "swiglu", "final_norm": "pooled"}
    for one in (
        Encoder(architecture(**features)),
        Encoder(architecture(positions="none", rel_pos="bias", layer_scale=True)),
        Encoder(
            architecture(class_token=False, rel_pos="decomposed", final_norm="none"), rel_pos="decomposed", window=3
        ),
    ):
        for parameter in one.parameters():
            nn.init.constant_(parameter, float("nan"))
        one.initialise(0)
        assert all(parameter.isfinite().all() for parameter in one.parameters())
        assert not one.option_tensors(), "what the architecture has must come from the file"
        gammas = [value for name, value in one.state_dict().items() if name.endswith("gamma")]
        assert all((value == 0.1).all() for value in gammas)


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        ({"rel_pos": "bias"}, {"class_token": False}, "relative position bias is defined with a class token"),
        ({"rel_pos": "bias"}, {"window": 2}, "without windows|without a class token"),
        ({"rel_pos": "bias"}, {"rel_pos": "decomposed"}, r"rel_pos bias\) cannot be joined with .* \(decomposed\)"),
        ({"class_token": False}, {"rel_pos": "bias"}, "set rel_pos = false where the task adds it"),
        ({"class_token": False, "rel_pos": "decomposed"}, {}, "ViTDet encoder .* only detection"),
        (
            {"class_token": False, "rel_pos": "decomposed"},
            {"rel_pos": "bias"},
            r"rel_pos decomposed\) cannot be joined",
        ),
        ({"registers": 2}, {"window": 2}, "without a class token only"),
    ],
)
def test_what_cannot_be_built_is_refused(features: Any, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Encoder(architecture(**features), **options)
    assert "\n" not in str(caught.value)
