"""Backbone recipes against the publishers' own statements, typed here by hand, and against the installed timm."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import LayerScale
from torch.hub import HASH_REGEX
from transformers import ViTMAEConfig

from mae_bench.errors import UserError
from mae_bench.recipes import index, load_backbone
from mae_bench.schema import Architecture, Backbone, FileWeights, MadeWeights, NoWeights

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(index("backbone"))
FILES = [name for name in NAMES if isinstance(load_backbone(name).weights, FileWeights)]

# Folder, which is the initialisation -> kinds (what a name says after its size) -> sizes.
FAMILIES = {
    "mae": {"mae": "tblh", "mae_pixel": "blh", "mae_hf": "blh"},
    "scratch": {"scratch": "tsblh"},
    "supervised": {"supervised": "tsblh", "deit3": "blh", "deit3_in21k": "bl", "augreg": "bl"},
    "moco_v3": {"moco_v3": "sb"},
    "dino": {"dino": "sb"},
    "dinov2": {"dinov2": "sbl", "dinov2_registers": "sbl"},
    "beit": {"beit": "bl"},
    "beit_v2": {"beit_v2": "bl"},
}
# Width, depth, heads, patch. ViT, arXiv 2010.11929, Table 1, with MAE's patches; S: DeiT, arXiv 2012.12877, Table 1.
SHAPES = {"s": (384, 12, 6, 16), "b": (768, 12, 12, 16), "l": (1024, 24, 16, 16), "h": (1280, 32, 16, 14)}
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
HALVES = {"vit_b_augreg", "vit_l_augreg", "vit_b_beit", "vit_l_beit"}  # BEiT v2 has ImageNet's
LEARNED = {"supervised", "deit3", "deit3_in21k", "augreg", "dino", "dinov2", "dinov2_registers"}
# What makes a kind more than a plain ViT.
DEIT3 = {"class_position": False, "layer_scale": True}
FEATURES: dict[str, dict[str, Any]] = {
    "deit3": DEIT3,
    "deit3_in21k": DEIT3,
    "augreg": {"resize": "timm"},
    "dino": {"resize": "dino"},
    "dinov2": {"resize": "dinov2", "layer_scale": True},
    "dinov2_registers": {"resize": "dinov2_registers", "layer_scale": True, "registers": 4},
    "beit": DEIT3 | {"rel_pos": "bias"},
    "beit_v2": DEIT3 | {"rel_pos": "bias"},
}
# Layout, licence, target, epochs (0: not said) and data of the files.
FAIR_NC, APACHE, MIT = "CC-BY-NC-4.0", "Apache-2.0", "MIT"
IN1K, LABELS, IN21K = "ImageNet-1K", "ImageNet-1K with labels", "ImageNet-21K with labels, then ImageNet-1K with labels"
WEIGHTS = {
    "mae": ("fair_mae", FAIR_NC, "norm_pix", 1600, IN1K),
    "mae_pixel": ("fair_mae", FAIR_NC, "pixel", 0, IN1K),
    "mae_hf": ("hf_vit_mae", FAIR_NC, "pixel", 0, IN1K),
    "supervised": ("vit_classifier", APACHE, "labels", 300, LABELS),
    "deit3": ("deit3", APACHE, "labels", 800, LABELS),
    "deit3_in21k": ("deit3", APACHE, "labels", 240, IN21K),
    "augreg": ("augreg", APACHE, "labels", 300, IN21K),
    "moco_v3": ("moco_v3", FAIR_NC, "contrastive", 300, IN1K),
    "dino": ("vit", APACHE, "self_distillation", 800, IN1K),
    "dinov2": ("dinov2", APACHE, "self_distillation", 0, "LVD-142M"),
    "dinov2_registers": ("dinov2", APACHE, "self_distillation", 0, "LVD-142M"),
    "beit": ("beit", MIT, "visual_tokens", 150, "ImageNet-22K; DALL-E's tokenizer"),
    "beit_v2": ("beit", MIT, "visual_tokens", 1600, "ImageNet-1K; tokenizer taught by CLIP"),
}
OTHER_EPOCHS = {"vit_b_dino": 400, "vit_l_beit": 0}
# All that is published of hashes: FAIR's md5 digits, torch.hub's digits in a name, the hub's LFS pointers, and two
# copies of each of DINOv2's files. Everything else is unverified, and a record says so.
HASHES = {
    "vit_b_mae": "8cad7c",
    "vit_l_mae": "b8b06e",
    "vit_h_mae": "9bdbb0",
    "vit_s_supervised": "cd65a155",
    "vit_b_supervised": "b5f2ef4d",
    "vit_b_mae_hf": "6748bebd304601d36283b156ab4f9212258a8aed3745beb2e2b7bc55a1992d99",
    "vit_l_mae_hf": "28a019bd1842a7bdea1cfa9bb390047ad3fab82032cea2045873ca0399ca5a84",
    "vit_h_mae_hf": "89404c28ea8289eaf371f926b9b947738e58135c4e094c2402b033c794414a68",
    "vit_s_dinov2": "b938bf1bc15cd2ec0feacfe3a1bb553fe8ea9ca46a7e1d8d00217f29aef60cd9",
    "vit_b_dinov2": "0b8b82f85de91b424aded121c7e1dcc2b7bc6d0adeea651bf73a13307fad8c73",
    "vit_l_dinov2": "d5383ea8f4877b2472eb973e0fd72d557c7da5d3611bd527ceeb1d7162cbf428",
}
# timm's name of the same weights; of BEiT it has the same architecture and statistics after fine-tuning only.
TIMM = {
    "vit_b_mae": "vit_base_patch16_224.mae",
    "vit_l_mae": "vit_large_patch16_224.mae",
    "vit_h_mae": "vit_huge_patch14_224.mae",
    "vit_s_supervised": "deit_small_patch16_224.fb_in1k",
    "vit_b_supervised": "deit_base_patch16_224.fb_in1k",
    "vit_b_deit3": "deit3_base_patch16_224.fb_in1k",
    "vit_l_deit3": "deit3_large_patch16_224.fb_in1k",
    "vit_h_deit3": "deit3_huge_patch14_224.fb_in1k",
    "vit_b_deit3_in21k": "deit3_base_patch16_224.fb_in22k_ft_in1k",
    "vit_l_deit3_in21k": "deit3_large_patch16_224.fb_in22k_ft_in1k",
    "vit_b_augreg": "vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit_l_augreg": "vit_large_patch16_224.augreg_in21k_ft_in1k",
    "vit_s_dino": "vit_small_patch16_224.dino",
    "vit_b_dino": "vit_base_patch16_224.dino",
    **{f"vit_{w[0]}_dinov2": f"vit_{w}_patch14_dinov2.lvd142m" for w in ("small", "base", "large")},
    **{f"vit_{w[0]}_dinov2_registers": f"vit_{w}_patch14_reg4_dinov2.lvd142m" for w in ("small", "base", "large")},
    "vit_b_beit": "beit_base_patch16_224.in22k_ft_in22k",
    "vit_l_beit": "beit_large_patch16_224.in22k_ft_in22k",
    "vit_b_beit_v2": "beitv2_base_patch16_224.in1k_ft_in1k",
    "vit_l_beit_v2": "beitv2_large_patch16_224.in1k_ft_in1k",
}


def _kind(name: str) -> str:
    return name.split("_", 2)[2]


def _file(name: str) -> FileWeights:
    weights = load_backbone(name).weights
    assert isinstance(weights, FileWeights)
    return weights


def test_the_backbones_are_these() -> None:
    expected = {f"vit_{s}_{kind}": init for init, kinds in FAMILIES.items() for kind in kinds for s in kinds[kind]}
    assert {name: index("backbone")[name].parent.name for name in NAMES} == expected
    assert {name: load_backbone(name).init for name in NAMES} == expected


@pytest.mark.parametrize("name", NAMES)
def test_architecture_and_input(name: str) -> None:
    backbone, kind = load_backbone(name), _kind(name)
    shape = backbone.architecture
    assert backbone.size == name.split("_")[1]
    assert (backbone.input.mean, backbone.input.std) == (HALF if name in HALVES else IMAGENET)
    if backbone.size in SHAPES:
        width, depth, heads, patch = SHAPES[backbone.size]
        patch, side = (14, 518) if backbone.init == "dinov2" else (patch, 224)
        heads = 12 if name == "vit_s_moco_v3" else heads  # its vits.py, and its README's note 2
        assert (shape.width, shape.depth, shape.heads, shape.patch) == (width, depth, heads, patch)
        assert shape.image_size == side
        positions = "none" if shape.rel_pos == "bias" else "learned" if kind in LEARNED else "sincos"
        assert shape.positions == positions
    assert shape.norm_eps == (ViTMAEConfig().layer_norm_eps if kind == "mae_hf" else 1e-6)
    assert {key: value for key, value in shape.model_dump().items() if key in shape.FEATURES} == FEATURES.get(kind, {})


@pytest.mark.parametrize("name", FILES)
def test_weights(name: str) -> None:
    weights = _file(name)
    layout, licence, target, epochs, data = WEIGHTS[_kind(name)]
    assert (weights.layout, weights.licence, weights.target) == (layout, licence, target)
    assert (weights.pretrain_data, weights.pretrain_epochs) == (data, OTHER_EPOCHS.get(name, epochs))
    assert weights.sha256 + weights.md5_prefix == HASHES.get(name, "")
    assert re.search(r"arXiv \d{4}\.\d{5}|\w+/[\w-]+@[0-9a-f]{7}", weights.source)
    if weights.url.startswith("hf://"):  # a commit, so that the address always gives the bytes that the hash is of
        assert re.fullmatch(r"hf://facebook/vit-mae-(base|large|huge)@[0-9a-f]{40}/pytorch_model\.bin", weights.url)
    else:
        assert weights.url.startswith("https://") and weights.url.endswith(f"/{weights.file}")
    if 0 < len(weights.sha256) < 64:  # digits in a file's name are a hash where torch.hub would check them
        found = HASH_REGEX.search(weights.file)
        assert found and found.group(1) == weights.sha256


def test_no_two_recipes_mean_the_same_file() -> None:
    assert len({_file(name).file for name in FILES}) == len({_file(name).url for name in FILES}) == len(FILES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FILES])
def test_what_has_no_file(name: str) -> None:
    backbone = load_backbone(name)
    if backbone.init == "scratch" or backbone.refused:
        assert isinstance(backbone.weights, NoWeights)
    else:
        assert isinstance(backbone.weights, MadeWeights)
        assert backbone.weights.task == {"mae": "tiny_pretrain", "supervised": "tiny_supervised"}[backbone.init]


def test_the_tiny_ones_and_the_baselines_differ_in_their_weights_alone() -> None:
    tiny = [load_backbone(f"vit_t_{init}").architecture for init in ("mae", "supervised", "scratch")]
    assert tiny[0] == tiny[1] == tiny[2]
    for size in "blh":
        mae, pixel, scratch = (load_backbone(f"vit_{size}_{kind}") for kind in ("mae", "mae_pixel", "scratch"))
        assert mae.architecture == pixel.architecture == scratch.architecture


def test_only_the_unnamed_supervised_ones_are_refused_and_what_to_name() -> None:
    refused = {name: load_backbone(name).refused for name in NAMES if load_backbone(name).refused}
    assert set(refused) == {"vit_l_supervised", "vit_h_supervised"}
    for name, reason in refused.items():
        assert "ImageNet-1K labels alone" in reason and "\n" not in reason
        named = set(re.findall(r"vit_\w+", reason))
        assert named <= set(NAMES) - set(refused)
        assert {f"{name[:6]}deit3", f"{name[:6]}scratch", "vit_l_augreg"} <= named


@pytest.mark.parametrize("name", TIMM)
def test_timm_states_the_same(name: str) -> None:
    backbone, stated = load_backbone(name), timm.get_pretrained_cfg(TIMM[name])
    assert stated is not None and backbone.published is not None
    assert (tuple(backbone.input.mean), tuple(backbone.input.std)) == (stated.mean, stated.std)
    assert stated.input_size == (3, backbone.architecture.image_size, backbone.architecture.image_size)
    assert backbone.published.interpolation == stated.interpolation
    if stated.url:  # BEiT's files are converted, and carry timm's licence
        assert (_file(name).url, _file(name).licence.lower()) == (stated.url, stated.license)
    # Crops are the publishers' own (0.875, DeiT III 1.0); timm's is meant where no other evaluation is published.
    if "pytorch-image-models" in backbone.published.source:
        assert backbone.published.crop == stated.crop_pct


@pytest.mark.parametrize("name", TIMM)
def test_timm_builds_the_same(name: str) -> None:
    shape = load_backbone(name).architecture
    with torch.device("meta"):
        model: Any = timm.create_model(TIMM[name])
    block, table = model.blocks[0], model.pos_embed
    assert (model.embed_dim, len(model.blocks), block.attn.num_heads) == (shape.width, shape.depth, shape.heads)
    assert model.patch_embed.patch_size == (shape.patch, shape.patch)
    assert model.patch_embed.img_size == (shape.image_size, shape.image_size)
    assert block.mlp.fc1.out_features == shape.mlp_ratio * shape.width
    assert block.norm1.eps == shape.norm_eps
    assert getattr(model, "num_reg_tokens", 0) == shape.registers
    scaled = isinstance(getattr(block, "ls1", None), LayerScale) or getattr(block, "gamma_1", None) is not None
    assert scaled == shape.layer_scale
    assert (getattr(block.attn, "relative_position_bias_table", None) is not None) == (shape.rel_pos == "bias")
    # Where there are registers, timm adds the class token's row of the file to the class token.
    rows = None if shape.positions == "none" else shape.grid**2 + (shape.class_position and not shape.registers)
    assert (None if table is None else table.shape[1]) == rows


NUMBER = re.compile(r"([\w.-]+\.csv): ([^;]+); (.+); (\w+) = ([\d.]+)")
METHODS = {
    "mae": "MAE",
    "supervised": "Supervised DeiT",
    "moco_v3": "MoCo v3",
    "dino": "DINO",
    "dinov2": "DINOv2",
    "dinov2_registers": "DINOv2",
    "beit": "BEiT",
    "beit_v2": "BEiT v2",
}


def _is_of(row: dict[str, str], backbone: Backbone) -> bool:
    """Whether a published row speaks of this backbone: its method, size, patch and registers."""
    shape, kind = backbone.architecture, _kind(backbone.name)
    if row["method"].startswith("timm:"):
        return row["method"] == f"timm:{TIMM[backbone.name]}"
    registers = "-reg4" if shape.registers else ""
    sizes = {f"{word}-{backbone.size.upper()}/{shape.patch}{registers}" for word in ("ViT", "DeiT")}
    return row["method"] == METHODS.get(kind) and row["backbone"] in sizes and row["ours"] in ("", backbone.name)


@pytest.mark.parametrize("name", [name for name in FILES if load_backbone(name).published])
def test_published_numbers_stand_in_the_published_files(name: str) -> None:
    backbone = load_backbone(name)
    assert backbone.published is not None
    for stated in backbone.published.numbers:
        parts = NUMBER.fullmatch(stated)
        assert parts, f"{stated}: expected 'file.csv: task; protocol; metric = value'"
        file, *key, value = parts.groups()
        with (ROOT / "results" / "published" / file).open(newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.DictReader(stream) if [row["task"], row["protocol"], row["metric"]] == key]
        (row,) = (row for row in rows if _is_of(row, backbone))
        assert float(row["value"]) == float(value) and row["verified"] == "true", stated


def test_who_has_no_published_numbers() -> None:
    """Weights that nobody evaluated in print, as far as our files go."""
    without = {name for name in FILES if not ((use := load_backbone(name).published) and use.numbers)}
    unevaluated = {f"vit_{size}_{kind}" for size in "blh" for kind in ("mae_pixel", "mae_hf")}
    assert without == unevaluated | {"vit_h_deit3"}


def _line(backbone: Backbone) -> str:
    """The backbone's line in docs/backbones.md."""
    weights = backbone.weights
    cells = ["–"] * 5
    if isinstance(weights, FileWeights):
        digits = {0: "–", 8: "sha256, 8 digits", 64: "sha256, whole"}[len(weights.sha256)]
        epochs, how = str(weights.pretrain_epochs or "not said"), "md5, 6 digits" if weights.md5_prefix else digits
        cells = [weights.pretrain_data, weights.target, epochs, weights.licence, how]
    elif isinstance(weights, MadeWeights):
        cells[0] = f"made here by `{weights.task}`"
    elif backbone.refused:
        cells[0] = "refused: named by recipe"
    return f"| `{backbone.name}` | {' | '.join(cells)} |"


def test_the_page_of_backbones_has_a_true_line_for_each() -> None:
    page = (ROOT / "docs" / "backbones.md").read_text(encoding="utf-8")
    found = [line for line in page.splitlines() if line.startswith("| `vit_")]
    assert sorted(found) == sorted(_line(load_backbone(name)) for name in NAMES)


def test_features_at_their_default_change_no_dump() -> None:
    """Hashes of recipes that were there before a feature stay what they were."""
    shape = load_backbone("vit_t_mae").architecture
    assert not shape.FEATURES & shape.model_dump().keys()
    assert Architecture.model_validate(shape.model_dump() | {"registers": 0, "resize": "fair"}) == shape


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("width = 768", "widht = 768"), "unknown key 'architecture.widht' (did you mean 'width'?)"),
        (("patch = 16", "patch = 15"), "image_size 224 is not a multiple of patch 15"),
        (("heads = 12", "heads = 7"), "width 768 is not a multiple of heads 7"),
        (('layout = "fair_mae"', 'layout = "fairmae"'), "weights.layout"),
        (('md5_prefix = "8cad7c"', 'md5_prefix = "8CAD7Z"'), "md5_prefix"),
        (('url = "https://', 'url = "ftp://'), "weights.url"),
        (("width = 768", 'width = "768"'), "architecture.width"),
        (('pool = "mean"', 'pool = "max"'), "published.pool"),
        (('name = "vit_b_mae"', 'name = "vit_b"'), "differs from the file's name"),
        (("[input]", "[input"), "is not valid TOML"),
    ],
)
def test_a_wrong_backbone_is_named(edit: tuple[str, str], expected: str, tmp_path: Path) -> None:
    text = index("backbone")["vit_b_mae"].read_text()
    assert text.count(edit[0]) == 1
    path = tmp_path / "vit_b_mae.toml"
    path.write_text(text.replace(*edit))
    with pytest.raises(UserError) as caught:
        load_backbone(str(path))
    message = str(caught.value)
    assert expected in message and str(path) in message and "\n" not in message
