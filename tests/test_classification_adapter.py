"""The classifier: pooling, norms, what is frozen, and parity with timm's ViT."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from classification_toys import finetune, linear
from engine_toys import MEAN, STD, make_backbone, make_values
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F

from mae_bench.classification.adapter import Classifier, Preprocessor, needs_fc_norm
from mae_bench.encoders.vit import Encoder
from mae_bench.engine.seeds import seed_all
from mae_bench.schema import ClassificationValues

BACKBONE = make_backbone()


def _classifier(values: ClassificationValues, classes: int = 3) -> Classifier:
    encoder = Encoder(BACKBONE.architecture, final_norm=not needs_fc_norm(values), drop_path=values.drop_path)
    encoder.initialise(0)
    return Classifier(encoder, values, classes, BACKBONE.input, seed=0)


def _timm(pool: str, **options: Any) -> VisionTransformer:
    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3, global_pool=pool, **options
    )


@pytest.mark.parametrize(("mode", "pool", "theirs"), [("finetune", "mean", "avg"), ("finetune", "cls", "token")])
def test_logits_equal_timms_vit(mode: str, pool: str, theirs: str) -> None:
    model = _classifier(make_values(mode=mode, pool=pool)).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    reference = _timm(theirs, fc_norm=pool == "mean").eval()
    names = {name: re.sub(r"^encoder\.", "", name) for name in model.state_dict()}
    reference.load_state_dict({names[name]: tensor for name, tensor in model.state_dict().items()}, strict=True)
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(model(images), reference(images), rtol=1e-5, atol=1e-5)


def test_registers_are_not_averaged_and_a_pooled_norm_comes_after_the_mean() -> None:
    architecture = make_backbone(registers=3, final_norm="pooled").architecture
    encoder = Encoder(architecture)
    encoder.initialise(0)
    torch.nn.init.normal_(encoder.fc_norm.weight)
    model = Classifier(encoder, linear(pool="mean", head_norm=False), 3, BACKBONE.input, seed=0).eval()
    images = torch.randn(4, 3, 8, 8)
    tokens = encoder.tokens(images)
    assert tokens.shape == (4, 1 + 3 + 4, 16)
    normed = F.layer_norm(tokens[:, 4:].mean(1), (16,), encoder.fc_norm.weight, encoder.fc_norm.bias, eps=1e-6)
    torch.testing.assert_close(model.features(images), normed)
    assert (model.features(images) - encoder.fc_norm(tokens[:, 1:].mean(1))).abs().max() > 1e-3


def test_the_probe_is_norm_and_linear_layer_on_the_final_norm() -> None:
    model = _classifier(linear()).eval()
    model.head_norm.running_mean.normal_()
    model.head_norm.running_var.uniform_(0.5, 2)
    images = torch.randn(4, 3, 8, 8)
    for pool in ("cls", "mean"):
        model.pool = pool
        tokens = model.encoder.tokens(images)
        pooled = tokens[:, 0] if pool == "cls" else tokens[:, 1:].mean(1)
        normed = (pooled - model.head_norm.running_mean) / (model.head_norm.running_var + 1e-6).sqrt()
        torch.testing.assert_close(model(images), F.linear(normed, model.head.weight, model.head.bias))


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_nothing_random_is_frozen_in_a_probe(pool: str) -> None:
    model = _classifier(linear(pool=pool))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"encoder.{name}" for name, _ in model.encoder.named_parameters()}
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {
        "head.weight",
        "head.bias",
    }
    with pytest.raises(ValueError, match="final norm"):
        Classifier(Encoder(BACKBONE.architecture, final_norm=False), linear(pool=pool), 3, BACKBONE.input, 0)


def test_the_frozen_encoder_stays_in_eval_mode_and_keeps_no_graph() -> None:
    model = _classifier(linear()).train()
    assert model.head_norm.training
    assert not any(module.training for module in model.encoder.modules())
    loss = model(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]), mode="loss")["loss"]
    loss.backward()
    assert all(parameter.grad is None for parameter in model.encoder.parameters())
    assert model.head.weight.grad is not None


def test_everything_trains_in_fine_tuning() -> None:
    model = _classifier(finetune(drop_path=0.0)).train()
    model.head.weight.data.normal_()
    model(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]), mode="loss")["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0 or name.endswith("qkv.bias"), name
    assert "encoder.pos_embed" in dict(model.named_parameters())


def test_head_initialisation() -> None:
    model = _classifier(make_values(head_init_std=0.01), classes=1000)
    assert model.head.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not model.head.bias.any()
    torch.testing.assert_close(model.head.weight, _classifier(make_values(head_init_std=0.01), 1000).head.weight)


def _batch(n: int = 8) -> dict[str, torch.Tensor]:
    images = torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return {"inputs": images, "data_samples": torch.arange(n) % 3}


def test_images_are_normalised_with_the_backbones_statistics() -> None:
    data = Preprocessor(finetune(), 3, BACKBONE.input)(_batch())
    expected = (_batch()["inputs"].numpy() / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    np.testing.assert_allclose(data["inputs"].numpy(), expected, atol=1e-5)
    assert torch.equal(data["data_samples"], _batch()["data_samples"])


def test_smoothing_alone_equals_torchs() -> None:
    logits = torch.randn(8, 3)
    data = Preprocessor(make_values(label_smoothing=0.1), 3, BACKBONE.input)(_batch(), True)
    expected = F.cross_entropy(logits, _batch()["data_samples"], label_smoothing=0.1)
    torch.testing.assert_close(F.cross_entropy(logits, data["data_samples"]), expected)


def test_mixing_smooths_once() -> None:
    labels = _batch()["data_samples"]
    smooth = F.one_hot(labels, 3) * 0.9 + 0.1 / 3
    preprocess = Preprocessor(finetune(erasing=0.0), 3, BACKBONE.input)
    plain = Preprocessor(make_values(), 3, BACKBONE.input)(_batch())["inputs"]
    for seed in range(8):
        seed_all(seed)
        data = preprocess(_batch(), True)
        targets = data["data_samples"]
        # Targets are share * own + (1 - share) * partner's, for one share in the whole batch.
        rows = (labels != labels.flip(0)).nonzero()[:, 0]
        own, partner = smooth[rows, labels[rows]], smooth.flip(0)[rows, labels[rows]]
        share = (targets[rows, labels[rows]] - partner) / (own - partner)
        assert share.max() - share.min() < 1e-5
        torch.testing.assert_close(targets, share[0] * smooth + (1 - share[0]) * smooth.flip(0))
        mixed = (data["inputs"] - plain).abs() > 1e-6
        assert mixed.any()
        # CutMix leaves pixels alone, and its share is that of the pixels it left.
        if not mixed.any(dim=(0, 1)).all():
            assert 1 - mixed.any(dim=(0, 1)).float().mean() == pytest.approx(share[0].item(), abs=1e-5)


def test_erasing_fills_normalised_pixels_with_unit_noise() -> None:
    preprocess = Preprocessor(make_values(erasing=1.0), 3, BACKBONE.input)
    black = {"inputs": torch.zeros(200, 3, 32, 32, dtype=torch.uint8), "data_samples": torch.zeros(200).long()}
    seed_all(0)
    images = preprocess(black, True)["inputs"]
    untouched = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)]).view(3, 1, 1)
    erased = images[(images - untouched).abs() > 1e-5]
    assert 0.02 < len(erased) / images.numel() < 1 / 3
    assert erased.mean().item() == pytest.approx(0, abs=0.02)
    assert erased.std().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(preprocess(black)["inputs"], preprocess(black)["inputs"])


def test_batch_statistics_are_used_in_training_and_running_ones_in_evaluation() -> None:
    model = _classifier(linear(head_init_std=1.0)).train()
    images = 3 + torch.randn(16, 3, 8, 8)
    features = model.features(images)
    torch.testing.assert_close(features.mean(0), torch.zeros(16), atol=1e-5, rtol=0)
    assert isinstance(model.head_norm, nn.BatchNorm1d)
    assert not model.head_norm.affine
    before = model.head_norm.running_mean.clone()
    model.eval()(images)
    assert torch.equal(before, model.head_norm.running_mean)
