"""What is exported is what the real timm and the real transformers load, bit for bit; the rest is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import timm
import timm.data
import torch
import transformers
from checkpoint_files import backbone, decoder, save_pth, timm_state
from export_cases import (
    PLAIN,
    VARIANTS,
    check_hf,
    check_timm,
    close,
    images,
    in_hf,
    in_timm,
    made,
    ours,
    own_file,
    same,
    silence,
    variant,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import CASES
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from mae_bench.checkpoints.export import TARGETS, _timm_arguments, _timm_entry_point, export
from mae_bench.checkpoints.layouts import FORMAT
from mae_bench.checkpoints.load import build_encoder, save_model
from mae_bench.errors import UserError
from mae_bench.schema import Architecture, PublishedUse

PLAIN_FIELDS = {"patch", "width", "depth", "heads", "mlp_ratio", "image_size", "norm_eps", "positions"}


# FAIR


def test_a_fair_file_loads_as_fair_loads_it(tmp_path: Path) -> None:
    """main_finetune.py: with the mean of the patches exactly head and fc_norm are missing, and norm is left over."""
    (path,) = export(save_pth(tmp_path / "a.pth", timm_state() | decoder()), backbone(), "fair", tmp_path / "out")
    assert path == tmp_path / "out" / "small_fair_mae.pth"
    content = torch.load(path, weights_only=True)
    assert list(content) == ["model"]
    same(content["model"], timm_state())
    shape: dict[str, Any] = {"img_size": 20, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    pooled = VisionTransformer(**shape, num_classes=10, global_pool="avg").load_state_dict(
        content["model"], strict=False
    )
    assert set(pooled.missing_keys) == {"head.weight", "head.bias", "fc_norm.weight", "fc_norm.bias"}
    assert set(pooled.unexpected_keys) == {"norm.weight", "norm.bias"}
    probe = VisionTransformer(**shape, num_classes=10).load_state_dict(content["model"], strict=False)
    assert set(probe.missing_keys) == {"head.weight", "head.bias"} and not probe.unexpected_keys


@pytest.mark.parametrize(("layout", "positions"), [("fair_mae", "sincos"), ("vit", "learned")])
def test_a_fair_file_comes_back_bit_for_bit(layout: Any, positions: Any, tmp_path: Path) -> None:
    recipe = backbone("fair_mae", layout=layout)
    recipe = recipe.model_copy(update={"architecture": recipe.architecture.model_copy(update={"positions": positions})})
    source = save_pth(tmp_path / "a.pth", timm_state(fixed_positions=positions == "sincos"))
    (path,) = export(source, recipe, "fair", tmp_path / "out")
    (again,) = export(path, recipe, "fair", tmp_path / "again")
    one, other = (build_encoder(recipe, file, seed=0)[0].state_dict() for file in (source, path))
    same(dict(one), dict(other))
    assert again.read_bytes() == path.read_bytes()


# timm


@pytest.mark.parametrize("name", VARIANTS)
def test_timm_loads_every_variant_and_gives_our_features(name: str, tmp_path: Path) -> None:
    architecture = variant(name)
    check_timm(own_file(tmp_path / "e.safetensors", architecture), made(architecture), tmp_path / "out")


def test_timm_knows_what_the_weights_expect(tmp_path: Path) -> None:
    use = PublishedUse(crop=0.9, interpolation="bilinear", pool="cls", source="test")
    recipe = backbone().model_copy(update={"published": use})
    model = check_timm(save_pth(tmp_path / "a.pth", timm_state()), recipe, tmp_path / "out")
    cfg = model.pretrained_cfg
    assert {key: cfg[key] for key in ("num_classes", "pool_size", "license", "origin_url", "first_conv")} == {
        "num_classes": 0,
        "pool_size": None,
        "license": "cc-by-nc-4.0",
        "origin_url": "https://example.org/meant.pth",
        "first_conv": "patch_embed.proj",
    }
    data = timm.data.resolve_model_data_config(model)
    assert (data["input_size"], data["crop_pct"], data["interpolation"]) == ((3, 20, 20), 0.9, "bilinear")
    assert (list(data["mean"]), list(data["std"]), data["crop_mode"]) == ([0.5] * 3, [0.25] * 3, "center")
    picture = Image.new("RGB", (60, 40), (255, 0, 128))
    assert timm.data.create_transform(**data)(picture).shape == (3, 20, 20)


def test_timm_puts_a_new_head_on_an_export_and_takes_other_sizes(tmp_path: Path) -> None:
    export(save_pth(tmp_path / "a.pth", timm_state()), backbone(), "timm", tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=7, img_size=32)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)
    assert torch.equal(model.state_dict()["norm.weight"], timm_state()["norm.weight"])


@pytest.mark.parametrize(("width", "entry"), [(768, "vit_base_patch16_224"), (384, "vit_small_patch16_224")])
def test_the_entry_point_is_the_one_of_this_size(width: int, entry: str, tmp_path: Path) -> None:
    """With timm's own arguments the entry point builds the same names and shapes as the export's."""
    architecture = Architecture(patch=16, width=width, depth=12, heads=width // 64, image_size=224)
    assert _timm_entry_point(architecture) == entry
    with torch.device("meta"):
        theirs, exported = (
            timm.create_model(entry, num_classes=0),
            timm.create_model(entry, **_timm_arguments(architecture)),
        )
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (theirs, exported)]
    assert shapes[0] == shapes[1]


# Hugging Face


@pytest.mark.parametrize("eps", [1e-6, 1e-12])
@pytest.mark.parametrize("positions", ["sincos", "learned"])
def test_transformers_loads_an_export_and_gives_our_features(eps: float, positions: Any, tmp_path: Path) -> None:
    architecture = Architecture(
        **(PLAIN.model_dump() | {"norm_eps": eps, "positions": positions, "mlp_ratio": 31 / 24})
    )
    check_hf(own_file(tmp_path / "e.safetensors", architecture), made(architecture), tmp_path / "out")
    with silence("transformers"):
        model, told = transformers.AutoModel.from_pretrained(
            tmp_path / "out", add_pooling_layer=False, output_loading_info=True
        )
    assert not any(told.values()) and isinstance(model, transformers.ViTModel)
    assert model.layernorm.eps == model.layers[0].layernorm_before.eps == eps


def test_the_names_are_those_of_the_hub(tmp_path: Path) -> None:
    """transformers' own `save_pretrained` writes the same names and tensors as the export that it was loaded from."""
    export(save_pth(tmp_path / "a.pth", timm_state()), backbone(), "hf", tmp_path / "out")
    model = transformers.ViTModel.from_pretrained(tmp_path / "out", add_pooling_layer=False)
    model.save_pretrained(tmp_path / "theirs")
    same(load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors"))
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    mine = json.loads((tmp_path / "out" / "config.json").read_text())
    assert mine.items() <= theirs.items()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_processor_resizes_crops_and_normalises(tmp_path: Path) -> None:
    export(save_pth(tmp_path / "a.pth", timm_state()), backbone(), "hf", tmp_path / "out")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert (list(processor.image_mean), list(processor.image_std)) == ([0.5] * 3, [0.25] * 3)
    # 46 x 92 pixels, black but for the middle 46 x 46: the centre crop sees white alone, a squeezed picture would not.
    picture = Image.new("RGB", (92, 46))
    picture.paste((255, 255, 255), (23, 0, 69, 46))
    pixels = processor(picture, return_tensors="pt").pixel_values
    assert pixels.shape == (1, 3, 20, 20)
    close(pixels, torch.full_like(pixels, (1 - 0.5) / 0.25))


@pytest.mark.parametrize(("layout", "positions"), [("hf_vit_mae", "sincos"), ("hf_vit", "learned")])
def test_a_hugging_face_export_comes_back_bit_for_bit(layout: Any, positions: Any, tmp_path: Path) -> None:
    architecture = PLAIN.model_copy(update={"positions": positions})
    source = save_pth(tmp_path / "a.pth", timm_state(fixed_positions=positions == "sincos"))
    first, back = (
        backbone(layout=name).model_copy(update={"architecture": architecture})
        for name in ("fair_mae" if positions == "sincos" else "vit", layout)
    )
    export(source, first, "hf", tmp_path / "out")
    encoder, _ = build_encoder(back, tmp_path / "out" / "model.safetensors", seed=0)
    same(dict(encoder.state_dict()), timm_state(fixed_positions=positions == "sincos"))
    (path,) = export(tmp_path / "out" / "model.safetensors", back, "fair", tmp_path / "fair")
    same(torch.load(path, weights_only=True)["model"], timm_state(fixed_positions=positions == "sincos"))


# All targets


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("to", TARGETS)
def test_the_type_stays(to: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {name: value.to(dtype) for name, value in timm_state().items()}
    files = export(save_pth(tmp_path / "a.pth", stored), backbone(), to, tmp_path / "out")
    if to == "fair":
        same(torch.load(files[0], weights_only=True)["model"], stored)
        return
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {dtype}
    if to == "timm":
        same(tensors, stored)
    elif dtype != torch.float64:  # transformers computes in the type of the file
        model = transformers.ViTModel.from_pretrained(tmp_path / "out", add_pooling_layer=False)
        assert {value.dtype for value in model.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_class_token_that_takes_its_position_loses_no_digit(dtype: torch.dtype, tmp_path: Path) -> None:
    """The sum of two half precision numbers is none: it is kept in float32."""
    architecture = variant("registers")
    file = own_file(tmp_path / "e.safetensors", architecture)
    halves = {name: value.to(dtype) for name, value in load_file(file).items()}
    save_model(file, halves, {"format": FORMAT, "architecture": architecture.model_dump_json()})
    export(file, made(architecture), "timm", tmp_path / "out")
    _, tokens = ours(file, made(architecture))
    with torch.no_grad():
        close(in_timm(tmp_path / "out").forward_features(images()), tokens)


@pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_any_layout_goes_in_and_the_originals_features_come_out(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    architecture = case.backbone.architecture
    pictures = images(architecture)
    with torch.no_grad():
        theirs = case.features(pictures)
    for to, target in TARGETS.items():
        if target.refusal(architecture):
            with pytest.raises(UserError, match="cannot be written for"):
                export(case.path, case.backbone, to, tmp_path / to)
        else:
            export(case.path, case.backbone, to, tmp_path / to)
    features = {}
    with torch.no_grad():
        if (tmp_path / "timm").exists():
            features["timm"] = in_timm(tmp_path / "timm").forward_features(pictures)
        if (tmp_path / "hf").exists():
            features["hf"] = in_hf(tmp_path / "hf")(pictures).last_hidden_state
    assert features or architecture.rel_pos != "none"
    for found in features.values():
        close(found[:, -theirs.shape[1] :], theirs)  # mmsegmentation's maps lack the class token


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    heads, channels = draw(st.integers(1, 3)), draw(st.sampled_from([4, 8]))
    patch, class_token, mlp = draw(st.integers(2, 5)), draw(st.booleans()), draw(st.sampled_from(["gelu", "swiglu"]))
    width = heads * channels
    return Architecture(
        patch=patch,
        width=width,
        depth=draw(st.integers(1, 2)),
        heads=heads,
        mlp_ratio=draw(st.integers(3, 5 * width)) / width,
        image_size=patch * draw(st.integers(1, 4)),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        positions=draw(st.sampled_from(["sincos", "learned"])),
        resize=draw(st.sampled_from(["fair", "dinov2"])),
        class_token=class_token,
        class_position=draw(st.booleans()),
        registers=draw(st.integers(0, 2)) if class_token else 0,
        mlp=mlp,
        layer_scale=draw(st.booleans()),
        final_norm=draw(st.sampled_from(["tokens", "pooled", "none"])),
    )


@given(
    architecture=architectures()
    | st.builds(lambda a: Architecture(**a.model_dump(include=PLAIN_FIELDS)), architectures())
)
@settings(max_examples=25)
def test_an_architecture_is_written_exactly_or_refused(architecture: Architecture) -> None:
    recipe = made(architecture)
    with TemporaryDirectory() as name:
        folder = Path(name)
        file = own_file(folder / "e.safetensors", architecture)
        if TARGETS["timm"].refusal(architecture):
            assert architecture.norm_eps != 1e-6
        else:
            check_timm(file, recipe, folder / "timm")
        if TARGETS["hf"].refusal(architecture):
            assert not architecture.plain
        else:
            check_hf(file, recipe, folder / "hf")
        if not TARGETS["fair"].refusal(architecture):
            (path,) = export(file, recipe, "fair", folder / "fair")
            same(torch.load(path, weights_only=True)["model"], load_file(file))
