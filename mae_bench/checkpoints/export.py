"""Write an encoder as others load it: a FAIR file, a timm model folder, a Hugging Face model folder.

The tensors go out bit for bit, in the type that the file stores. What a target cannot express is refused by name.
Sources: facebookresearch/mae (``main_finetune.py``); timm's ``models/_hub.py``, ``models/_builder.py`` and
``models/vision_transformer.py``; transformers' ``models/vit`` and, for the names of the files on the hub,
``conversion_mapping.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from mae_bench.checkpoints.card import Loaded, hub_licence, resizing, write_card
from mae_bench.checkpoints.files import read_tensors
from mae_bench.checkpoints.layouts import detect
from mae_bench.checkpoints.load import build_encoder
from mae_bench.checkpoints.save import atomic
from mae_bench.errors import UserError, nearest
from mae_bench.schema import Architecture, Backbone

FIXED_EPS = 1e-6  # of every LayerNorm in FAIR's and timm's ViT: a FAIR file and timm's config.json cannot say another
CROP = 0.875  # of a recipe without a published use: 224 of 256, FAIR's evaluation and timm's default


@dataclass(frozen=True)
class Target:
    """A library that loads exports. ``refusal`` says why it cannot express an architecture, or is empty."""

    title: str
    refusal: Callable[[Architecture], str]
    write: Callable[[Loaded, Path], None]


def export(file: Path, backbone: Backbone, to: str, out: Path) -> list[Path]:
    """Write the encoder in ``file``, read as ``backbone``, to the new folder ``out``; returns the files.

    ``to``: "fair" (``<backbone>.pth``), "timm" or "hf" (``model.safetensors``, ``config.json`` and a model card
    ``README.md``; hf also ``preprocessor_config.json``).

    Raises:
        UserError: ``out`` holds something; the target cannot express the architecture; ``file`` is not what the
            backbone means, is synthetic, or lacks the final norm.
    """
    if to not in TARGETS:
        raise UserError(f"--to {to}: unknown target{nearest(to, TARGETS)}; choose one of {', '.join(TARGETS)}")
    target = TARGETS[to]
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out} is there already; name a new folder, an export overwrites nothing")
    if reason := target.refusal(backbone.architecture):
        able = [name for name, other in TARGETS.items() if not other.refusal(backbone.architecture)]
        hint = f"; use --to {' or '.join(able)}" if able else ""
        raise UserError(f"backbone '{backbone.name}' cannot be written for {target.title}: {reason}{hint}")
    loaded = _load(file, backbone)
    with atomic(out) as part:
        part.mkdir()
        target.write(loaded, part)
        names = sorted(path.name for path in part.iterdir())
    return [out / name for name in names]


def _load(file: Path, backbone: Backbone) -> Loaded:
    stored, metadata = read_tensors(file)
    found = detect(file, stored, metadata)
    if not found.normed and backbone.architecture.final_norm != "none":
        raise UserError(
            f"{file} has no final norm (norm.weight, norm.bias): its encoder was trained without one, and what loads "
            "an export would put an untrained norm there; export an encoder that was trained with it"
        )
    report = build_encoder(backbone, file, seed=0)[1]  # proves the hash, the layout, every name and every shape
    if report.synthetic:
        raise UserError(f"{file} holds random weights that a smoke run wrote; give the file of a real run")
    # As stored, where the built encoder is float32. Cloned, since a view is saved with all the memory it looks into.
    tensors = {name: tensor.contiguous().clone() for name, tensor in found.encoder.items()}
    return Loaded(backbone, tensors, metadata, found.layout, report)


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})  # transformers 4 asks for it


def _dump(values: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _preprocessing(backbone: Backbone) -> tuple[float, str]:
    """(image size / resized shorter side, interpolation) at evaluation."""
    published = backbone.published
    return (published.crop, published.interpolation) if published else (CROP, "bicubic")


def _refused_as_variant(architecture: Architecture) -> str:
    if architecture.plain:
        return ""
    stated = {
        key: value for key, value in architecture.model_dump().items() if key in architecture.FEATURES - {"resize"}
    }
    if architecture.positions == "none":
        stated["positions"] = "none"
    features = ", ".join(f"{key} = {json.dumps(value)}" for key, value in stated.items())
    return f"it holds plain ViTs, this one has {features}"


def _refused_eps(architecture: Architecture) -> str:
    eps = architecture.norm_eps
    return "" if eps == FIXED_EPS else f"its norm_eps is fixed at {FIXED_EPS:g}, this one has {eps:g}"


# FAIR


def _refused_by_fair(architecture: Architecture) -> str:
    return _refused_as_variant(architecture) or _refused_eps(architecture)


def _write_fair(loaded: Loaded, folder: Path) -> None:
    torch.save({"model": loaded.tensors}, folder / f"{loaded.backbone.name}.pth")


# timm

TIMM_SIZES = {
    (192, 12, 3): "tiny",
    (384, 12, 6): "small",
    (768, 12, 12): "base",
    (1024, 24, 16): "large",
    (1280, 32, 16): "huge",
}


def _refused_by_timm(architecture: Architecture) -> str:
    if architecture.rel_pos != "none":
        return f"its VisionTransformer has no relative positions, this one has rel_pos = {architecture.rel_pos!r}"
    if architecture.positions == "none":
        return 'it adds a table of positions, this one has positions = "none"'
    return _refused_eps(architecture)


def _write_timm(loaded: Loaded, folder: Path) -> None:
    architecture, tensors = loaded.backbone.architecture, dict(loaded.tensors)
    notes = []
    if architecture.registers and architecture.class_position:
        # timm gives a position to all tokens of the prefix or to none. Summed as in the forward pass, in float32.
        positions = tensors["pos_embed"]
        tensors["cls_token"] = tensors["cls_token"].float() + positions[:, :1].float()
        tensors["pos_embed"] = positions[:, 1:].contiguous().clone()
        notes.append("The class token contains its position, as in timm's own models with registers.")
    _save(tensors, folder)
    config = _timm_config(loaded)
    _dump(config, folder / "config.json")
    usage = (
        "import json, timm\n\n"
        'model = timm.create_model("local-dir:FOLDER", pretrained=True)  # on the hub: "hf-hub:OWNER/NAME"\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n\n"
        "# or from the file alone\n"
        'arguments = json.load(open("FOLDER/config.json"))["model_args"]\n'
        'path = "FOLDER/model.safetensors"\n'
        f'model = timm.create_model("{config["architecture"]}", checkpoint_path=path, **arguments)'
    )
    write_card(loaded, folder, "timm", usage, [*notes, resizing(loaded, "timm", "timm")])


def _timm_config(loaded: Loaded) -> dict[str, Any]:
    """What timm builds the model from: the entry point, its arguments, and what belongs to the weights."""
    architecture = loaded.backbone.architecture
    crop, interpolation = _preprocessing(loaded.backbone)
    arguments = _timm_arguments(architecture)
    side = architecture.image_size
    cfg: dict[str, Any] = {
        "input_size": [3, side, side],
        "fixed_input_size": True,
        "interpolation": interpolation,
        "crop_pct": crop,
        "crop_mode": "center",
        "mean": loaded.backbone.input.mean,
        "std": loaded.backbone.input.std,
        "num_classes": 0,
        "pool_size": None,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    if loaded.published:
        identifier, name = hub_licence(loaded)
        cfg |= {"license": name or identifier, "origin_url": loaded.published.url}
    return {
        "architecture": _timm_entry_point(architecture),
        "num_classes": 0,
        "num_features": architecture.width,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": cfg,
    }


def _timm_entry_point(architecture: Architecture) -> str:
    """The function of timm that the arguments go to: the one of this size, where there is one."""
    if architecture.mlp == "swiglu":
        return "vit_giant_patch14_dinov2"  # its MLP class is no value that a config.json could give
    size = TIMM_SIZES.get((architecture.width, architecture.depth, architecture.heads))
    name = f"vit_{size}_patch{architecture.patch}_224"
    return name if timm.is_model(name) else "vit_base_patch16_224"


def _timm_arguments(architecture: Architecture) -> dict[str, Any]:
    """Every argument that shapes the model, so that none is left to the entry point."""
    hidden = architecture.hidden * (2 if architecture.mlp == "swiglu" else 1)
    ratio = hidden / architecture.width
    if int(architecture.width * ratio) != hidden:  # timm truncates
        ratio = math.nextafter(ratio, math.inf)
    pooled = architecture.final_norm == "pooled"
    return {
        "img_size": architecture.image_size,
        "patch_size": architecture.patch,
        "embed_dim": architecture.width,
        "depth": architecture.depth,
        "num_heads": architecture.heads,
        "mlp_ratio": ratio,
        "class_token": architecture.class_token,
        "no_embed_class": not architecture.class_position or architecture.registers > 0,
        "reg_tokens": architecture.registers,
        "init_values": 1e-5 if architecture.layer_scale else 0.0,  # the file's own take its place
        "final_norm": architecture.final_norm != "none",
        "fc_norm": pooled,
        "global_pool": "avg" if pooled or not architecture.class_token else "token",
        "num_classes": 0,
    }


# Hugging Face

HF_NAMES = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm": "layernorm",
}


def _write_hf(loaded: Loaded, folder: Path) -> None:
    _save(_hf_tensors(loaded.tensors), folder)
    _dump(_hf_config(loaded), folder / "config.json")
    crop, interpolation = _preprocessing(loaded.backbone)
    side = loaded.backbone.architecture.image_size
    processor = {
        "image_processor_type": "BitImageProcessor",  # ViT's own crops nothing before transformers 5
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(side / crop)},
        "resample": {"bilinear": 2, "bicubic": 3}[interpolation],
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": loaded.backbone.input.mean,
        "image_std": loaded.backbone.input.std,
    }
    _dump(processor, folder / "preprocessor_config.json")
    usage = (
        "from transformers import AutoImageProcessor, AutoModel\n\n"
        'processor = AutoImageProcessor.from_pretrained("FOLDER")\n'
        'model = AutoModel.from_pretrained("FOLDER", add_pooling_layer=False)'
    )
    write_card(loaded, folder, "transformers", usage, [resizing(loaded, "transformers", "fair")])


def _hf_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of ViTModel's files on the hub, which has query, key and value apart."""
    renamed = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight").removesuffix(".bias")
        prefix, tail = "", name.removeprefix(module)
        if module.startswith("blocks."):
            _, number, module = module.split(".", 2)
            prefix = f"encoder.layer.{number}."
        if module == "attn.qkv":
            for part, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                renamed[f"{prefix}attention.attention.{part}{tail}"] = rows.clone()
        else:
            renamed[prefix + HF_NAMES[module] + tail] = tensor
    return renamed


def _hf_config(loaded: Loaded) -> dict[str, Any]:
    architecture = loaded.backbone.architecture
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in loaded.tensors.values()}
    return {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": architecture.width,
        "num_hidden_layers": architecture.depth,
        "num_attention_heads": architecture.heads,
        "intermediate_size": architecture.hidden,
        "hidden_act": "gelu",
        "layer_norm_eps": architecture.norm_eps,
        "image_size": architecture.image_size,
        "patch_size": architecture.patch,
        "num_channels": 3,
        "qkv_bias": True,
        "encoder_stride": architecture.patch,
        "dtype": types.pop() if types in ({"float16"}, {"bfloat16"}) else "float32",
    }


TARGETS = {
    "fair": Target("facebookresearch/mae", _refused_by_fair, _write_fair),
    "timm": Target("timm", _refused_by_timm, _write_timm),
    "hf": Target("transformers' ViTModel", _refused_as_variant, _write_hf),
}
