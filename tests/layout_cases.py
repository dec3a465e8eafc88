"""Weight files of every layout, written from the original implementation with random weights.

Each case gives a file, a backbone recipe that means it, and the original's own features for normalised images. Where
the original's repository is no package (FAIR MAE, MoCo v3, DINO, DINOv2, BEiT), timm's model of the same function
stands in, and the file has the names and wrappers of the original's key tables. Those of other libraries are in
`layout_cases_libraries`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layout_cases_libraries
import numpy as np
import torch
from checkpoint_files import decoder
from layout_cases_base import (
    BEIT,
    DEPTH,
    DINOV2,
    EXCHANGED,
    HEADS,
    MAE_TABLE,
    PATCH,
    PLAIN,
    SHAPE,
    SIDE,
    WIDTH,
    Case,
    State,
    prefixed,
    random,
    saved,
    timm,
)
from layout_cases_libraries import VITDET_OPTIONS
from safetensors.torch import save_file
from timm.layers import SwiGLUPacked
from timm.models.beit import Beit
from torch import nn

__all__ = ["CASES", "PLAIN", "SIDE", "VITDET_OPTIONS", "Case", "saved", "timm"]


def fair_mae(folder: Path) -> Case:
    model = timm()
    state = random(model, MAE_TABLE)
    args = argparse.Namespace(model="mae_vit_base_patch16", output_dir=None)
    path = saved(folder, {"model": state | decoder(), "epoch": 3, "scaler": {}, "args": args})
    return Case("fair_mae", path, PLAIN, model.forward_features, set(decoder()))


def timm_mae(folder: Path) -> Case:
    model = timm()
    save_file(random(model, MAE_TABLE), folder / "file")
    return Case("fair_mae", folder / "file", PLAIN, model.forward_features, set())


def fair_finetuned(folder: Path) -> Case:
    model = timm(num_classes=10, global_pool="avg")
    path = saved(folder, {"model": random(model, MAE_TABLE)})
    return Case(
        "fair_mae_finetuned",
        path,
        PLAIN.model_copy(update={"final_norm": "pooled"}),
        model.forward_features,
        {"head.weight", "head.bias"},
    )


def timm_dino(folder: Path) -> Case:
    """DINO's `_pretrain.pth` files have the same names."""
    model = timm()
    return Case("vit", saved(folder, random(model)), PLAIN, model.forward_features, set())


def deit(folder: Path) -> Case:
    model = timm(num_classes=10)
    path = saved(folder, {"model": random(model)})
    return Case("vit_classifier", path, PLAIN, model.forward_features, {"head.weight", "head.bias"})


DEIT3 = PLAIN.model_copy(update={"layer_scale": True, "class_position": False})


def deit3(folder: Path) -> Case:
    """The published files say gamma_1 where timm says ls1.gamma."""
    model = timm(num_classes=10, no_embed_class=True, init_values=1.0)
    state = {
        key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value
        for key, value in random(model).items()
    }
    path = saved(folder, {"model": state})
    return Case("deit3", path, DEIT3, model.forward_features, {"head.weight", "head.bias"})


def timm_deit3(folder: Path) -> Case:
    model = timm(num_classes=10, no_embed_class=True, init_values=1.0)
    save_file(random(model), folder / "file")
    return Case("deit3", folder / "file", DEIT3, model.forward_features, {"head.weight", "head.bias"})


def moco_v3(folder: Path) -> Case:
    model = timm()
    state = random(model, EXCHANGED)
    others = {
        "module.base_encoder.head.0.weight": torch.ones(3, WIDTH),
        "module.momentum_encoder.cls_token": torch.ones(1, 1, WIDTH),
        "module.momentum_encoder.patch_embed.proj.weight": torch.ones(WIDTH, 3, PATCH, PATCH),
        "module.predictor.0.weight": torch.ones(3, 3),
    }
    content = {"epoch": 300, "arch": "vit_base", "state_dict": prefixed(state, "module.base_encoder.") | others}
    return Case("moco_v3", saved(folder, content), PLAIN, model.forward_features, set(others))


def dino(folder: Path) -> Case:
    model = timm()
    state = random(model)
    head = {"head.mlp.0.weight": torch.ones(2, WIDTH), "head.last_layer.weight_g": torch.ones(2, 1)}
    student = prefixed(prefixed({key: value + 1 for key, value in state.items()}, "backbone.") | head, "module.")
    teacher = prefixed(state, "backbone.") | head
    content = {"student": student, "teacher": teacher, "epoch": 100, "args": argparse.Namespace(arch="vit_small")}
    return Case("dino", saved(folder, content), PLAIN, model.forward_features, set(head))


def dinov2_names(state: State) -> State:
    """timm's names and SwiGLU as facebookresearch/dinov2 has them."""
    renamed = {}
    for key, value in state.items():
        key = key.replace("reg_token", "register_tokens")
        if "fc1" in key and value.shape[0] != 4 * WIDTH:
            key = key.replace("fc1", "w12")
        elif "fc2" in key and value.shape[-1] != 4 * WIDTH and any(".w12." in other for other in renamed):
            key = key.replace("fc2", "w3")
        renamed[key] = value
    return renamed | {"mask_token": torch.ones(1, WIDTH)}


def dinov2(folder: Path) -> Case:
    model = timm(init_values=1.0)
    return Case("dinov2", saved(folder, dinov2_names(random(model))), DINOV2, model.forward_features, {"mask_token"})


def dinov2_registers(folder: Path) -> Case:
    """timm's model has no position for the class token: the file's row is added to the token in it."""
    model = timm(init_values=1.0, reg_tokens=4, no_embed_class=True)
    state = random(model)
    row = torch.full((1, 1, WIDTH), 0.3)
    state |= {
        "cls_token": state["cls_token"] - row,
        "pos_embed": torch.cat([row, state["pos_embed"]], dim=1),
    }
    architecture = DINOV2.model_copy(update={"registers": 4, "resize": "dinov2_registers"})
    return Case("dinov2", saved(folder, dinov2_names(state)), architecture, model.forward_features, {"mask_token"})


def dinov2_chunked_swiglu(folder: Path) -> Case:
    """A training checkpoint of the giant model's kind: teacher, blocks in chunks, SwiGLU."""
    model = timm(init_values=1.0, mlp_layer=SwiGLUPacked, mlp_ratio=2 * 8 / 3, act_layer=nn.SiLU)
    state = dinov2_names(random(model))
    chunked = {key.replace("blocks.0.", "blocks.0.0.").replace("blocks.1.", "blocks.1.1."): state[key] for key in state}
    heads = {"dino_head.mlp.0.weight": torch.ones(2, 2), "ibot_head.last_layer.weight_v": torch.ones(2, 2)}
    content = {"teacher": prefixed(chunked, "backbone.") | heads}
    architecture = DINOV2.model_copy(update={"mlp": "swiglu", "mlp_ratio": 8 / 3})
    return Case("dinov2", saved(folder, content), architecture, model.forward_features, {"backbone.mask_token", *heads})


def timm_dinov2_registers(folder: Path) -> Case:
    model = timm(init_values=1.0, reg_tokens=4, no_embed_class=True)
    save_file(random(model), folder / "file")
    architecture = DINOV2.model_copy(update={"registers": 4, "class_position": False})
    return Case("dinov2", folder / "file", architecture, model.forward_features, set())


def beit_names(state: State) -> State:
    return {key: value for key, value in state.items() if not key.endswith(("k_bias", "relative_position_index"))}


def beit(folder: Path, version: int = 1) -> Case:
    """Pre-trained: one table for all blocks, a norm on the tokens, heads of pre-training."""
    model = Beit(
        **SHAPE,
        num_classes=0,
        init_values=0.1,
        use_abs_pos_emb=False,
        use_shared_rel_pos_bias=True,
        global_pool="token",
    )
    state = beit_names(random(model))
    index = model.rel_pos_bias.relative_position_index  # type: ignore[union-attr]
    others: State = {
        "mask_token": torch.ones(1, 1, WIDTH),
        "lm_head.weight": torch.ones(5, WIDTH),
        "rel_pos_bias.relative_position_index": index,
    }
    if version == 2:
        others["cls_pt_layers.0.norm1.weight"] = torch.ones(WIDTH)
    path = saved(folder, {"module" if version == 2 else "model": state | others})
    return Case("beit", path, BEIT, model.forward_features, set(others))


def beit_v2(folder: Path) -> Case:
    return beit(folder, version=2)


def beit_finetuned(folder: Path) -> Case:
    """As timm has them, too: a table per block, a norm on the pooled vector."""
    model = Beit(**SHAPE, num_classes=10, init_values=0.1, use_abs_pos_emb=False, use_rel_pos_bias=True)
    save_file(beit_names(random(model)), folder / "file")
    architecture = BEIT.model_copy(update={"final_norm": "pooled"})
    return Case("beit_finetuned", folder / "file", architecture, model.forward_features, {"head.weight", "head.bias"})


def augreg(folder: Path) -> Case:
    model = timm(num_classes=10)
    state = random(model)
    arrays: dict[str, Any] = {
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "embedding/kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    for number in range(DEPTH):
        ours, theirs = f"blocks.{number}.", f"Transformer/encoderblock_{number}/"
        for norm, flax in (("norm1", "LayerNorm_0"), ("norm2", "LayerNorm_2")):
            arrays[f"{theirs}{flax}/scale"] = state[f"{ours}{norm}.weight"]
            arrays[f"{theirs}{flax}/bias"] = state[f"{ours}{norm}.bias"]
        for layer, flax in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
            arrays[f"{theirs}MlpBlock_3/{flax}/kernel"] = state[f"{ours}mlp.{layer}.weight"].T
            arrays[f"{theirs}MlpBlock_3/{flax}/bias"] = state[f"{ours}mlp.{layer}.bias"]
        attention = theirs + "MultiHeadDotProductAttention_1/"
        for part, weight, bias in zip(
            ("query", "key", "value"),
            state[f"{ours}attn.qkv.weight"].chunk(3),
            state[f"{ours}attn.qkv.bias"].chunk(3),
            strict=True,
        ):
            arrays[f"{attention}{part}/kernel"] = weight.T.reshape(WIDTH, HEADS, -1)
            arrays[f"{attention}{part}/bias"] = bias.reshape(HEADS, -1)
        arrays[f"{attention}out/kernel"] = state[f"{ours}attn.proj.weight"].T.reshape(HEADS, -1, WIDTH)
        arrays[f"{attention}out/bias"] = state[f"{ours}attn.proj.bias"]
    np.savez(folder / "file.npz", **{key: value.numpy() for key, value in arrays.items()})
    return Case("augreg", folder / "file.npz", PLAIN, model.forward_features, {"head/kernel", "head/bias"})


CASES: dict[str, Callable[[Path], Case]] = {
    function.__name__: function
    for function in (
        fair_mae,
        timm_mae,
        fair_finetuned,
        timm_dino,
        deit,
        deit3,
        timm_deit3,
        moco_v3,
        dino,
        dinov2,
        dinov2_registers,
        dinov2_chunked_swiglu,
        timm_dinov2_registers,
        beit,
        beit_v2,
        beit_finetuned,
        augreg,
        *layout_cases_libraries.CASES,
    )
}
