"""Weight files of models of transformers, detectron2 and OpenMMLab."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import transformers
from layout_cases_base import (
    BEIT,
    DEPTH,
    DINOV2,
    EXCHANGED,
    HEADS,
    MAE_TABLE,
    PATCH,
    PLAIN,
    SIDE,
    WIDTH,
    Case,
    Features,
    State,
    prefixed,
    random,
    saved,
    timm,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from mae_bench.schema import Architecture

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
    return Case("hf_vit", _hub(folder, model), HF, _hf_features(model.vit), unused, labelled=True)


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
    return Case("hf_beit", _hub(folder, model), architecture, _hf_features(model.beit), unused, labelled=True)


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
    names = [
        ("patch_embed.proj", "patch_embed.projection"),
        ("blocks.", "layers."),
        ("mlp.fc1", "ffn.layers.0.0"),
        ("mlp.fc2", "ffn.layers.1"),
    ]
    renamed = {}
    for key, value in random(model, EXCHANGED).items():
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


def _mm_features(model: nn.Module) -> Features:
    """mmseg returns maps; the class token, which they lack, is compared nowhere."""

    def features(images: Tensor) -> Tensor:
        map_BDhw: Tensor = model(images)[-1]
        return map_BDhw.flatten(2).transpose(1, 2)

    return features


def _mmseg(folder: Path, model: nn.Module, architecture: Architecture, *, bare: bool = False) -> Case:
    """A segmenter, or ``bare``: its backbone alone, as mmseg's converters leave it."""
    state = random(model)
    index = {key for key in state if key.endswith("relative_position_index")}
    if bare:
        return Case("mmseg", saved(folder, state), architecture, _mm_features(model), index)
    head = {"decode_head.conv_seg.weight": torch.ones(2, 3), "auxiliary_head.conv_seg.bias": torch.ones(2)}
    path = saved(folder, {"meta": {}, "state_dict": prefixed(state, "backbone.") | head})
    unused = {f"backbone.{key}" for key in index} | set(head)
    return Case("mmseg", path, architecture, _mm_features(model), unused)


MMSEG = PLAIN.model_copy(update={"rel_pos": "bias", "layer_scale": True, "final_norm": "none"})


def mmseg_mae(folder: Path, *, bare: bool = False) -> Case:
    from mmseg.models.backbones import MAE

    model = MAE(**MM_SHAPE, init_values=1.0, out_indices=-1, norm_cfg={"type": "LN", "eps": 1e-6})
    return _mmseg(folder, model, MMSEG, bare=bare)


def mmseg_mae_bare(folder: Path) -> Case:
    return mmseg_mae(folder, bare=True)


def mmseg_beit(folder: Path, *, bare: bool = False) -> Case:
    from mmseg.models.backbones import BEiT

    model = BEiT(**MM_SHAPE, init_values=0.1, out_indices=-1, norm_cfg={"type": "LN", "eps": 1e-6})
    architecture = MMSEG.model_copy(update={"positions": "none", "class_position": False})
    return _mmseg(folder, model, architecture, bare=bare)


def mmseg_beit_bare(folder: Path) -> Case:
    return mmseg_beit(folder, bare=True)


def mmseg_vit(folder: Path, *, bare: bool = False) -> Case:
    from mmseg.models.backbones import VisionTransformer as MMViT

    model = MMViT(**MM_SHAPE, out_indices=-1, final_norm=True, norm_cfg={"type": "LN", "eps": 1e-6}, patch_bias=True)
    return _mmseg(folder, model, PLAIN, bare=bare)


def mmseg_vit_bare(folder: Path) -> Case:
    return mmseg_vit(folder, bare=True)


CASES = (
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
    mmseg_mae_bare,
    mmseg_beit,
    mmseg_beit_bare,
    mmseg_vit,
    mmseg_vit_bare,
)
