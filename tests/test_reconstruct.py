"""Pictures from files with a decoder: FAIR's, transformers' and our own, equal to transformers; and all refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_pretraining_mae import STATISTICS, build, perturbed, transformers_twin, values
from torch import Tensor, nn

from mae_bench import recipes, reconstruct, runs
from mae_bench.checkpoints.save import save_encoder, save_model
from mae_bench.data.sources import Files
from mae_bench.encoders.vit import random_encoder
from mae_bench.engine.job import Options
from mae_bench.errors import UserError
from mae_bench.pretraining.images import Pictures, ValidationSamples
from mae_bench.pretraining.mae import MaskedAutoencoder
from mae_bench.pretraining.objectives import build_model
from mae_bench.pretraining.pictures import LEAK
from mae_bench.pretraining.pictures import reconstruct as reconstructed
from mae_bench.schema import PretrainingValues

RECIPE = """
name = "{name}"
size = "t"
init = "mae"
summary = "a small one"
[architecture]
patch = 4
width = 48
depth = 3
heads = 3
image_size = 24
norm_eps = {eps}
[input]
mean = [0.48, 0.45, 0.40]
std = [0.23, 0.22, 0.225]
[weights]
kind = "file"
file = "{file}"
layout = "{layout}"
url = "https://example.org/pretrain/{file}"
licence = "MIT"
target = "{target}"
pretrain_data = "made pictures"
pretrain_epochs = 1
source = "test"
"""


def recipe(folder: Path, layout: str = "fair_mae", target: str = "norm_pix", eps: float = 1e-6, **changes: str) -> str:
    given = {"name": "small", "file": "meant.pth"} | changes
    path = folder / f"{given['name']}.toml"
    path.write_text(RECIPE.format(layout=layout, target=target, eps=eps, **given))
    return str(path)


def model(norm_pix: bool = True, **changes: object) -> MaskedAutoencoder:
    """Weights at which nothing is zero or one, and a decoder table that nobody would compute."""
    made = perturbed(build(norm_pix=norm_pix, **changes))
    with torch.no_grad():
        made.decoder_pos_embed.add_(
            torch.randn(made.decoder_pos_embed.shape, generator=torch.Generator().manual_seed(1))
        )
    return made.eval()


def fair(path: Path, mae: MaskedAutoencoder) -> Path:
    """FAIR's `_full` and `mae_visualize` files: the encoder's names without a prefix, the decoder's beside them."""
    torch.save({"model": {key.removeprefix("encoder."): value for key, value in mae.state_dict().items()}}, path)
    return path


def hub_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As facebook/vit-mae-base has them; version 5 of transformers saves the decoder's blocks under another name."""
    renamed = {key.replace("decoder.decoder_encoder.layer.", "decoder.decoder_layers."): state[key] for key in state}
    assert "decoder.decoder_layers.1.attention.attention.query.weight" in renamed
    return renamed


def hugging_face(folder: Path, mae: MaskedAutoencoder, names: str = "saved") -> Path:
    twin = transformers_twin(mae)
    if names == "module":
        torch.save(twin.state_dict(), folder / "module.bin")
        return folder / "module.bin"
    twin.save_pretrained(folder)
    path = folder / "model.safetensors"
    if names == "hub":
        save_file(hub_names(load_file(path)), path)
    return path


def own(path: Path, mae: MaskedAutoencoder, stated: PretrainingValues, **metadata: str) -> Path:
    given = {
        "engine": "pretraining",
        "backbone": "small",
        "protocol": "p@1",
        "architecture": mae.encoder.architecture.model_dump_json(),
        "input": STATISTICS.model_dump_json(),
        "values": stated.model_dump_json(),
    }
    save_model(path, mae.state_dict(), given | metadata)
    return path


def photo(path: Path, size: tuple[int, int] = (40, 30), seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (5, 3, 24, 24), dtype=torch.uint8, generator=generator)
    return images, torch.rand(5, 36, generator=generator)


@pytest.mark.parametrize("norm_pix", [False, True])
@pytest.mark.parametrize("names", ["fair", "saved", "hub", "module"])
def test_losses_and_pixels_equal_transformers(names: str, norm_pix: bool, tmp_path: Path) -> None:
    mae = model(norm_pix)
    twin = transformers_twin(mae)
    file = fair(tmp_path / "full.pth", mae) if names == "fair" else hugging_face(tmp_path, mae, names)
    layout = "fair_mae" if names == "fair" else "hf_vit_mae"
    backbone = recipes.load_backbone(recipe(tmp_path, layout, "norm_pix" if norm_pix else "pixel"))
    images, noise = samples()
    loaded = reconstruct.load_mae(backbone, file).model.eval()
    data = loaded.data_preprocessor({"inputs": images, "data_samples": noise})
    with torch.no_grad():
        theirs = twin(data["inputs"], noise=noise)
        torch.testing.assert_close(loaded(**data), theirs.logits, rtol=0, atol=1e-5)
    shown = reconstructed(loaded, images, noise)
    assert shown.error == pytest.approx(theirs.loss.item(), abs=1e-5)
    each = [twin(data["inputs"][i : i + 1], noise=noise[i : i + 1]).loss.item() for i in range(len(images))]
    assert shown.errors == pytest.approx(each, abs=1e-5)


def test_the_recipes_epsilon_is_the_decoders_too(tmp_path: Path) -> None:
    """transformers has one for all norms; at 1e-2 nobody could overlook another one."""
    mae = model()
    twin = transformers_twin(mae)
    for module in twin.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-2
    loaded = reconstruct.load_mae(
        recipes.load_backbone(recipe(tmp_path, "hf_vit_mae", eps=1e-2)), hugging_face(tmp_path, mae)
    ).model.eval()
    images, noise = samples()
    data = loaded.data_preprocessor({"inputs": images, "data_samples": noise})
    torch.testing.assert_close(loaded(**data), twin(data["inputs"], noise=noise).logits, rtol=0, atol=1e-5)


VARIANTS = [
    {},
    {"norm_pix": False},
    {"mask_tokens": "encoder"},
    {"decoder": "cross", "predict": 0.5},
    {"loss_on": "all", "decoder_depth": 0},
    {"sampling": "block", "height": 32, "width": 16},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_our_own_files_say_their_values_themselves(changes: dict[str, Any], tmp_path: Path) -> None:
    stated = values(**changes)
    backbone = recipes.load_backbone(recipe(tmp_path))
    grid = (8, 4) if "height" in changes else (6, 6)
    mae = build_model(random_encoder(backbone.architecture, 0, grid=grid), STATISTICS, stated, 0).eval()
    loaded = reconstruct.load_mae(backbone, own(tmp_path / "mae.safetensors", mae, stated))
    assert loaded.values == stated
    images, noise = torch.randn(2, 3, 4 * grid[0], 4 * grid[1]), torch.rand(2, grid[0] * grid[1])
    assert torch.equal(loaded.model.eval()(images, noise), mae(images, noise))
    report = reconstruct.run(
        str(tmp_path / "small.toml"), [photo(tmp_path / "a.png")], weights=tmp_path / "mae.safetensors",
        out=tmp_path / "grid.png",
    )  # fmt: skip
    assert "as the file says" in report
    assert (tmp_path / "grid.png").is_file()


def test_a_file_of_a_real_run(tmp_path: Path) -> None:
    """What `pretrain` leaves is what `reconstruct` takes: values other than the recipe's included."""
    (run,) = runs.pretrain(
        "vit_t_mae", settings=["decoder_heads=2"], options=Options(smoke=True, out=tmp_path, quiet=True)
    )
    report = reconstruct.run(
        "vit_t_mae", [photo(tmp_path / "a.png")], weights=run.folder / "mae.safetensors", out=tmp_path / "grid.png"
    )
    assert "2 heads" in report and "a smoke run" in report
    with pytest.raises(UserError, match=r"no decoder that predicts pictures; give the mae\.safetensors"):
        reconstruct.load_mae(recipes.load_backbone("vit_t_mae"), run.folder / "encoder.safetensors")


def test_the_report_and_the_grid(tmp_path: Path) -> None:
    file = fair(tmp_path / "full.pth", model())
    names = [photo(tmp_path / f"{name}.png", seed=seed) for seed, name in enumerate(["one", "two\n\x1b[31m"])]
    out = tmp_path / "made" / "grid.png"
    report = reconstruct.run(recipe(tmp_path), names, weights=file, mask_ratio=0.5, seed=4, out=out)
    lines = report.splitlines()
    assert lines[0] == "small"
    assert "loaded 42/42 encoder tensors (FAIR MAE encoder + decoder (full or visualize), norm_pix" in lines[1]
    assert lines[2].endswith("loaded 32/32 decoder tensors: 2 blocks of width 32, 4 heads")
    assert lines[3].endswith("normalised pixels, as the recipe of small says")
    assert lines[4].endswith("18 of 36 patches hidden (random), seed 4")
    errors = [float(match[1]) for line in lines if (match := re.match(r"  (\d\.\d{4}) ", line))]
    assert errors[2] == pytest.approx(sum(errors[:2]) / 2, abs=1e-4)
    assert lines[7].endswith(r"two\n\x1b[31m.png")
    assert LEAK in report
    assert lines[-1] == f"  grid: {out}"
    with Image.open(out) as grid:
        assert grid.height > 2 * 112


def test_pictures_are_fitted_as_in_validation(tmp_path: Path) -> None:
    path = photo(tmp_path / "wide.png", (77, 31))
    for grid in ((6, 6), (8, 4)):
        expected = ValidationSamples(Pictures(Files([path])), grid, 4, values())[0][0]
        assert torch.equal(reconstruct._picture(path, (4 * grid[0], 4 * grid[1])), expected)


def test_masks_depend_on_seed_and_place_alone(tmp_path: Path) -> None:
    file, backbone = fair(tmp_path / "full.pth", model()), recipe(tmp_path)
    a, b = photo(tmp_path / "a.png", seed=1), photo(tmp_path / "b.png", seed=2)

    def errors(*images: Path, seed: int = 0) -> list[str]:
        report = reconstruct.run(backbone, images, weights=file, seed=seed, out=tmp_path / "grid.png")
        return re.findall(r"^  (\d\.\d{4}) ", report, re.MULTILINE)[:-1]

    alone, both = errors(a), errors(a, b)
    assert both[0] == alone[0]
    assert errors(b, a)[0] == errors(b)[0]
    assert errors(a, seed=1) != alone


def test_encoder_files_are_refused_with_the_file_to_take_instead(tmp_path: Path) -> None:
    mae = model()
    encoder = {key.removeprefix("encoder."): value for key, value in mae.state_dict().items() if "encoder." in key}
    torch.save({"model": encoder}, tmp_path / "mae_pretrain_vit_base.pth")
    with pytest.raises(UserError, match=r"a FAIR MAE pre-trained encoder .*: it has no decoder .* take a file with"):
        reconstruct.load_mae(recipes.load_backbone(recipe(tmp_path)), tmp_path / "mae_pretrain_vit_base.pth")
    renamed = recipes.load_backbone(recipe(tmp_path, file="mae_pretrain_vit_base.pth", name="vit_b_mae"))
    with pytest.raises(
        UserError,
        match=r"take --weights mae_pretrain_vit_base_full\.pth \(from https://example\.org/pretrain/\) "
        r"or --backbone vit_b_mae_pixel$",
    ):
        reconstruct.load_mae(renamed, tmp_path / "mae_pretrain_vit_base.pth")
    save_encoder(tmp_path / "encoder.safetensors", mae.encoder, {})
    with pytest.raises(UserError, match=r"give the mae\.safetensors that lies beside it"):
        reconstruct.load_mae(renamed, tmp_path / "encoder.safetensors")


def without(state: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != key}


DAMAGES: dict[str, Any] = {
    "lacks 1 tensors of a MAE decoder, first 'decoder_norm.bias'": lambda s: without(s, "decoder_norm.bias"),
    "lacks 1 tensors of a MAE decoder, first 'mask_token'": lambda s: without(s, "mask_token"),
    "lacks 12 tensors of a MAE decoder, first 'decoder_blocks.2.attn": lambda s: (
        s | {"decoder_blocks.7.norm1.weight": torch.ones(32)}
    ),
    "has unexpected 1 tensors of a MAE decoder, first 'decoder_extra'": lambda s: s | {"decoder_extra": torch.ones(1)},
    r"decoder_pred.weight is torch.float32 \(3, 3\), this decoder has \(48, 32\)": lambda s: (
        s | {"decoder_pred.weight": torch.ones(3, 3)}
    ),
    "mask_token is torch.int64": lambda s: s | {"mask_token": torch.ones(1, 1, 32, dtype=torch.int64)},
    "a decoder of width 30 cannot have the recipe's 4 heads": lambda s: (
        s | {"decoder_embed.weight": torch.ones(30, 48)}
    ),
    "a decoder of width 0 cannot have": lambda s: without(s, "decoder_embed.weight"),
}


@pytest.mark.parametrize("expected", DAMAGES)
def test_a_damaged_decoder_is_refused(expected: str, tmp_path: Path) -> None:
    state = {key.removeprefix("encoder."): value for key, value in model().state_dict().items()}
    torch.save({"model": DAMAGES[expected](state)}, tmp_path / "x.pth")
    with pytest.raises(UserError, match=expected):
        reconstruct.load_mae(recipes.load_backbone(recipe(tmp_path)), tmp_path / "x.pth")


def test_weights_that_are_not_finite_make_no_picture(tmp_path: Path) -> None:
    mae = model()
    torch.nn.init.constant_(mae.decoder_norm.bias, float("nan"))
    file = fair(tmp_path / "x.pth", mae)
    with pytest.raises(UserError, match="not finite"):
        reconstruct.run(recipe(tmp_path), [photo(tmp_path / "a.png")], weights=file, out=tmp_path / "grid.png")
    assert not (tmp_path / "grid.png").exists()


def test_half_a_query_is_refused(tmp_path: Path) -> None:
    path = hugging_face(tmp_path, model())
    state = load_file(path)
    save_file(without(state, "decoder.decoder_encoder.layer.0.attention.attention.key.weight"), path)
    with pytest.raises(UserError, match=r"decoder_blocks\.0\.attn\.qkv\.weight .* one is missing"):
        reconstruct.load_mae(recipes.load_backbone(recipe(tmp_path, "hf_vit_mae")), path)


@pytest.mark.parametrize(
    ("stated", "metadata", "expected"),
    [
        ({}, {"values": ""}, "does not say the values"),
        ({}, {"values": "[" * 9999}, "does not say the values"),
        ({}, {"backbone": "other"}, "was made with backbone = 'other'"),
        ({}, {"architecture": "{}"}, "was made with architecture = '{}'"),
        ({}, {"input": "{}"}, "was made with input = '{}'"),
        ({"decoder_depth": 10**9}, {}, "does not hold the model that its values say"),
        ({"decoder_width": 64}, {}, "does not hold the model that its values say"),
        ({"height": 4 * 10**9}, {}, "does not hold the model that its values say"),
        ({"target": "pca", "norm_pix": False}, {}, "target 'pca'; pictures are made of masked pixels"),
        ({"objective": "vae", "latent": 10**9}, {}, "objective 'vae'"),
    ],
)
def test_values_of_a_file_are_not_trusted(
    stated: dict[str, Any], metadata: dict[str, str], expected: str, tmp_path: Path
) -> None:
    file = own(tmp_path / "mae.safetensors", model(), values(**stated), **metadata)
    with pytest.raises(UserError, match=expected):
        reconstruct.load_mae(recipes.load_backbone(recipe(tmp_path)), file)


def test_backbones_without_a_picture_are_refused(tmp_path: Path) -> None:
    picture = [photo(tmp_path / "a.png")]
    for name in ("vit_b_scratch", "vit_b_dino", "vit_h_supervised"):
        with pytest.raises(UserError, match="is no Masked Autoencoder"):
            reconstruct.run(name, picture)
    with pytest.raises(UserError, match="names no target of pixels"):
        reconstruct.run(recipe(tmp_path, target="visual_tokens"), picture, weights=fair(tmp_path / "x.pth", model()))


def test_arguments_and_pictures_are_refused_by_name(tmp_path: Path) -> None:
    file, backbone = fair(tmp_path / "full.pth", model()), recipe(tmp_path)
    good, text, thin = photo(tmp_path / "a.png"), tmp_path / "b.png", photo(tmp_path / "thin.png", (1, 200_000))
    text.write_text("no picture")

    def run(*images: Path, **options: Any) -> None:
        reconstruct.run(backbone, images, **({"weights": file, "out": tmp_path / "grid.png"} | options))

    for images, options, expected in (
        ([good] * 33, {}, "33 pictures"),
        ([good], {"mask_ratio": float("nan")}, "--mask-ratio nan"),
        ([good], {"mask_ratio": 1.0}, "--mask-ratio 1.0"),
        ([good], {"mask_ratio": 0.999}, "leaves none of 36 patches visible"),
        ([good], {"out": tmp_path / "grid.jpg"}, "name it .png"),
        ([good], {"out": good}, "is one of the pictures"),
        ([good, text], {}, "cannot decode picture"),
        ([tmp_path / "absent.png"], {}, "cannot decode picture"),
        ([tmp_path], {}, "cannot decode picture"),
        ([thin], {}, "cut a part out of it"),
        ([good], {"weights": tmp_path / "absent.pth"}, "no such file"),
    ):
        with pytest.raises(UserError, match=expected):
            run(*images, **options)
    assert not (tmp_path / "grid.png").exists()
    run(photo(tmp_path / "tiny.png", (1, 1)))
    assert (tmp_path / "grid.png").is_file()


def test_a_recipe_takes_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_BENCH_WEIGHTS", str(tmp_path))
    fair(tmp_path / "meant.pth", model(norm_pix=False))
    report = reconstruct.run(recipe(tmp_path, target="pixel"), [photo(tmp_path / "a.png")], out=tmp_path / "grid.png")
    assert "standardised pixels" in report
    assert LEAK not in report
