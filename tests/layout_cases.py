"""Weight files of every layout, written from the original implementation with random weights.

Each case gives a file, a backbone recipe that means it, and the original's own features for normalised images. Where
the original's repository is no package (FAIR MAE, MoCo v3, DINO, DINOv2, BEiT), timm's model of the same function
stands in, and the file has the names and wrappers of the original's key tables.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoint_files import decoder
from safetensors.torch import save_file
from timm.layers import SwiGLUPacked
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mae_bench.encoders.positions import sincos_table
from mae_bench.schema import Architecture, Backbone, FileWeights, Input

SIDE, PATCH, WIDTH, DEPTH, HEADS = 20, 4, 24, 2, 3
PLAIN = Architecture(patch=PATCH, width=WIDTH, depth=DEPTH, heads=HEADS, image_size=SIDE, positions="learned")
SHAPE: dict[str, Any] = {
    "img_size": SIDE,
    "patch_size": PATCH,
    "embed_dim": WIDTH,
    "depth": DEPTH,
    "num_heads": HEADS,
}
HF_SHAPE: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
}
MM_SHAPE: dict[str, Any] = {
    "img_size": (SIDE, SIDE),
    "patch_size": PATCH,
    "embed_dims": WIDTH,
    "num_layers": DEPTH,
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

    @property
    def backbone(self) -> Backbone:
        weights = FileWeights(
            kind="file",
            file="meant",
            layout=self.layout,
            url="https://example.org/meant",
            licence="MIT",
            target="norm_pix",
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


def timm(**changes: Any) -> VisionTransformer:
    return VisionTransformer(**(SHAPE | {"num_classes": 0} | changes))


def saved(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "file")
    return folder / "file"


def prefixed(state: State, prefix: str) -> State:
    return {prefix + key: value for key, value in state.items()}


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


DINOV2 = PLAIN.model_copy(update={"layer_scale": True, "resize": "dinov2"})


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


BEIT = PLAIN.model_copy(update={"positions": "none", "rel_pos": "bias", "layer_scale": True, "class_position": False})


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


def _hf_features(model: nn.Module) -> Features:
    return lambda images: model(pixel_values=images).last_hidden_state  # type: ignore[no-any-return]


def _hub(folder: Path, model: Any) -> Path:
    """What `save_pretrained` writes has the names of the hub."""
    model.save_pretrained(folder)
    return folder / "model.safetensors"


HF = PLAIN.model_copy(update={"norm_eps": 1e-12})


def hf_vit(folder: Path) -> Case:
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**HF_SHAPE, intermediate_size=4 * WIDTH))
    random(model)
    unused = {"classifier.weight", "classifier.bias"}
    return Case("hf_vit", _hub(folder, model), HF, _hf_features(model.vit), unused)


def hf_vit_module_names(folder: Path) -> Case:
    """The state of a module of transformers 5, whose names differ from the hub's."""
    model = transformers.ViTModel(transformers.ViTConfig(**HF_SHAPE, intermediate_size=4 * WIDTH))
    path = saved(folder, random(model))
    return Case("hf_vit", path, HF, _hf_features(model), {"pooler.dense.weight", "pooler.dense.bias"})


def hf_vit_mae(folder: Path) -> Case:
    """ViTMAE always masks and shuffles, also in evaluation: with ratio 0 and rising noise it does neither."""
    config = transformers.ViTMAEConfig(
        **HF_SHAPE,
        intermediate_size=4 * WIDTH,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        mask_ratio=0.0,
    )
    model = transformers.ViTMAEForPreTraining(config)
    random(model, MAE_TABLE)
    path = _hub(folder, model)

    def features(images: Tensor) -> Tensor:
        noise = torch.arange(25.0).expand(len(images), -1)
        return model.vit(pixel_values=images, noise=noise).last_hidden_state  # type: ignore[no-any-return]

    from safetensors.torch import load_file

    return Case("hf_vit_mae", path, HF, features, {key for key in load_file(path) if key.startswith("decoder.")})


def _hf_beit(**changes: Any) -> Any:
    return transformers.BeitConfig(**HF_SHAPE, intermediate_size=4 * WIDTH, layer_norm_eps=1e-6, **changes)


def hf_beit(folder: Path) -> Case:
    """Masked image modelling, as microsoft/beit-base-patch16-224-pt22k: one table, the norm outside `beit.`."""
    model = transformers.BeitForMaskedImageModeling(_hf_beit(use_shared_relative_position_bias=True, vocab_size=7))
    random(model)
    path = _hub(folder, model)

    def features(images: Tensor) -> Tensor:
        return model.layernorm(model.beit(pixel_values=images).last_hidden_state)  # type: ignore[no-any-return]

    return Case("hf_beit", path, BEIT, features, {"lm_head.weight", "lm_head.bias"})


def hf_beit_finetuned(folder: Path) -> Case:
    model = transformers.BeitForImageClassification(_hf_beit(use_relative_position_bias=True))
    random(model)
    architecture = BEIT.model_copy(update={"final_norm": "pooled"})
    unused = {"classifier.weight", "classifier.bias"}
    return Case("hf_beit", _hub(folder, model), architecture, _hf_features(model.beit), unused)


def hf_dinov2(folder: Path) -> Case:
    model = transformers.Dinov2Model(transformers.Dinov2Config(**HF_SHAPE, use_swiglu_ffn=True))
    random(model)
    architecture = DINOV2.model_copy(update={"mlp": "swiglu", "mlp_ratio": 64 / 24})
    return Case("hf_dinov2", _hub(folder, model), architecture, _hf_features(model), {"embeddings.mask_token"})


def hf_dinov2_registers(folder: Path) -> Case:
    model = transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**HF_SHAPE))
    random(model)
    architecture = DINOV2.model_copy(update={"registers": 4})
    return Case("hf_dinov2", _hub(folder, model), architecture, _hf_features(model), {"embeddings.mask_token"})


VITDET = PLAIN.model_copy(
    update={"class_token": False, "class_position": False, "rel_pos": "decomposed", "final_norm": "none"}
)
VITDET_OPTIONS: dict[str, Any] = {"window": 3, "global_blocks": (1,), "rel_pos": "decomposed"}


def _vitdet(folder: Path) -> tuple[State, Features, set[str]]:
    from detectron2.modeling.backbone.vit import ViT

    model = ViT(
        img_size=SIDE,
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=DEPTH,
        num_heads=HEADS,
        window_size=3,
        window_block_indexes=(0,),
        use_rel_pos=True,
        pretrain_img_size=SIDE,
        norm_layer=lambda width: nn.LayerNorm(width, eps=1e-6),
    )
    state = prefixed(random(model), "backbone.net.")
    others = {"backbone.simfp_2.0.weight": torch.ones(2), "roi_heads.box_predictor.cls_score.bias": torch.ones(3)}

    def features(images: Tensor) -> Tensor:
        map_BDhw: Tensor = model(images)["last_feat"]
        return map_BDhw.flatten(2).transpose(1, 2)

    return state | others, features, set(others)


def vitdet(folder: Path) -> Case:
    state, features, unused = _vitdet(folder)
    path = saved(folder, {"model": state, "iteration": 3, "optimizer": {}})
    return Case("vitdet", path, VITDET, features, unused)


def vitdet_pkl(folder: Path) -> Case:
    """The model zoo's format: a plain pickle of arrays."""
    state, features, unused = _vitdet(folder)
    arrays = {key: value.numpy() for key, value in state.items()}
    content = {"model": arrays, "__author__": "Detectron2 Model Zoo", "matching_heuristics": True}
    (folder / "file.pkl").write_bytes(pickle.dumps(content, protocol=2))
    return Case("vitdet", folder / "file.pkl", VITDET, features, unused)


def mmpretrain_mae(folder: Path) -> Case:
    """mmpretrain is no package of ours: names from its key table."""
    model = timm()
    state = random(model, EXCHANGED)
    names = [
        ("patch_embed.proj", "patch_embed.projection"),
        ("blocks.", "layers."),
        ("mlp.fc1", "ffn.layers.0.0"),
        ("mlp.fc2", "ffn.layers.1"),
    ]
    renamed = {}
    for key, value in state.items():
        for ours, theirs in names:
            key = key.replace(ours, theirs)
        key = key.replace("norm1.", "ln1.").replace("norm2.", "ln2.")
        renamed["backbone." + ("ln1." + key.removeprefix("norm.") if key.startswith("norm.") else key)] = value
    others = {
        "neck.decoder_embed.weight": torch.ones(8, WIDTH),
        "neck.mask_token": torch.ones(1, 1, 8),
        "data_preprocessor.mean": torch.ones(3, 1, 1),
    }
    path = saved(folder, {"meta": {"epoch": 1600}, "state_dict": renamed | others})
    return Case("mmpretrain", path, PLAIN, model.forward_features, set(others))


def _mm_features(model: nn.Module, class_token: bool) -> Features:
    """mmseg returns maps; the class token, which they lack, is compared nowhere."""

    def features(images: Tensor) -> Tensor:
        map_BDhw: Tensor = model(images)[-1]
        return map_BDhw.flatten(2).transpose(1, 2)

    return features


def _mmseg(folder: Path, model: nn.Module, architecture: Architecture) -> Case:
    head = {"decode_head.conv_seg.weight": torch.ones(2, 3), "auxiliary_head.conv_seg.bias": torch.ones(2)}
    state = random(model)
    index = {f"backbone.{key}" for key in state if key.endswith("relative_position_index")}
    path = saved(folder, {"meta": {}, "state_dict": prefixed(state, "backbone.") | head})
    return Case("mmseg", path, architecture, _mm_features(model, True), index | set(head))


MMSEG = PLAIN.model_copy(update={"rel_pos": "bias", "layer_scale": True, "final_norm": "none"})


def mmseg_mae(folder: Path) -> Case:
    from mmseg.models.backbones import MAE

    model = MAE(**MM_SHAPE, init_values=1.0, out_indices=-1, norm_cfg={"type": "LN", "eps": 1e-6})
    return _mmseg(folder, model, MMSEG)


def mmseg_beit(folder: Path) -> Case:
    from mmseg.models.backbones import BEiT

    model = BEiT(**MM_SHAPE, init_values=0.1, out_indices=-1, norm_cfg={"type": "LN", "eps": 1e-6})
    return _mmseg(folder, model, MMSEG.model_copy(update={"positions": "none", "class_position": False}))


def mmseg_vit(folder: Path) -> Case:
    from mmseg.models.backbones import VisionTransformer as MMViT

    model = MMViT(**MM_SHAPE, out_indices=-1, final_norm=True, norm_cfg={"type": "LN", "eps": 1e-6}, patch_bias=True)
    return _mmseg(folder, model, PLAIN)


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
        hf_vit,
        hf_vit_module_names,
        hf_vit_mae,
        hf_beit,
        hf_beit_finetuned,
        hf_dinov2,
        hf_dinov2_registers,
        vitdet,
        vitdet_pkl,
        mmpretrain_mae,
        mmseg_mae,
        mmseg_beit,
        mmseg_vit,
    )
}
