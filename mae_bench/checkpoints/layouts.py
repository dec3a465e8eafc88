"""Find out, from names, shapes and metadata, what a weight file holds, and map it to the encoder's names.

The key tables are those of facebookresearch/mae (``models_mae.py``, ``models_vit.py``) and facebookresearch/deit, which
share timm's names for the encoder. A file's name says nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mae_bench.encoders.positions import sincos_table
from mae_bench.errors import UserError

Layout = Literal["mae_bench", "fair_mae", "fair_mae_finetuned", "vit_classifier", "vit"]

NAMES: dict[Layout, str] = {
    "mae_bench": "a mae_bench encoder",
    "fair_mae": "a FAIR MAE pre-trained encoder (plain ViT keys, fixed sin-cos positions)",
    "fair_mae_finetuned": "a FAIR MAE fine-tuned classifier (fc_norm.*, head.*, no norm.*)",
    "vit_classifier": "a DeiT classifier (plain ViT keys and head.*)",
    "vit": "a ViT without head whose positions are not MAE's sin-cos table",
}
FORMAT = "mae_bench encoder"  # metadata `format` of our own files

ANCHOR = "patch_embed.proj.weight"  # every layout below has it exactly once, behind the file's prefix
PREFIXES = ("", "module.")  # of torch's DistributedDataParallel
ENCODER_KEY = re.compile(
    r"cls_token|pos_embed|patch_embed\.proj\.(weight|bias)|norm\.(weight|bias)"
    r"|blocks\.[0-9]{1,4}\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)"
)
DECODER_KEY = re.compile(r"mask_token|decoder_[a-z0-9_.]+")
HEAD_KEY = re.compile(r"head\.(weight|bias)")
FC_NORM_KEY = re.compile(r"fc_norm\.(weight|bias)")

# Part of a key -> the layout it gives away, for a better error than "unknown".
TELLTALES = {
    "dist_token": "a distilled DeiT",
    "register_tokens": "a DINOv2 model with registers",
    "vit.embeddings.": "a Hugging Face ViT or ViTMAE",
    "backbone.net.": "a detectron2 ViTDet",
    "backbone.layers.": "an mmpretrain or mmsegmentation model",
    "base_encoder.": "a MoCo v3 training checkpoint",
    "rel_pos_bias.": "a BEiT model",
    "q_bias": "a BEiT model",
    "gamma_1": "a BEiT or DeiT III model",
    "ls1.gamma": "a DINOv2 or DeiT III model",
    "decoder_embed.": "the decoder of a MAE",
}


@dataclass(frozen=True)
class Found:
    """What a file holds: its encoder tensors under FAIR's names, and every other tensor with the reason to leave it."""

    layout: Layout
    detail: str  # for people: which variant
    prefix: str  # stripped from every key
    encoder: dict[str, Tensor]
    unused: dict[str, str] = field(default_factory=dict)


def detect(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Found:
    """Recognise a file's layout, or raise a UserError that names what it seems to be."""
    prefixes = [key.removesuffix(ANCHOR) for key in tensors if key.endswith(ANCHOR)]
    if len(prefixes) != 1 or prefixes[0] not in PREFIXES:
        raise _unknown(path, list(tensors))
    prefix = prefixes[0]
    stray = [key for key in tensors if not key.startswith(prefix)]
    if stray:
        raise UserError(f"{path}: {stray[0]!r:.80} lacks the prefix '{prefix}' of the other tensors; unknown layout")
    named = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    encoder = {key: tensor for key, tensor in named.items() if ENCODER_KEY.fullmatch(key)}
    others = [key for key in named if key not in encoder]
    if metadata.get("format") == FORMAT and not others:
        task = f" made by {metadata['task']!r:.60}" if "task" in metadata else ""
        return Found("mae_bench", FORMAT + task, prefix, encoder)
    if others and all(DECODER_KEY.fullmatch(key) for key in others):
        unused = dict.fromkeys((prefix + key for key in others), "MAE decoder, used in pre-training only")
        return Found(_positions(encoder), "FAIR MAE encoder + decoder (full or visualize)", prefix, encoder, unused)
    if any(FC_NORM_KEY.fullmatch(key) for key in others):
        if all(HEAD_KEY.fullmatch(key) or FC_NORM_KEY.fullmatch(key) for key in others):
            unused = dict.fromkeys((prefix + key for key in others), "fine-tuned classifier")
            return Found("fair_mae_finetuned", "FAIR MAE fine-tuned", prefix, encoder, unused)
    elif others and all(HEAD_KEY.fullmatch(key) for key in others):
        unused = dict.fromkeys((prefix + key for key in others), "classifier of the pre-training labels")
        return Found("vit_classifier", "DeiT", prefix, encoder, unused)
    elif not others:
        return Found(_positions(encoder), "FAIR MAE encoder", prefix, encoder)
    raise _unknown(path, others)


def _positions(encoder: Mapping[str, Tensor]) -> Layout:
    """MAE's table is fixed, so its values tell a MAE file from another ViT with the same names."""
    table = encoder.get("pos_embed")
    return "fair_mae" if table is not None and table_order(table) == "mae" else "vit"


def table_order(table: Tensor) -> Literal["mae", "exchanged", "other"]:
    """Whether a (1,1+N,D) table is MAE's fixed one, the same with exchanged axes (MoCo v3, mmpretrain), or neither."""
    side = round((table.shape[1] - 1) ** 0.5) if table.dim() == 3 else 0
    if side < 1 or table.shape[0] != 1 or side * side + 1 != table.shape[1] or table.shape[2] % 4:
        return "other"
    fixed = sincos_table(table.shape[2], (side, side), class_token=True)
    atol = 1e-5 if table.dtype == torch.float32 else 1e-2  # half precision keeps three digits
    if torch.allclose(table.float(), fixed, atol=atol):
        return "mae"
    exchanged = torch.cat(fixed.chunk(2, dim=2)[::-1], dim=2)
    return "exchanged" if torch.allclose(table.float(), exchanged, atol=atol) else "other"


def _unknown(path: Path, keys: list[str]) -> UserError:
    guesses = [name for part, name in TELLTALES.items() if any(part in key for key in keys)]
    seems = f"; it looks like {guesses[0]}, a layout that is not read" if guesses else ""
    shown = ", ".join(f"{key!r:.80}" for key in keys[:3]) + (", …" if len(keys) > 3 else "")
    return UserError(
        f"{path}: unknown layout{seems}. Unexpected tensors: {shown or 'none at all'}. "
        "Known: FAIR MAE (encoder, full, visualize), DeiT, mae_bench"
    )


def describe(tensors: Mapping[str, Tensor]) -> str:
    """Size of an encoder in words, read from its shapes, e.g. "ViT-B/16 (width 768, depth 12, 197 positions)"."""
    kernel, positions = tensors[ANCHOR], tensors.get("pos_embed")
    width, patch = kernel.shape[0], kernel.shape[-1]
    depth = 1 + max((int(key.split(".")[1]) for key in tensors if key.startswith("blocks.")), default=-1)
    letters = {(192, 12): "Ti", (384, 12): "S", (768, 12): "B", (1024, 24): "L", (1280, 32): "H"}
    letter = letters.get((width, depth))
    rows = "no" if positions is None or positions.dim() != 3 else str(positions.shape[1])
    name = f"ViT-{letter}/{patch}" if letter else f"a ViT, patch {patch}"
    return f"{name} (width {width}, depth {depth}, {rows} positions)"
