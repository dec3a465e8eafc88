"""Every tensor of a file is used or listed with a reason, every tensor of the encoder comes from the file or is new."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import ARCHITECTURE, backbone, decoder, own, save_pth, timm_model, timm_state
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from mae_bench.checkpoints.layouts import table_order
from mae_bench.checkpoints.load import (
    build_encoder,
    load_model,
    read_tensors,
    save_encoder,
    save_model,
    write_synthetic,
)
from mae_bench.encoders.patches import resample_kernel
from mae_bench.encoders.positions import resize, sincos_table
from mae_bench.encoders.vit import Encoder
from mae_bench.errors import UserError
from mae_bench.schema import Backbone


def fair_encoder(folder: Path) -> tuple[Path, Backbone, str, set[str]]:
    return save_pth(folder / "a.pth", timm_state()), backbone(), "FAIR MAE encoder", set()


def fair_full(folder: Path) -> tuple[Path, Backbone, str, set[str]]:
    path = save_pth(folder / "b.pth", timm_state() | decoder())
    return path, backbone(), "FAIR MAE encoder + decoder (full or visualize)", set(decoder())


def fair_training(folder: Path) -> tuple[Path, Backbone, str, set[str]]:
    """FAIR's own training checkpoint: `args` is an argparse.Namespace."""
    args = argparse.Namespace(model="mae_vit_base_patch16", output_dir=None, blr=1.5e-4)
    optimizer = {"state": {0: {"step": 1, "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    path = save_pth(folder / "c.pth", timm_state() | decoder(), optimizer=optimizer, epoch=3, scaler={}, args=args)
    return path, backbone(), "FAIR MAE encoder + decoder (full or visualize)", set(decoder())


def data_parallel(folder: Path) -> tuple[Path, Backbone, str, set[str]]:
    path = save_pth(folder / "d.pth", {f"module.{key}": value for key, value in timm_state().items()})
    return path, backbone(), "FAIR MAE encoder", set()


def bare_legacy(folder: Path) -> tuple[Path, Backbone, str, set[str]]:
    """No wrapper, in the format that torch wrote before 1.6."""
    torch.save(timm_state(), folder / "e.pth", _use_new_zipfile_serialization=False)
    return folder / "e.pth", backbone(), "FAIR MAE encoder", set()


def bare_safetensors(folder: Path) -> tuple[Path, Backbone, str, set[str]]:
    save_file(timm_state(), folder / "f.bin")  # the name says nothing
    return folder / "f.bin", backbone(), "FAIR MAE encoder", set()


def deit(folder: Path) -> tuple[Path, Backbone, str, set[str]]:
    path = save_pth(folder / "g.pth", timm_state(fixed_positions=False, classes=10))
    return path, backbone("vit_classifier"), "ViT classifier", {"head.weight", "head.bias"}


LAYOUTS: list[Callable[[Path], tuple[Path, Backbone, str, set[str]]]] = [
    fair_encoder,
    fair_full,
    fair_training,
    data_parallel,
    bare_legacy,
    bare_safetensors,
    deit,
    own,
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_features_of_timm(
    layout: Callable[[Path], tuple[Path, Backbone, str, set[str]]], tmp_path: Path
) -> None:
    path, recipe, name, unused = layout(tmp_path)
    encoder, report = build_encoder(recipe, path, seed=0)
    theirs = timm_model()
    state = timm_state(fixed_positions=False, classes=10) if name == "ViT classifier" else timm_state()
    theirs.load_state_dict({key: state[key] for key in theirs.state_dict()}, strict=True)
    images = torch.randn(2, 3, 20, 20)
    torch.testing.assert_close(encoder.eval().tokens(images), theirs.forward_features(images), atol=1e-5, rtol=1e-5)
    assert (report.layout, report.file, report.synthetic) == (name, path.name, False)
    assert report.matched == report.total == len(encoder.state_dict())
    assert set(report.unused) == unused
    assert all(report.unused.values())
    target = f"{recipe.weights.target}, " if recipe.weights.kind == "file" else ""
    assert report.line().startswith(
        f"loaded {report.total}/{report.total} encoder tensors ({name}, {target}unverified, sha256 "
    )
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()


@given(
    class_token=st.booleans(),
    final_norm=st.booleans(),
    side=st.sampled_from([(5, 5), (3, 7)]),
    patch=st.sampled_from([4, 6]),
    layer_scale=st.sampled_from([0.0, 0.1]),
    rel_pos=st.booleans(),
    full=st.booleans(),
)
@settings(max_examples=25)
def test_every_tensor_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory,
    class_token: bool,
    final_norm: bool,
    side: tuple[int, int],
    patch: int,
    layer_scale: float,
    rel_pos: bool,
    full: bool,
) -> None:
    path, recipe, _, _ = (fair_full if full else fair_encoder)(tmp_path_factory.mktemp("weights"))
    rel_pos_kind: Any = ("bias" if class_token else "decomposed") if rel_pos else "none"
    encoder, report = build_encoder(
        recipe,
        path,
        seed=0,
        class_token=class_token,
        final_norm=final_norm,
        grid=side,
        patch=patch,
        layer_scale=layer_scale,
        rel_pos=rel_pos_kind,
    )
    stored, _ = read_tensors(path)
    state = encoder.state_dict()
    assert set(stored) == (set(state) - set(report.new)) | set(report.unused)
    assert not set(state) & set(report.unused)
    assert set(report.new) == set(encoder.option_tensors())
    assert report.matched + len(report.new) == report.total == len(state)
    positions = stored["pos_embed"] if class_token else stored["pos_embed"][:, 1:]
    expected = {
        "pos_embed": resize(positions, (5, 5), side, int(class_token)),
        "patch_embed.proj.weight": resample_kernel(stored["patch_embed.proj.weight"], patch),
    }
    for key, value in state.items():
        if key in report.new:
            assert (value == (layer_scale if key.endswith("gamma") else 0.0)).all()
        else:
            assert torch.equal(value, expected.get(key, stored.get(key))), key
    said = " ".join(report.transforms)
    assert ("row of the class token" in said) == (not class_token)
    assert ("5x5 -> 3x7" in said) == (side != (5, 5))
    assert ("patch 4 -> 6" in said) == (patch == 6)
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in encoder.parameters())


def test_frozen_positions_stay_frozen_after_loading(tmp_path: Path) -> None:
    path, recipe, _, _ = fair_encoder(tmp_path)
    encoder, _ = build_encoder(recipe, path, seed=0, frozen_positions=True)
    assert [name for name, parameter in encoder.named_parameters() if not parameter.requires_grad] == ["pos_embed"]


def test_half_precision_is_widened_and_reported(tmp_path: Path) -> None:
    path = save_pth(tmp_path / "half.pth", {key: value.half() for key, value in timm_state().items()})
    encoder, report = build_encoder(backbone(), path, seed=0)
    assert report.transforms == ["float16 -> float32"]
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}


def test_the_prefix_is_reported(tmp_path: Path) -> None:
    path, recipe, _, _ = data_parallel(tmp_path)
    _, report = build_encoder(recipe, path, seed=0, final_norm=False)
    assert report.prefix == "module."
    assert set(report.unused) == {"module.norm.weight", "module.norm.bias"}


def test_scratch_is_random_and_says_so() -> None:
    encoder, report = build_encoder(backbone("none"), None, seed=5)
    again, _ = build_encoder(backbone("none"), None, seed=5)
    other, _ = build_encoder(backbone("none"), None, seed=6)
    key = "blocks.1.mlp.fc1.weight"
    assert torch.equal(encoder.state_dict()[key], again.state_dict()[key])
    assert not torch.equal(encoder.state_dict()[key], other.state_dict()[key])
    assert (report.matched, report.new) == (0, list(encoder.state_dict()))
    assert (
        report.line() == f"no weights loaded: all {report.total} encoder tensors are random (initialised from seed 5)"
    )


def test_scratch_and_weights_are_never_mixed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a weight file"):
        build_encoder(backbone(), None, seed=0)
    path, _, _, _ = fair_encoder(tmp_path)
    with pytest.raises(UserError, match="takes no weights"):
        build_encoder(backbone("none"), path, seed=0)


@pytest.mark.parametrize("kind", ["fair_mae", "vit_classifier", "made"])
def test_synthetic_files_go_through_the_loader_and_are_marked(kind: Any, tmp_path: Path) -> None:
    recipe = backbone(kind, **({} if kind == "made" else {"sha256": "0" * 64}))
    path = tmp_path / "meant.pth"  # the name that the recipe gives
    write_synthetic(path, recipe, seed=0)
    first = path.read_bytes()
    _, report = build_encoder(recipe, path, seed=0)
    assert report.synthetic
    assert "synthetic" in report.line()
    write_synthetic(path, recipe, seed=0)
    assert path.read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["meant.pth"]


def test_a_scratch_recipe_has_no_synthetic_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loads no encoder file"):
        write_synthetic(tmp_path / "x.pth", backbone("none"), seed=0)


def test_the_hash_of_the_recipes_own_file_is_verified(tmp_path: Path) -> None:
    from mae_bench.hashing import file_hash

    path = save_pth(tmp_path / "meant.pth", timm_state())
    sha256, md5 = file_hash(path), file_hash(path, "md5")
    for stated, verified in (
        ({"sha256": sha256}, "sha256"),
        ({"sha256": sha256[:8]}, "sha256 prefix"),
        ({"md5_prefix": md5[:6]}, "md5 prefix"),
        ({}, ""),
    ):
        _, report = build_encoder(backbone(**stated), path, seed=0)
        assert (report.verified, report.sha256) == (verified, sha256)
    other = path.rename(tmp_path / "own_copy.pth")  # given with --weights: unverified, and reported as such
    _, report = build_encoder(backbone(sha256="0" * 64), other, seed=0)
    assert report.verified == ""


def test_our_own_file_fits_a_recipe_of_published_weights(tmp_path: Path) -> None:
    path, _, _, _ = own(tmp_path)
    _, report = build_encoder(backbone(), path, seed=0)
    assert report.layout == "mae_bench encoder made by 'tiny_pretrain'"


def test_an_encoder_comes_back_bit_identical(tmp_path: Path) -> None:
    encoder = Encoder(ARCHITECTURE, final_norm=False)
    encoder.initialise(1)
    save_encoder(tmp_path / "deep" / "x.safetensors", encoder, {"seed": "1"})
    again, report = build_encoder(backbone("made"), tmp_path / "deep" / "x.safetensors", seed=0, final_norm=False)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in encoder.state_dict().items())
    assert report.unused == {}
    with pytest.raises(UserError, match=r"2 tensors that this task needs are not in the file, first norm\.weight"):
        build_encoder(backbone("made"), tmp_path / "deep" / "x.safetensors", seed=0)


@pytest.mark.parametrize("options", [{"layer_scale": 0.1}, {"class_token": False}, {"grid": (4, 5)}, {"patch": 2}])
def test_an_adapted_encoder_is_not_saved_as_a_plain_one(options: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_model"):
        save_encoder(tmp_path / "y.safetensors", Encoder(ARCHITECTURE, **options), {})


class _Model(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, classes)
        self.tied = self.head.weight  # shares memory with head.weight


def test_a_trained_model_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model, other = _Model(5), _Model(5)
    model.body(torch.randn(8, 4))  # moves the running statistics
    save_model(path, model.state_dict(), {"task": "tiny_linear", "backbone": "vit_t_mae", "classes": "[]"})
    metadata = load_model(other, path, {"task": "tiny_linear"})
    assert metadata == {"task": "tiny_linear", "backbone": "vit_t_mae", "classes": "[]"}
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_trained_model_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, _Model(5).state_dict(), {"task": "tiny_linear"})
    with pytest.raises(UserError, match=r"made with task = 'tiny_linear', this run has 'tiny_coco'"):
        load_model(_Model(5), path, {"task": "tiny_coco"})
    with pytest.raises(UserError, match=r"head.bias is torch.float32 5, this model has torch.float32 6"):
        load_model(_Model(6), path, {})
    state = load_file(path)
    del state["body.0.weight"]
    save_model(path, state, {})
    with pytest.raises(UserError, match=r"lacks 1 tensors of this model, first 'body.0.weight'"):
        load_model(_Model(5), path, {})
    save_model(path, _Model(5).state_dict() | {"extra": torch.zeros(1)}, {})
    with pytest.raises(UserError, match=r"has unexpected 1 tensors of this model, first 'extra'"):
        load_model(_Model(5), path, {})


def test_table_order() -> None:
    table = sincos_table(24, (5, 5), class_token=True)
    assert table_order(table) == "mae"
    assert table_order(table.half()) == "mae"
    assert table_order(torch.cat([table[..., 12:], table[..., :12]], dim=2)) == "exchanged"
    assert table_order(table + 0.001) == "other"
    assert table_order(table[:, 1:]) == "other"
    assert table_order(torch.zeros(3)) == "other"
