"""Encoders of every architecture that an export may meet, and what proves an export, for the tests of exports."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import transformers
from checkpoint_files import INPUT
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from mae_bench.checkpoints.export import export
from mae_bench.checkpoints.layouts import FORMAT
from mae_bench.checkpoints.load import build_encoder, save_model
from mae_bench.encoders.vit import Encoder
from mae_bench.schema import Architecture, Backbone, MadeWeights

PLAIN = Architecture(patch=4, width=24, depth=2, heads=3, image_size=20)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "learned": {"positions": "learned"},
    "no class token": {"class_token": False},
    "no class position": {"class_position": False, "resize": "timm"},
    "registers": {"registers": 4, "layer_scale": True, "resize": "dinov2_registers"},
    "registers, no class position": {"registers": 2, "class_position": False},
    "layer scale": {"layer_scale": True, "resize": "dinov2"},
    "swiglu": {"mlp": "swiglu", "mlp_ratio": 64 / 24},
    "swiglu, layer scale": {"mlp": "swiglu", "mlp_ratio": 2.0, "layer_scale": True},
    "pooled norm": {"final_norm": "pooled"},
    "no norm": {"final_norm": "none"},
    "narrow mlp": {"mlp_ratio": 31 / 24},
    "a ratio that falls short": {"width": 28, "heads": 4, "mlp_ratio": 61 / 28},  # int(28 * (61 / 28)) is 60
}


def variant(name: str) -> Architecture:
    return Architecture(**(PLAIN.model_dump() | VARIANTS[name]))


def made(architecture: Architecture, **changes: Any) -> Backbone:
    weights = MadeWeights(kind="made", task="tiny_pretrain")
    fields: dict[str, Any] = {"name": "small", "size": "t", "init": "mae", "summary": "Small.", "input": INPUT}
    return Backbone(**(fields | {"architecture": architecture, "weights": weights} | changes))


def own_file(path: Path, architecture: Architecture, **metadata: str) -> Path:
    """An encoder of our own whose every tensor is random, so that none that is left out goes unseen."""
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(value.shape, generator=generator) * 0.2
        for name, value in Encoder(architecture).state_dict().items()
    }
    own = {"format": FORMAT, "architecture": architecture.model_dump_json(), "task": "tiny_pretrain"}
    save_model(path, state, own | metadata)
    return path


def images(architecture: Architecture = PLAIN) -> Tensor:
    side = architecture.image_size
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))


def ours(file: Path, recipe: Backbone) -> tuple[Encoder, Tensor]:
    encoder, _ = build_encoder(recipe, file, seed=0)
    with torch.no_grad():
        return encoder, encoder.eval().tokens(images(recipe.architecture))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def same(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Same names, and every tensor the same to the bit, its type included."""
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert value.dtype == others[name].dtype and torch.equal(value, others[name]), name


@contextmanager
def silence(*names: str) -> Iterator[None]:
    """No warning may be logged by these libraries; transformers does not hand its own to pytest."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)
    assert records == []


def in_timm(folder: Path) -> VisionTransformer:
    """What timm makes of an export: from the folder, and the same from the file alone."""
    with silence("timm"):
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        config = json.loads((folder / "config.json").read_text())
        path = folder / "model.safetensors"
        again = timm.create_model(config["architecture"], checkpoint_path=path, **config["model_args"])
    same(dict(model.state_dict()), dict(again.state_dict()))
    return model


def check_timm(file: Path, recipe: Backbone, folder: Path) -> VisionTransformer:
    """Export for timm; the features are ours to 1e-5, the tensors to the bit, but for a class token that has taken its
    position."""
    architecture = recipe.architecture
    export(file, recipe, "timm", folder)
    model = in_timm(folder)
    encoder, tokens = ours(file, recipe)
    with torch.no_grad():
        close(model.forward_features(images(architecture)), tokens)
        pool: Literal["cls", "mean"] = "cls" if model.global_pool == "token" else "mean"
        close(model(images(architecture)), encoder.pooled(tokens, pool))
    state, own = load_file(folder / "model.safetensors"), dict(encoder.state_dict())
    if architecture.registers and architecture.class_position:
        close(state.pop("cls_token"), own.pop("cls_token") + own["pos_embed"][:, :1])
        own["pos_embed"] = own["pos_embed"][:, 1:]
    same(state, own)
    return model


def in_hf(folder: Path) -> transformers.ViTModel:
    """What transformers makes of an export: nothing is missing or left over."""
    with silence("transformers"):
        model, told = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


def check_hf(file: Path, recipe: Backbone, folder: Path) -> None:
    """Export for transformers; the features are ours to 1e-5."""
    export(file, recipe, "hf", folder)
    _, tokens = ours(file, recipe)
    with torch.no_grad():
        close(in_hf(folder)(images(recipe.architecture)).last_hidden_state, tokens)
