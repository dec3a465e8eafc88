"""Backbone recipes against ViT's Table 1 and the publishers' own statements."""

from __future__ import annotations

from pathlib import Path

import pytest

from mae_bench.errors import UserError
from mae_bench.recipes import index, load_backbone
from mae_bench.schema import FileWeights, MadeWeights, NoWeights

# ViT, arXiv 2010.11929, Table 1, with the patches that MAE uses: patch, width, depth, heads, image size.
SHAPES = {"b": (16, 768, 12, 12, 224), "l": (16, 1024, 24, 16, 224), "h": (14, 1280, 32, 16, 224)}
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def test_every_size_and_initialisation_has_a_name() -> None:
    assert set(index("backbone")) == {f"vit_{s}_{i}" for s in "tblh" for i in ("mae", "supervised", "scratch")}


@pytest.mark.parametrize("name", sorted(index("backbone")))
def test_backbone(name: str) -> None:
    backbone = load_backbone(name)
    _, size, init = name.split("_")
    assert (backbone.size, backbone.init) == (size, init)
    assert index("backbone")[name].parent.name == init
    assert (backbone.input.mean, backbone.input.std) == IMAGENET
    shape = backbone.architecture
    if size in SHAPES:
        assert (shape.patch, shape.width, shape.depth, shape.heads, shape.image_size) == SHAPES[size]
    assert shape.norm_eps == 1e-6
    assert (shape.positions == "learned") == (init == "supervised" and size != "t")


def test_the_three_tiny_ones_differ_in_their_weights_alone() -> None:
    shapes = [load_backbone(f"vit_t_{init}").architecture for init in ("mae", "supervised", "scratch")]
    assert shapes[0] == shapes[1] == shapes[2]
    makers = [load_backbone(f"vit_t_{init}").weights for init in ("mae", "supervised")]
    assert all(isinstance(maker, MadeWeights) for maker in makers)
    assert [maker.task for maker in makers if isinstance(maker, MadeWeights)] == ["tiny_pretrain", "tiny_supervised"]


@pytest.mark.parametrize(
    ("name", "file", "digits"),
    [
        ("vit_b_mae", "mae_pretrain_vit_base.pth", "8cad7c"),
        ("vit_l_mae", "mae_pretrain_vit_large.pth", "b8b06e"),
        ("vit_h_mae", "mae_pretrain_vit_huge.pth", "9bdbb0"),
    ],
)
def test_fair_weights(name: str, file: str, digits: str) -> None:
    weights = load_backbone(name).weights
    assert isinstance(weights, FileWeights)
    assert weights.url == f"https://dl.fbaipublicfiles.com/mae/pretrain/{file}"
    assert (weights.file, weights.md5_prefix, weights.layout) == (file, digits, "fair_mae")
    assert (weights.licence, weights.target, weights.pretrain_epochs) == ("CC-BY-NC-4.0", "norm_pix", 1600)


def test_deit_weights() -> None:
    weights = load_backbone("vit_b_supervised").weights
    assert isinstance(weights, FileWeights)
    assert weights.file == "deit_base_patch16_224-b5f2ef4d.pth"
    assert (weights.sha256, weights.layout, weights.licence) == ("b5f2ef4d", "vit_classifier", "Apache-2.0")


@pytest.mark.parametrize("size", "tblh")
def test_scratch_has_no_weights(size: str) -> None:
    assert isinstance(load_backbone(f"vit_{size}_scratch").weights, NoWeights)


def test_only_the_unpublished_supervised_ones_are_refused_and_why() -> None:
    refused = {name: load_backbone(name).refused for name in index("backbone")}
    assert {name for name, reason in refused.items() if reason} == {"vit_l_supervised", "vit_h_supervised"}
    for name in ("vit_l_supervised", "vit_h_supervised"):
        assert "ImageNet-1K labels alone" in refused[name]
        assert "\n" not in refused[name]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("width = 768", "widht = 768"), "unknown key 'architecture.widht' (did you mean 'width'?)"),
        (("patch = 16", "patch = 15"), "image_size 224 is not a multiple of patch 15"),
        (("heads = 12", "heads = 7"), "width 768 is not a multiple of heads 7"),
        (('layout = "fair_mae"', 'layout = "fairmae"'), "weights.file.layout"),
        (('md5_prefix = "8cad7c"', 'md5_prefix = "8CAD7Z"'), "md5_prefix"),
        (("width = 768", 'width = "768"'), "architecture.width"),
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
