"""Find out, from names, shapes and metadata, what a weight file holds, and map it to the encoder's names.

A file's name says nothing here. `namings` tells how each code base names its tensors; this module applies those tables,
joins the parts, and tells apart the layouts that share their names by what else a file holds: MAE's fixed table of
positions by its values, DeiT III by the class token's missing position, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mae_bench.checkpoints.namings import (
    CLASSIFIER,
    DECODER,
    DENSE_HEAD,
    FLAX,
    HF,
    INDEX,
    MM,
    NAMINGS,
    Naming,
    Rules,
)
from mae_bench.encoders.positions import sincos_table
from mae_bench.errors import UserError
from mae_bench.schema import Layout
from mae_bench.schema.backbone import LABELLED

FoundLayout = Layout | Literal["mae_bench"]

LAYOUTS: dict[FoundLayout, str] = {
    "mae_bench": "a mae_bench encoder",
    "fair_mae": "a FAIR MAE pre-trained encoder (plain ViT keys, fixed sin-cos positions)",
    "fair_mae_finetuned": "a FAIR MAE fine-tuned classifier (fc_norm.*, head.*, no norm.*)",
    "vit": "a ViT without head whose positions are not MAE's sin-cos table (timm, DINO's backbone files)",
    "vit_classifier": "a supervised ViT classifier (plain ViT keys and head.*: DeiT, timm)",
    "deit3": "a DeiT III model (layer scale, a class token without position)",
    "moco_v3": "a MoCo v3 encoder (sin-cos positions with rows first)",
    "dino": "a DINO training checkpoint",
    "dinov2": "a DINOv2 encoder (layer scale)",
    "beit": "a BEiT or BEiT v2 pre-trained encoder (relative position bias, norm.*)",
    "beit_finetuned": "a BEiT or BEiT v2 fine-tuned model (relative position bias, fc_norm.*)",
    "augreg": "a ViT of google-research/vision_transformer (Flax names)",
    "hf_vit_mae": "a Hugging Face ViTMAE",
    "hf_vit": "a Hugging Face ViT or DeiT",
    "hf_beit": "a Hugging Face BEiT",
    "hf_dinov2": "a Hugging Face Dinov2",
    "vitdet": "a detectron2 ViTDet",
    "mmpretrain": "an mmpretrain model",
    "mmseg": "an mmsegmentation model",
}
FORMAT = "mae_bench encoder"  # metadata `format` of our own files

ANCHOR = "patch_embed.proj.weight"
TABLE = "attn.relative_position_bias_table"
STARRED_TABLE = f"blocks.*.{TABLE}"  # one for all blocks
# Our tensor's parts, in the order in which they are joined. BEiT has no key bias: a constant that is added to every
# logit of a softmax changes nothing, so zeros stand in its place.
PARTS = (("q", "k", "v"), ("gate", "up"))

DISTILLED = "a distilled DeiT, which has a second class token that nothing here reads; take the plain DeiT"
# Part of a key -> the layout it gives away, for a better error than "unknown".
TELLTALES = {
    "dist_token": DISTILLED,
    "distillation_token": DISTILLED,
    "decoder_embed.": "the decoder of a MAE",
    "teacher.": "a training checkpoint of DINO",
    "encoder.": "an encoder behind the prefix of another project",
}


@dataclass(frozen=True)
class Found:
    """What a file holds: its encoder tensors under our names, and every other tensor with the reason to leave it."""

    layout: FoundLayout
    detail: str  # for people: which variant
    prefix: str  # stripped from every key
    encoder: dict[str, Tensor]
    unused: dict[str, str] = field(default_factory=dict)  # keys as in the file
    sources: dict[str, list[str]] = field(default_factory=dict)  # our name -> keys of the file that it was made from
    changes: list[str] = field(default_factory=list)  # what was converted, beyond names
    heads: int = 0  # of attention, where the file tells; 0 = it does not

    @property
    def labelled(self) -> bool:
        """Whether the file has a classifier: its encoder was last trained on labels, whatever its layout is."""
        return CLASSIFIER in self.unused.values()

    @property
    def normed(self) -> bool:
        """Whether the final norm of the architecture is to be found. Our own files alone may lack it, where the encoder
        was trained without one."""
        return self.layout != "mae_bench" or not {"norm.weight", "fc_norm.weight"}.isdisjoint(self.encoder)


def detect(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Found:
    """Recognise a file's layout, or raise a UserError that names what it seems to be."""
    keys = {key: key for key in tensors}  # the file's names
    heads = 0
    if any(key.endswith("embedding/kernel") for key in tensors):
        tensors, keys, heads = _from_flax(path, tensors)
    naming, prefix = _naming(path, tensors)
    parts, unused = _sort(path, naming, prefix, keys)
    encoder, changes = _join(path, parts, tensors)
    sources = {
        name: [keys[own[part]] for part in ("", *PARTS[0], *PARTS[1]) if part in own]
        for name in encoder
        for own in [parts.get(name) or parts[STARRED_TABLE]]
    }
    layout, detail = _layout(naming, prefix, encoder, sources, unused, metadata)
    if layout == "vitdet" and _is_square(facts(encoder)["rows"] - 1):
        encoder["pos_embed"] = encoder["pos_embed"][:, 1:]
        changes.append("pos_embed: row of the class token dropped, which detectron2 keeps and never uses")
    return Found(layout, detail, prefix, encoder, unused, sources, changes, heads)


def _sort(
    path: Path, naming: Naming, prefix: str, keys: Mapping[str, str]
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Encoder tensors, as our name -> part ("" = whole) -> key, and the file's other keys with the reason."""
    encoder: dict[str, dict[str, str]] = {}
    unused: dict[str, str] = {}
    unknown: list[str] = []
    for key, own in keys.items():
        rest = key.removeprefix(prefix)
        name = _match(naming.encoder, rest) if key.startswith(prefix) else _match(naming.beside, key)
        reason = _match(naming.other, rest) or _match(naming.other, key)
        if name:
            whole, _, part = name.partition("#")
            parts = encoder.setdefault(whole, {})
            if part in parts or (parts and "" in (part, *parts)):
                raise _twice(path, keys[next(iter(parts.values()))], own)
            parts[part] = key
        elif reason:
            unused[own] = reason
        else:
            unknown.append(own)
    if unknown:
        stray = [key for key in unknown if not key.startswith(prefix)]
        if stray and _match(naming.encoder, stray[0]):
            raise UserError(
                f"{path}: {stray[0]!r:.80} lacks the prefix '{prefix}' of the other tensors; unknown layout"
            )
        raise _unknown(path, unknown)
    if STARRED_TABLE in encoder:
        of_a_block = [parts[""] for name, parts in encoder.items() if name.endswith(TABLE) and name != STARRED_TABLE]
        if of_a_block:
            raise _twice(path, encoder[STARRED_TABLE][""], of_a_block[0])
    return encoder, unused


def _twice(path: Path, first: str, second: str) -> UserError:
    return UserError(
        f"{path}: {first!r:.80} and {second!r:.80} are the same tensor twice; leave out the one that is not meant"
    )


def _match(rules: Rules, key: str) -> str:
    """What the first rule that fits the whole key makes of it; "" where none does."""
    for pattern, template in rules:
        if found := re.fullmatch(pattern, key):
            return found.expand(template)
    return ""


def _naming(path: Path, tensors: Mapping[str, Tensor]) -> tuple[Naming, str]:
    """The naming, and the prefix, behind which the file has a patch embedding."""
    fits = [(naming, prefix) for naming in NAMINGS for prefix in naming.prefixes if prefix + naming.anchor in tensors]
    if len(fits) != 1:
        raise _unknown(path, list(tensors))
    return fits[0]


def _from_flax(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """Flax's tensors as torch has them, output channels first; the file's key of each; and the heads, from shapes."""
    turned: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    heads: dict[int, str] = {}  # how many, and the first key that says so
    for key, value in tensors.items():
        attention = "/MultiHeadDotProductAttention" in key
        if key.endswith("/kernel") and value.dim() == 4:  # height, width, in, out
            value = value.permute(3, 2, 0, 1)
        elif key.endswith("/out/kernel") and attention and value.dim() == 3:  # heads, channels, out
            heads.setdefault(value.shape[0], key)
            value = value.flatten(0, 1).T
        elif key.endswith("/kernel") and attention and value.dim() == 3:  # in, heads, channels
            heads.setdefault(value.shape[1], key)
            value = value.flatten(1).T
        elif key.endswith("/kernel") and value.dim() == 2:
            value = value.T
        elif attention and value.dim() == 2:  # a bias: heads, channels
            heads.setdefault(value.shape[0], key)
            value = value.flatten()
        name = re.sub("/(?:kernel|scale)$", "/weight", key)
        if name in turned:
            raise _twice(path, keys[name], key)
        turned[name], keys[name] = value, key
    if len(heads) > 1:
        told = " and ".join(f"{count} in {key!r:.80}" for count, key in list(heads.items())[:2])
        raise UserError(f"{path}: the number of attention heads differs, {told}; the file is damaged, fetch it again")
    return turned, keys, next(iter(heads), 0)


def _join(
    path: Path, encoder: Mapping[str, Mapping[str, str]], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Our tensors from the file's, parts joined and a shared table copied into every block; and what was done."""
    joined: dict[str, Tensor] = {}
    changes: dict[str, None] = {}
    for name, keys in encoder.items():
        if name == STARRED_TABLE:
            blocks = sorted({key.split(".")[1] for key in encoder if key.startswith("blocks.") and "*" not in key})
            joined |= {f"blocks.{block}.{TABLE}": tensors[keys[""]].clone() for block in blocks}
            changes["shared relative position bias copied into every block"] = None
            continue
        if "" in keys:
            joined[name] = tensors[keys[""]]
            continue
        order = next(order for order in PARTS if keys.keys() <= set(order))
        parts = [tensors[keys[part]] for part in order if part in keys]
        if any((part.shape, part.dtype) != (parts[0].shape, parts[0].dtype) or not part.dim() for part in parts):
            shown = ", ".join(map(repr, keys.values()))
            raise UserError(f"{path}: the parts of {name} differ in shape or type: {shown:.200}; fetch it again")
        if order[0] == "q" and name.endswith(".bias") and keys.keys() == {"q", "v"}:
            parts.insert(1, torch.zeros_like(parts[0]))
            changes["qkv.bias: zeros for the key, which has no bias in the file"] = None
        elif len(parts) != len(order):
            lacking = next(part for part in order if part not in keys)
            raise UserError(f"{path}: {name} lacks its part '{lacking}', beside {next(iter(keys.values()))!r:.80}")
        else:
            changes[f"{', '.join(order)} joined"] = None
        joined[name] = torch.cat(parts)
    return joined, list(changes)


def _layout(
    naming: Naming,
    prefix: str,
    encoder: Mapping[str, Tensor],
    sources: Mapping[str, list[str]],
    unused: Mapping[str, str],
    metadata: Mapping[str, str],
) -> tuple[FoundLayout, str]:
    """Layout, and the variant in words."""
    reasons = set(unused.values())
    training = metadata.get("wrapper") in ("teacher", "student")
    layout: FoundLayout
    if naming is FLAX:
        layout, detail = "augreg", "Flax ViT"
    elif naming is HF:
        layout, detail = _layout_hf(encoder, reasons)
    elif naming is MM:
        layout, detail = _layout_mm(encoder, sources, reasons)
    elif metadata.get("format") == FORMAT and not unused:
        layout, detail = "mae_bench", FORMAT + (f" made by {metadata['task']!r:.60}" if "task" in metadata else "")
    elif prefix == "backbone.net.":
        layout, detail = "vitdet", "detectron2 ViTDet"
    elif prefix == "module.base_encoder.":
        layout, detail = "moco_v3", "MoCo v3 training checkpoint"
    else:
        layout, detail = _layout_vit(encoder, reasons, training)
    if CLASSIFIER in reasons and layout not in LABELLED:
        detail += " with a classifier"
    return layout, detail + (f", {metadata['wrapper']} of a training checkpoint" if training else "")


def _layout_hf(encoder: Mapping[str, Tensor], reasons: set[str]) -> tuple[FoundLayout, str]:
    if any(key.endswith(TABLE) for key in encoder):
        return "hf_beit", "Hugging Face BEiT"
    if any(key.endswith(".gamma") for key in encoder):
        return "hf_dinov2", "Hugging Face Dinov2"
    if DECODER in reasons:
        return "hf_vit_mae", "Hugging Face ViTMAE with decoder"
    if "pos_embed" in encoder and table_order(encoder["pos_embed"]) == "mae":
        return "hf_vit_mae", "Hugging Face ViTMAE"
    return "hf_vit", "Hugging Face ViT"


def _layout_mm(
    encoder: Mapping[str, Tensor], sources: Mapping[str, list[str]], reasons: set[str]
) -> tuple[FoundLayout, str]:
    if DENSE_HEAD in reasons:
        return "mmseg", "mmsegmentation segmenter"
    # Of bare backbones, those of mmsegmentation: BEiT's and MAE's with a table in every block, and the ViT around
    # torch's own attention. What mmpretrain publishes has a neck or a head.
    tables = any(key.endswith(TABLE) for key in encoder)
    wrapped = any(".attn.attn." in key for keys in sources.values() for key in keys)
    if (tables or wrapped) and reasons <= {INDEX}:
        return "mmseg", "mmsegmentation backbone"
    return "mmpretrain", "mmpretrain"


def _layout_vit(encoder: Mapping[str, Tensor], reasons: set[str], training: bool) -> tuple[FoundLayout, str]:
    """Of plain ViT names; ``training``: from a checkpoint with a teacher and a student."""
    shown = facts(encoder)
    scaled = any(key.endswith(".gamma") for key in encoder)
    order = table_order(encoder["pos_embed"]) if "pos_embed" in encoder else "other"
    if any(key.endswith(TABLE) for key in encoder):
        return ("beit_finetuned", "BEiT fine-tuned") if "fc_norm.weight" in encoder else ("beit", "BEiT")
    if scaled and not shown["class_position"] and not shown["registers"] and CLASSIFIER in reasons:
        return "deit3", "DeiT III"
    if scaled or shown["registers"]:
        return "dinov2", "DINOv2" + (f" with {shown['registers']} registers" if shown["registers"] else "")
    if training:
        return "dino", "DINO"
    if "fc_norm.weight" in encoder:
        return "fair_mae_finetuned", "FAIR MAE fine-tuned"
    if CLASSIFIER in reasons:
        return "vit_classifier", "ViT classifier"
    if DECODER in reasons:
        return ("fair_mae" if order == "mae" else "vit"), "FAIR MAE encoder + decoder (full or visualize)"
    if order == "exchanged":
        return "moco_v3", "MoCo v3 encoder"
    return ("fair_mae", "FAIR MAE encoder") if order == "mae" else ("vit", "ViT")


def facts(encoder: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the shapes of an encoder tell about its architecture, by the field names of ``Architecture``; ``rows`` is
    the length of the position table (0 = none)."""
    kernel = encoder.get(ANCHOR)
    table = encoder.get("pos_embed")
    rows = int(table.shape[1]) if table is not None and table.dim() == 3 else 0
    registers = encoder.get("reg_token")
    into, out = encoder.get("blocks.0.mlp.fc1.weight"), encoder.get("blocks.0.mlp.fc2.weight")
    gated = into is not None and out is not None and into.dim() == out.dim() == 2 and len(into) == 2 * out.shape[1]
    tops = {key.partition(".")[0] for key in encoder}
    leaves = {key.split(".", 2)[-1] for key in encoder if key.startswith("blocks.")}
    return {
        "width": int(kernel.shape[0]) if kernel is not None and kernel.dim() == 4 else 0,
        "patch": int(kernel.shape[-1]) if kernel is not None and kernel.dim() == 4 else 0,
        "depth": 1 + max((int(key.split(".")[1]) for key in encoder if key.startswith("blocks.")), default=-1),
        "rows": rows,
        "class_token": "cls_token" in encoder,
        "class_position": "cls_token" in encoder and rows > 0 and not _is_square(rows),
        "registers": int(registers.shape[1]) if registers is not None and registers.dim() == 3 else 0,
        "mlp": "swiglu" if gated else "gelu",
        "layer_scale": "ls1.gamma" in leaves,
        "rel_pos": "bias" if TABLE in leaves else "decomposed" if "attn.rel_pos_h" in leaves else "none",
        "final_norm": "tokens" if "norm" in tops else "pooled" if "fc_norm" in tops else "none",
    }


def _is_square(number: int) -> bool:
    return number > 0 and round(number**0.5) ** 2 == number


def table_order(table: Tensor) -> Literal["mae", "exchanged", "other"]:
    """Whether a (1,1+N,D) table is MAE's fixed one, the same with exchanged axes (MoCo v3, mmpretrain), or neither."""
    side = round((table.shape[1] - 1) ** 0.5) if table.dim() == 3 and table.shape[1] > 1 else 0
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
    seems = f"; it looks like {guesses[0]}" if guesses else ""
    shown = ", ".join(f"{key!r:.80}" for key in keys[:3]) + (", …" if len(keys) > 3 else "")
    titles = ", ".join(naming.title for naming in NAMINGS)
    return UserError(
        f"{path}: unknown layout{seems}. Unexpected tensors: {shown or 'none at all'}. Known: {titles}, mae_bench"
    )


def describe(tensors: Mapping[str, Tensor]) -> str:
    """Size of an encoder in words, read from its shapes, e.g. "ViT-B/16 (width 768, depth 12, 197 positions)"."""
    shown = facts(tensors)
    letters = {(192, 12): "Ti", (384, 12): "S", (768, 12): "B", (1024, 24): "L", (1280, 32): "H", (1536, 40): "g"}
    letter = letters.get((shown["width"], shown["depth"]))
    name = f"ViT-{letter}/{shown['patch']}" if letter else f"a ViT, patch {shown['patch']}"
    return f"{name} (width {shown['width']}, depth {shown['depth']}, {shown['rows'] or 'no'} positions)"
