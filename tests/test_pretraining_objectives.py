"""The axes of MAE's Table 1 and the classical autoencoders, each against a plain computation."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_pretraining_mae import ARCHITECTURE, STATISTICS, batch, perturbed, values
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from mae_bench.encoders.vit import Encoder
from mae_bench.errors import UserError
from mae_bench.pretraining.mae import MaskedAutoencoder, patchify
from mae_bench.pretraining.objectives import build_model
from mae_bench.pretraining.targets import Components

WHOLE = {"mask_ratio": 0.0, "loss_on": "all"}


def build(**changes: object) -> MaskedAutoencoder:
    encoder = Encoder(ARCHITECTURE, frozen_positions=True)
    encoder.initialise(0)
    return perturbed(build_model(encoder, STATISTICS, values(**changes), 0))


def loss(model: MaskedAutoencoder, extra: Tensor | None = None) -> Tensor:
    out: Tensor = model(*batch(), extra, mode="loss")["loss"]
    return out


def test_a_loss_on_all_patches_is_the_mean_over_all() -> None:
    model = build(loss_on="all")
    images, noise = batch()
    target = model.target.of(patchify(images, 4))
    torch.testing.assert_close(loss(model), (model(images, noise) - target).square().mean())


@pytest.mark.parametrize("loss_on", ["masked", "all"])
def test_mask_tokens_in_the_encoder(loss_on: str) -> None:
    """Table 1c, computed in raster order: hidden patches are a token with a position, and the decoder adds none."""
    model = build(mask_tokens="encoder", loss_on=loss_on)
    images, noise = batch()
    encoder, hidden = model.encoder, model.masking(noise).mask.bool().unsqueeze(-1)
    tokens = torch.where(hidden, model.mask_token, encoder.patch_embed(images)) + encoder.pos_embed[:, 1:]
    x = model.decoder_embed(encoder.encode(encoder.with_prefix(tokens))) + model.decoder_pos_embed
    for block in model.decoder_blocks:
        x = block(x)
    predicted = model.decoder_pred(model.decoder_norm(x))[:, 1:]
    torch.testing.assert_close(model(images, noise), predicted, rtol=0, atol=1e-5)
    error = (predicted - model.target.of(patchify(images, 4))).square().mean(-1, keepdim=True)
    torch.testing.assert_close(loss(model), error[hidden].mean() if loss_on == "masked" else error.mean())
    assert model.mask_token.shape[-1] == encoder.width


def test_bert_style_masking_needs_no_decoder_block() -> None:
    model = build(mask_tokens="encoder", mask_ratio=0.15, decoder_depth=0)
    loss(model).backward()
    assert model.keep == 30 and len(model.decoder_blocks) == 0
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("predict", [1.0, 0.25])
def test_a_cross_decoder_predicts_a_share_of_the_hidden_patches(predict: float) -> None:
    model = build(decoder="cross", predict=predict)
    images, noise = batch()
    masking = model.masking(noise)
    count = round(27 * predict)
    error = masking.shuffled((model(images, noise) - model.target.of(patchify(images, 4))).square())
    torch.testing.assert_close(loss(model), error[:, 9 : 9 + count].mean())
    assert not masking.shuffled(model(images, noise))[:, :9].any()
    loss(model).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_principal_components_are_those_of_a_singular_value_decomposition() -> None:
    patches = torch.randn(500, 12, generator=torch.Generator().manual_seed(2)) @ torch.diag(torch.arange(1.0, 13))
    target = Components(12, 5)
    target.fit(patches + 3)
    _, _, vectors = np.linalg.svd((patches - patches.mean(0)).double().numpy(), full_matrices=False)
    expected = (patches - patches.mean(0)).double().numpy() @ vectors[:5].T
    np.testing.assert_allclose(np.abs(target.of(patches + 3).numpy()), np.abs(expected), atol=1e-3)
    again = Components(12, 5)
    again.fit(patches.flip(0) + 3)
    torch.testing.assert_close(again.basis, target.basis, rtol=0, atol=1e-5)


def test_too_few_patches_for_the_components() -> None:
    with pytest.raises(UserError, match="11 patches do not determine the components of 12 values"):
        Components(12, 5).fit(torch.randn(11, 12))


def test_a_model_that_predicts_components() -> None:
    model = build(target="pca", pca=10, norm_pix=False)
    model.target.fit(patchify(batch(count=10)[0], 4).flatten(0, 1))
    assert model(*batch()).shape == (5, 36, 10)
    assert "target.basis" in model.state_dict()
    blank = model.blank_loss(*batch())
    assert loss(model) > 0 and math.isfinite(blank)


TOKENIZER = """
import torch

class Brightness:
    vocabulary = 7
    def __call__(self, images, grid):
        assert 0 <= images.min() and images.max() <= 1
        pooled = torch.nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), grid)
        return (pooled.flatten(1) * self.vocabulary).long().clamp(max=self.vocabulary - 1)

brightness = Brightness()
wrong = Brightness()
wrong.__class__ = type("Wrong", (Brightness,), {"__call__": lambda self, images, grid: torch.zeros(1)})
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution that offers two tokenizers."""
    (tmp_path / "toy_tokenizer.py").write_text(TOKENIZER)
    info = tmp_path / "toy_tokenizer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-tokenizer\nVersion: 1.0\n")
    entries = "brightness = toy_tokenizer:brightness\nwrong = toy_tokenizer:wrong\n"
    (info / "entry_points.txt").write_text(f"[mae_bench.tokenizers]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_tokenizer", raising=False)


@pytest.mark.usefixtures("installed")
def test_tokens_of_an_installed_tokenizer() -> None:
    model = build(target="tokens", tokenizer="brightness", norm_pix=False)
    images, noise = batch()
    pixels = ((images * model.data_preprocessor.std + model.data_preprocessor.mean) / 255).clamp(0, 1)
    tokens = model.target.of_images(pixels, (6, 6))[..., 0]
    nats = torch.nn.functional.cross_entropy(model(images, noise).transpose(1, 2), tokens, reduction="none")
    torch.testing.assert_close(loss(model), nats[model.masking(noise).mask.bool()].mean())
    torch.testing.assert_close(model.blank_loss(images, noise), torch.tensor(math.log(7)))


@pytest.mark.usefixtures("installed")
def test_a_tokenizer_that_is_not_there_or_wrong() -> None:
    with pytest.raises(UserError, match=r"'brightnes' is no entry point .*did you mean 'brightness'"):
        build(target="tokens", tokenizer="brightnes", norm_pix=False)
    with pytest.raises(UserError, match=r"whole numbers below 7 of shape \(5, 36\)"):
        loss(build(target="tokens", tokenizer="wrong", norm_pix=False))


def test_an_autoencoder_sees_and_predicts_everything() -> None:
    model = build(objective="autoencoder", **WHOLE)
    images, noise = batch()
    torch.testing.assert_close(
        loss(model), (model(images, noise) - model.target.of(patchify(images, 4))).square().mean()
    )
    assert "mask_token" not in dict(model.named_parameters())
    torch.testing.assert_close(model(images, noise), model(images, noise.flip(1)), rtol=0, atol=1e-5)


def test_denoising_is_an_autoencoder_of_noisy_images_with_clean_targets() -> None:
    images, noise = batch()
    extra = torch.cat([torch.randn(5, 3, 24, 24), torch.rand(5, 1, 24, 24)], dim=1)
    model = build(objective="denoising", noise=0.5, drop=0.3, **WHOLE)
    noisy = images + 0.5 * extra[:, :3]
    noisy[(extra[:, 3:] < 0.3).expand_as(noisy)] = 0
    predicted = build(objective="autoencoder", **WHOLE)(noisy, noise)
    torch.testing.assert_close(loss(model, extra), (predicted - model.target.of(patchify(images, 4))).square().mean())


def test_the_elbo() -> None:
    """Squared error of a reparameterised sample, and torch's own divergence of the two normal distributions."""
    model = build(objective="vae", latent=6, kl_weight=0.3, norm_pix=False, **WHOLE)
    images, noise = batch()
    extra = torch.randn(5, 36, 6, generator=torch.Generator().manual_seed(4))
    masking = model.masking(noise)
    tokens = model.encode(masking.shuffled(patchify(images, 4)), masking)
    mean, log_variance = model.code_head(tokens[:, 1:]).chunk(2, dim=-1)
    posterior = Normal(mean, (log_variance / 2).exp())
    nats = kl_divergence(posterior, Normal(0.0, 1.0)).sum(-1).mean()
    decoded = model.decode(posterior.mean + posterior.stddev * extra, masking, 0)
    predicted = model.decoder_pred(model.decoder_norm(decoded))
    error = (predicted - masking.shuffled(patchify(images, 4))).square().mean()
    torch.testing.assert_close(loss(model, extra), error + 0.3 * nats / 48, rtol=1e-5, atol=1e-6)
    loss(model, extra).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": 4}, "latent = 4 is read by objective 'vae' alone"),
        ({"noise": 0.5}, "noise = 0.5 is read by objective 'denoising' alone"),
        ({"pca": 12}, "pca = 12 is read by target 'pca' alone"),
        ({"predict": 0.5}, "predict = 0.5 is read by decoder 'cross' alone"),
        ({"objective": "autoencoder"}, "sees and predicts all: set mask_ratio = 0"),
        ({"objective": "autoencoder", "sampling": "grid", **WHOLE}, "sampling = 'grid' is read by objective 'masked'"),
        ({"objective": "denoising", **WHOLE}, "needs noise or drop above 0"),
        ({"objective": "vae", "latent": 4, **WHOLE}, "needs latent and kl_weight above 0"),
        ({"target": "tokens", "norm_pix": False}, "needs an external tokenizer"),
        ({"target": "pca"}, "norm_pix normalises the target 'pixels' alone"),
        ({"decoder": "cross", "loss_on": "all"}, "predicts hidden patches alone"),
        ({"decoder": "cross", "mask_tokens": "encoder"}, "decoder = 'cross' is read by"),
        ({"decoder": "cross", "decoder_depth": 0}, "needs decoder_depth above 0"),
        ({"mask_ratio": 0.0}, "leaves none of 36 patches masked"),
    ],
)
def test_values_that_nothing_reads_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(**changes)


def test_images_that_are_not_square() -> None:
    encoder = Encoder(ARCHITECTURE, grid=(4, 9), frozen_positions=True)
    encoder.initialise(0)
    model = build_model(encoder, STATISTICS, values(), 0)
    images, noise = torch.randn(2, 3, 16, 36), torch.rand(2, 36)
    assert model(images, noise).shape == (2, 36, 48)
    assert torch.isfinite(model(images, noise, mode="loss")["loss"])
